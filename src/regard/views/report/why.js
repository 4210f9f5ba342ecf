// Where a number comes from: the open cell, the trail to it and the numbers that made it.

import { formatNumber } from "./numbers.js";
import {
  asLatex,
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
import { bdi, button, fill, find, h, nameOf, stage, typeset, why } from "./elements.js";
import { comparable, doing, extras, labels, runs, shown, state } from "./shown.js";
import { MOST, placeOf } from "./stations.js";
import { overlay, repaint, sheet, shelf } from "./stage.js";
import { hiddenBy } from "./visibility.js";
import { equation, shortName, sidesOf, termTable } from "./operands.js";
import { editField, maskField } from "./change.js";
import { expectedOf } from "./summary.js";

export function derivation() {
  return state.cell && runs.now.steps.has(state.cell.step)
    ? derive(runs.now, labels, state.cell.step, state.cell.index)
    : null;
}

// Which station a step belongs to, and so which copies of its factors.
const stationOf = (name) =>
  [...shown.values()].find((view) => !view.copy && (view.station === name || view.inside.includes(name)))
    ?.name ?? name;

// The pixels of some cells of a station.
function boxOf(view, [top, left, bottom, right]) {
  let { x, y } = view;
  if (view.shelved) {
    const [origin, own] = [sheet, view.cells?.[0] ?? view.canvas].map((one) => one.getBoundingClientRect());
    [x, y] = [own.left - origin.left, own.top - origin.top];
  }
  const size = { w: (right - left + 1) * view.u, h: (bottom - top + 1) * view.tall };
  return { x: x + left * view.u, y: y + top * view.tall, ...size };
}

function drawn(kind, { x, y, w, h: height }) {
  const box = h(`div.mark.${kind}`);
  box.style.cssText = `left:${x}px;top:${y}px;width:${w}px;height:${height}px`;
  return box;
}

// Where a factor is on the picture; of a step on the way to the table, the numbers that it is made of.
function placesOf({ step, index }, user) {
  const at = placeOf({ step, index }, user);
  if (at) return [at];
  if (state.backwards || !shown.get(user)?.inside.includes(step)) return [];
  const { operands, terms } = derive(runs.now, labels, step, index);
  const own = terms.length ? operands : operands.filter((one) => one.index.length === index.length);
  const ends = own.length > MOST ? [own[0], own.at(-1)] : own; // an outline needs no more
  return ends.flatMap((one) => placesOf(one, user));
}

// Outline a number, the row and the column that made it, and the way from these to it.
let marked = [];
/** @param {Cell | null} [pointed] */
export function mark(pointed = null) {
  for (const cell of marked) cell.classList.remove("open", "first", "second", "pointed");
  marked = [];
  const cell = pointed ?? state.cell ?? (state.touched ? null : preview());
  const found = cell && runs.now.steps.has(cell.step) && derive(runs.now, labels, cell.step, cell.index);
  const own = found && placeOf(cell);
  fill(overlay);
  if (!own) return;
  const sides = sidesOf(found);
  const user = stationOf(found.step.of || found.step.name);
  const spans = new Map();
  for (const [k, operand] of found.operands.entries()) {
    for (const { view, row, column, cell } of placesOf(operand, user)) {
      const key = `${view.name} ${sides[k]}`;
      const [top, left, bottom, right] = spans.get(key)?.span ?? [Infinity, Infinity, 0, 0];
      const span = [Math.min(top, row), Math.min(left, column), Math.max(bottom, row), Math.max(right, column)];
      spans.set(key, { view, side: sides[k], span });
      if (cell) marked.push(cell) && cell.classList.add(sides[k]);
    }
  }
  if (own.cell) marked.push(own.cell) && own.cell.classList.add("open");
  const here = boxOf(own.view, [own.row, own.column, own.row, own.column]);
  const quiet = !pointed && !state.cell;
  const edge = shelf.getBoundingClientRect().right; // beyond it a step is scrolled out of sight
  for (const { view, side, span } of spans.values()) {
    if (view.shelved && view.section.getBoundingClientRect().left > edge) continue;
    const box = boxOf(view, span);
    const across = Math.abs(box.y - here.y) < 1 && box.x < here.x;
    const down = Math.abs(box.x - here.x) < 1 && box.y < here.y;
    if (across) overlay.append(drawn("path", { ...here, x: box.x + box.w, w: here.x - box.x - box.w }));
    if (down) overlay.append(drawn("path", { ...here, y: box.y + box.h, h: here.y - box.y - box.h }));
    overlay.append(drawn(side, box));
  }
  overlay.append(drawn("open", here));
  overlay.classList.toggle("quiet", quiet);
}

// While a gradient is open, its factors from the forward pass are shown as such.
function showFactors(found) {
  const names = (found?.operands ?? []).map(({ step }) => step);
  const forward = state.backwards ? names.filter((name) => runs.now.steps.get(name).phase === "forward") : [];
  const before = [...state.forward].join();
  state.forward = new Set(forward);
  if (before !== [...state.forward].join()) repaint();
}

// Before anything is chosen, the largest score shows what the picture is made of.
function preview() {
  const weights = shown.get("weights");
  const view = weights && shown.get(weights.source);
  if (!view || view.big || state.backwards || state.walk !== null) return null;
  /** @type {any} */
  let best = null;
  for (let row = 0; row < view.rows; row++)
    for (const [column, value] of runs.now.row(view.step.name, view.own ?? 0, row).entries())
      if (value > (best?.value ?? -Infinity)) best = { value, index: view.index(row, column) };
  return best && { step: view.step.name, index: best.index };
}

// The sum is right of its number, or below it, where its factors are on the other sides; of seven places
// it takes the one that covers least of these, and of what can be switched.
function placeWhy() {
  const at = state.cell && placeOf(state.cell);
  const floats = at && sheet.dataset.kind === "wide";
  why.classList.toggle("floats", Boolean(floats));
  why.style.cssText = "";
  if (!floats) return;
  const here = boxOf(at.view, [at.row, at.column, at.row, at.column]);
  const [left, right] = [stage.scrollLeft + 8, stage.scrollLeft + stage.clientWidth - 8];
  const [width, height] = [why.offsetWidth, why.offsetHeight];
  const inside = (x) => Math.max(left, Math.min(x, right - width));
  const floor = stage.scrollTop + innerHeight - 50;
  const [beside, level] = [here.x + here.w + 10, Math.max(4, Math.min(here.y - 12, floor - height))];
  const under = here.y + here.h + 8;
  /** @type {[number, number][]} */
  const choices = [
    [beside, level],
    [beside, Math.max(4, Math.min(level, here.y + here.h - height))],
    [inside(here.x), under],
    [inside(here.x - width - 10), level],
    [inside(here.x), Math.max(4, here.y - height - 8)],
    [inside(here.x - width - 10), under],
    [inside(here.x - width - 10), Math.max(4, here.y - height - 8)],
  ];
  const origin = sheet.getBoundingClientRect();
  const taken = [...overlay.children, ...sheet.querySelectorAll(".what-if")];
  const covered = ([x, y]) =>
    Math.max(0, x + width - right) * height +
    Math.max(0, y + height - floor) * width +
    taken.reduce((sum, one) => {
      const box = one.getBoundingClientRect();
      const worth = one.parentNode === overlay ? 4 : 1;
      const [l, t] = [box.left - origin.left, box.top - origin.top];
      const wide = Math.min(x + width, l + box.width) - Math.max(x, l);
      return sum + worth * Math.max(0, wide) * Math.max(0, Math.min(y + height, t + box.height) - Math.max(y, t));
    }, 0);
  const [x, y] = choices.reduce((best, one) => (covered(one) < covered(best) ? one : best));
  why.style.cssText = `left:${x}px;top:${y}px`;
}

export function showWhy(focus = "") {
  const found = derivation();
  showFactors(found);
  mark();
  why.hidden = !found;
  document.body.classList.toggle("opened", Boolean(found));
  if (!found) return fill(why);
  if (why.parentNode !== sheet) sheet.append(why);
  fill(
    why,
    trail(),
    heading(found),
    expected(found),
    was(found),
    madeOf(found),
    maskField(found),
    editField(found),
    extras.map((one) => one.panel?.(found)),
    asOtherText(found),
  );
  why.scrollTop = 0;
  placeWhy();
  find(".live").textContent = spoken(found);
  const wanted = { operand: ".operand, .turn", turn: ".turn", heading: "h2" }[focus];
  if (wanted) (find(wanted, why) ?? find("h2", why)).focus({ preventScroll: true });
}

// The sentence for those who hear the page.
function spoken({ step, labels: names, value, operands, verdicts }) {
  const rules = verdicts.flatMap(hiddenBy).map((name) => cut(name, 80));
  const made = rules.length ? `Hidden by ${rules.join(", ")}.` : `${operands.length} operands.`;
  return `${cut(cellName(step.symbol, names), 80)} is ${formatNumber(value)}. ${step.formula}. ${made}`;
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
  const meant = meaning(found);
  return [
    h("h2", { tabindex: -1 }, nameOf(step.symbol, names)),
    h("p.value", formatNumber(value)),
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
  const words = `; it ${apart > 0 ? "rose" : "fell"} by ${formatNumber(Math.abs(apart))}`;
  const change = Number.isFinite(apart) && words;
  return h("p.was", `It was ${formatNumber(before)} before the changes`, change);
}

function madeOf(found) {
  const { step, terms, value, hidden } = found;
  const remark = (words) => h("p.remark", words);
  const lines = ruleLines(found).map((line) => h("li", bdi(line)));
  const rules = lines.length > 0 && h("ul.rules", lines);
  const said = remarks(found).map(remark);
  if (step.op === "given") return remark("A given number: nothing lies behind it.");
  if (step.op === "visible") return rules;
  if (step.operation.total && !hidden)
    return terms.length ? [termTable(found), said] : remark(emptyWords(found));
  if (hidden) return [remark(`hidden, so ${formatNumber(value)}`), rules];
  return [equation(found), said];
}

function asOtherText(found) {
  const copied = (words, text) =>
    button(words, async ({ target }) => {
      try {
        await navigator.clipboard.writeText(text(found));
        target.textContent = "copied";
      } catch {
        find("details", why).open = true; // there it can be selected
      }
    });
  const copies = [
    ["Python", asNumpy],
    ["LaTeX", (one) => asLatex(one)],
    ["text", (one) => asText(one)],
  ];
  const details = h("details", h("summary", "as text"));
  details.addEventListener("toggle", () => {
    if (details.children.length > 1) return;
    for (const text of [asText(found), asNumpy(found), asLatex(found)])
      details.append(h("pre", { tabindex: 0 }, text));
  });
  return [h("div.copies", "copy as", copies.map(([words, text]) => copied(words, text))), details];
}
