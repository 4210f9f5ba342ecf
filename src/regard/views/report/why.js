// Where a number comes from: the open cell, the trail to it and the numbers that made it.

import { formatNumber } from "./numbers.js";
import {
  asNumpy,
  asText,
  cellName,
  cut,
  derive,
  emptyWords,
  meaning,
  remarks,
  ruleLines,
} from "./derivation.js";
import { bdi, button, fill, find, h, nameOf, typeset, why } from "./elements.js";
import { comparable, doing, extras, labels, runs, state } from "./shown.js";
import { placeOf } from "./tables.js";
import { hiddenBy } from "./visibility.js";
import { DIGITS, equation, shortName, sidesOf, termTable } from "./operands.js";
import { editField, maskField } from "./change.js";
import { expectedOf } from "./summary.js";

export function derivation() {
  return state.cell && runs.now.steps.has(state.cell.step)
    ? derive(runs.now, labels, state.cell.step, state.cell.index)
    : null;
}

// Outline the open cell and its operands in their tables.
let marked = [];
export function mark() {
  for (const td of marked) {
    td.classList.remove("open", "first", "second", "pointed");
    td.removeAttribute("aria-selected");
  }
  marked = [];
  const light = (td, kind) => {
    td?.classList.add(kind);
    if (td) marked.push(td);
  };
  const found = derivation();
  if (!found) return;
  const sides = sidesOf(found);
  for (const [k, operand] of found.operands.entries()) light(placeOf(operand)?.td, sides[k]);
  const own = state.cell && placeOf(state.cell)?.td;
  light(own, "open");
  own?.setAttribute("aria-selected", "true");
}

export function showWhy(focus = "") {
  mark();
  const found = derivation();
  why.hidden = false;
  why.classList.toggle("empty", !found);
  document.body.classList.toggle("opened", Boolean(found));
  if (!found) return fill(why, hint());
  fill(
    why,
    trail(),
    heading(found),
    expected(found),
    was(found),
    body(found),
    maskField(found),
    editField(found),
    extras.map((one) => one.panel?.(found)),
    asOtherText(found),
  );
  why.scrollTop = 0;
  find(".live").textContent = spoken(found);
  const wanted = { operand: ".operand, .turn", turn: ".turn", heading: "h2" }[focus];
  if (wanted) (find(wanted, why) ?? find("h2", why)).focus({ preventScroll: true });
}

const hint = () =>
  h(
    "p.hint",
    "Choose any number to see the numbers that made it: click it, or go there with ",
    h("kbd", "Tab"),
    " and the arrow keys and press ",
    h("kbd", "Enter"),
    ".",
  );

// The sentence for those who hear the page.
function spoken({ step, labels: names, value, operands, verdicts }) {
  const rules = verdicts.flatMap(hiddenBy).map((name) => cut(name, 80));
  const made = rules.length ? `Hidden by ${rules.join(", ")}.` : `${operands.length} operands.`;
  return `${cut(cellName(step.symbol, names), 80)} is ${formatNumber(value, DIGITS)}. ${step.formula}. ${made}`;
}

// The way to the open cell: a button for each cell before it.
function trail() {
  const before = state.trail.slice(0, -1).map((cell, k) => {
    const step = runs.now.steps.get(cell.step);
    const open = () => {
      state.trail.length = k;
      doing.open(cell, { focus: "heading" });
    };
    if (!step) return "";
    const { labels: names } = derive(runs.now, labels, cell.step, cell.index);
    return button(shortName({ symbol: step.symbol, labels: names }, 16), open);
  });
  const shortened = before.length > 6 ? [before[0], "…", ...before.slice(-5)] : before;
  return h(
    "div.trail",
    before.length > 0 && button("← back", () => doing.back("heading"), { class: "back" }),
    shortened.map((one) => [one, h("span", { "aria-hidden": "true" }, "›")]),
    button("×", () => doing.close(), { class: "close", "aria-label": "close" }),
  );
}

function heading(found) {
  const { step, labels: names, value } = found;
  const meant = meaning(found, DIGITS);
  return [
    h("h2", { tabindex: -1 }, nameOf(step.symbol, names)),
    h("p.value", formatNumber(value, DIGITS)),
    h("p.formula-line", step.name, " · ", h("span.formula", typeset(step.formula))),
    meant && h("p.meaning", `${meant[0].toUpperCase()}${meant.slice(1)}.`),
  ];
}

function expected({ step, index }) {
  const found = expectedOf({ step: step.name, index });
  if (!found) return [];
  const { wanted, verdict } = found;
  if (!verdict) return h("p.expected", `${wanted} is expected for the numbers given`);
  return h(`p.expected.${verdict}`, `${wanted} is expected: `, h("b", verdict));
}

// The number before anything was changed.
function was({ step, index, value }) {
  if (!runs.touched || !comparable(step.name)) return [];
  const before = runs.plain.value(step.name, index);
  if (Object.is(before, value)) return [];
  const apart = value - before;
  const words = `; it ${apart > 0 ? "rose" : "fell"} by ${formatNumber(Math.abs(apart), DIGITS)}`;
  const change = Number.isFinite(apart) && words;
  return h("p.was", `It was ${formatNumber(before, DIGITS)} before the changes`, change);
}

function body(found) {
  const { step, terms, value, hidden } = found;
  const remark = (words) => h("p.remark", words);
  const lines = ruleLines(found).map((line) => h("li", bdi(line)));
  const rules = lines.length > 0 && h("ul.rules", lines);
  const said = remarks(found, DIGITS).map(remark);
  if (step.op === "given") return remark("A given number: nothing lies behind it.");
  if (step.op === "visible") return rules;
  if (step.operation.total && !hidden)
    return terms.length ? [termTable(found), said] : remark(emptyWords(found, DIGITS));
  if (hidden) return [remark(`hidden, so ${formatNumber(value, DIGITS)}`), rules];
  return [equation(found), said];
}

function asOtherText(found) {
  const details = h("details", h("summary", "as text, and as NumPy"));
  details.addEventListener("toggle", () => {
    if (details.children.length > 1) return;
    for (const text of [asText(found, DIGITS), asNumpy(found)])
      details.append(h("pre", { tabindex: 0 }, text));
  });
  return details;
}
