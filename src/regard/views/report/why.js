// Where a number comes from: the open cell, the way to it, its operands, and a field to change what
// is given.

import { formatNumber, parseNumber } from "./numbers.js";
import {
  asNumpy,
  asText,
  cellName,
  cut,
  derive,
  doubt,
  emptyWords,
  ruleLines,
  TOTALS,
} from "./derivation.js";
import { isHead } from "./attention.js";
import {
  bdi,
  carried,
  comparable,
  doing,
  find,
  h,
  labels,
  layer,
  nameOf,
  runs,
  state,
  typeset,
  why,
} from "./shown.js";
import { placeOf } from "./tables.js";
import { hiddenBy, leaves } from "./rules.js";
import { expectedOf } from "./summary.js";

const DIGITS = 8;
const MOST_TERMS = 48; // before the smaller ones are put together

export function derivation() {
  return state.cell && runs.now.steps.has(state.cell.step)
    ? derive(runs.now, labels, state.cell.step, state.cell.index)
    : null;
}

// Outline the open cell and its operands where they stand.
let marked = [];
function light(td, kind) {
  td.classList.add(kind);
  marked.push(td);
}

export function mark() {
  for (const td of marked) {
    td.classList.remove("open", "first", "second", "pointed");
    td.removeAttribute("aria-selected");
  }
  marked = [];
  const found = derivation();
  if (!found) return;
  const sides = sideOf(found);
  for (const [k, operand] of found.operands.entries()) {
    const td = placeOf(operand)?.td;
    if (td) light(td, sides[k]);
  }
  const own = placeOf(state.cell)?.td;
  if (own) {
    light(own, "open");
    own.setAttribute("aria-selected", "true");
  }
}

// Which outline each operand has: the first factors solid, the second ones dashed.
function sideOf({ operands, terms }) {
  const sides = operands.map((_, k) => (k ? "second" : "first"));
  for (const term of terms)
    for (const [k, number] of term.operands.entries()) sides[number] = k ? "second" : "first";
  return sides;
}

export function showWhy(focus = "") {
  mark();
  const found = derivation();
  why.hidden = false;
  why.classList.toggle("empty", !found);
  document.body.classList.toggle("opened", Boolean(found));
  if (!found) {
    why.replaceChildren(
      h(
        "p",
        { class: "hint" },
        "Choose any number to see the numbers that made it: click it, or go there with ",
        h("kbd", {}, "Tab"),
        " and the arrow keys and press ",
        h("kbd", {}, "Enter"),
        ".",
      ),
    );
    return;
  }
  why.replaceChildren(
    ...trailParts(),
    ...headParts(found),
    ...bodyParts(found),
    ...maskParts(found),
    ...editParts(found),
    ...textParts(found),
  );
  why.scrollTop = 0;
  find(".live").textContent = spoken(found);
  if (focus === "operand")
    (find(".operand, .turn", why) ?? find("h2", why)).focus({ preventScroll: true });
  if (focus === "turn") (find(".turn", why) ?? find("h2", why)).focus({ preventScroll: true });
  if (focus === "heading") find("h2", why).focus({ preventScroll: true });
}

function spoken({ step, labels: names, value, operands, verdicts }) {
  const rules = verdicts.flatMap(hiddenBy).map((name) => cut(name, 80));
  const made = rules.length ? `Hidden by ${rules.join(", ")}.` : `${operands.length} operands.`;
  return `${cut(cellName(step.symbol, names), 80)} is ${formatNumber(value, DIGITS)}. ${step.formula}. ${made}`;
}

function trailParts() {
  const buttons = state.trail.slice(0, -1).map((cell, k) => {
    const step = runs.now.steps.get(cell.step);
    if (!step) return "";
    const own = derive(runs.now, labels, cell.step, cell.index);
    return h(
      "button",
      {
        type: "button",
        onclick: () => {
          state.trail.length = k;
          doing.open(cell, { focus: "heading" });
        },
      },
      nameOf(
        step.symbol,
        own.labels.map((name) => cut(name, 16)),
      ),
    );
  });
  const shortened = buttons.length > 6 ? [buttons[0], "…", ...buttons.slice(-5)] : buttons;
  return [
    h(
      "div",
      { class: "trail" },
      buttons.length
        ? h(
            "button",
            { type: "button", class: "back", onclick: () => doing.back("heading") },
            "← back",
          )
        : "",
      shortened.flatMap((button) => [button, h("span", { "aria-hidden": "true" }, "›")]),
      h(
        "button",
        { type: "button", class: "close", "aria-label": "close", onclick: () => doing.close() },
        "×",
      ),
    ),
  ];
}

function headParts({ step, labels: names, value, index }) {
  const parts = [
    h("h2", { tabindex: -1 }, nameOf(step.symbol, names)),
    h("p", { class: "value" }, formatNumber(value, DIGITS)),
    h(
      "p",
      { class: "formula-line" },
      step.name,
      " · ",
      h("span", { class: "formula" }, typeset(step.formula)),
    ),
  ];
  const expected = expectedOf({ step: step.name, index });
  if (expected)
    parts.push(
      h(
        "p",
        { class: `expected ${expected.right ? "right" : "wrong"}` },
        `${expected.wanted} is expected: `,
        h("b", {}, expected.right ? "right" : "wrong"),
      ),
    );
  if (runs.touched && comparable(step.name)) {
    const was = runs.plain.value(step.name, index);
    if (!Object.is(was, value)) {
      const apart = value - was;
      const sign = apart > 0 ? "+" : "";
      parts.push(
        h(
          "p",
          { class: "was" },
          `was ${formatNumber(was, DIGITS)}`,
          Number.isFinite(apart) ? `, ${sign}${formatNumber(apart, DIGITS)}` : "",
        ),
      );
    }
  }
  return parts;
}

function operandButton(operand, side, named) {
  const button = h(
    "button",
    {
      type: "button",
      class: `operand ${side}`,
      "aria-label": `${cellName(operand.symbol, operand.labels)} = ${formatNumber(operand.value, DIGITS)}`,
    },
    named
      ? [
          h(
            "small",
            {},
            nameOf(
              operand.symbol,
              operand.labels.map((name) => cut(name, 24)),
            ),
            " = ",
          ),
        ]
      : [],
    formatNumber(operand.value, DIGITS),
  );
  const point = (on) => () => placeOf(operand)?.td?.classList.toggle("pointed", on);
  button.addEventListener("click", (event) =>
    doing.open(
      { step: operand.step, index: operand.index },
      { focus: event.detail ? "heading" : "operand" },
    ),
  );
  for (const [name, on] of [
    ["focus", true],
    ["mouseenter", true],
    ["blur", false],
    ["mouseleave", false],
  ])
    button.addEventListener(name, point(on));
  return button;
}

// A sign and the operand after it stay in one line.
const after = (sign, operand) => h("span", { class: "after" }, sign, operand);

const SIGNS = {
  multiply: (a) => [a[0], after("×", a[1])],
  add: (a) => a.map((one, k) => (k ? after("+", one) : one)),
  subtract: (a) => [a[0], after("−", a[1])],
  divide: (a) => [a[0], after("/", a[1])],
  exp: (a) => ["exp(", a[0], ")"],
  log: (a) => ["ln(", a[0], ")"],
  inverse_root: (a) => ["1 / √", a[0]],
  cap: (a) => [a[1], "× tanh(", a[0], "/", a[1].cloneNode(true), ")"],
  select: (a) => [a[1]],
  split: (a) => ["the same number as", a[0]],
  merge: (a) => ["the same number as", a[0]],
};

function bodyParts(found) {
  const { step, operands, terms, hidden } = found;
  const sides = sideOf(found);
  const rules = ruleLines(found);
  const list = rules.length
    ? [
        h(
          "ul",
          { class: "rules" },
          rules.map((line) => h("li", {}, bdi(line))),
        ),
      ]
    : [];
  const remark = doubt(found, DIGITS).map((line) => h("p", { class: "remark" }, line));
  if (step.op === "given")
    return [h("p", { class: "remark" }, "A given number: nothing lies behind it.")];
  if (step.op === "visible") return list;
  if (step.op in TOTALS)
    return terms.length
      ? [termTable(found, sides), ...remark]
      : [h("p", { class: "remark" }, emptyWords(found))];
  if (hidden || (step.op === "select" && !operands[0].value)) {
    return [
      h(
        "p",
        { class: "remark" },
        step.op === "exp" || step.op === "divide" ? "hidden, so 0" : "hidden, so −∞",
      ),
      ...list,
    ];
  }
  const buttons = operands.map((operand, k) => operandButton(operand, sides[k], true));
  return [
    h("div", { class: "sum" }, step.op === "select" ? "visible, so " : "", SIGNS[step.op](buttons)),
    ...remark,
  ];
}

function termTable(found, sides) {
  const { step, operands, terms, value } = found;
  const pair = terms[0].operands.length > 1;
  const symbols = terms[0].operands.map((k) => operands[k].symbol);
  let list = [...terms.keys()];
  let rest = [];
  if (list.length > MOST_TERMS && !state.all) {
    const size = (k) =>
      Number.isNaN(terms[k].value)
        ? Infinity
        : step.op === "max"
          ? terms[k].value
          : Math.abs(terms[k].value);
    const kept = new Set([...list].sort((a, b) => size(b) - size(a)).slice(0, MOST_TERMS - 1));
    rest = list.filter((k) => !kept.has(k));
    list = list.filter((k) => kept.has(k));
  }
  const rows = list.map((k) => {
    const [first, second] = terms[k].operands;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, bdi(cut(terms[k].label, 40))),
      h("td", {}, operandButton(operands[first], sides[first], false)),
      pair
        ? [
            h("td", { class: "sign" }, "×"),
            h("td", {}, operandButton(operands[second], sides[second], false)),
            h("td", { class: "sign" }, "="),
            h("td", {}, formatNumber(terms[k].value, DIGITS)),
          ]
        : [],
    );
  });
  const wide = pair ? 4 : 0;
  if (rest.length) {
    const together = rest.reduce((sum, k) => sum + terms[k].value, 0);
    rows.push(
      h(
        "tr",
        {},
        h(
          "th",
          { scope: "row", colspan: 1 + wide },
          h(
            "button",
            {
              type: "button",
              onclick: () => {
                state.all = true;
                showWhy("heading");
              },
            },
            `${rest.length} smaller ones`,
          ),
        ),
        h("td", {}, step.op === "max" ? "" : formatNumber(together, DIGITS)),
      ),
    );
  }
  return h(
    "div",
    { class: "terms" },
    h(
      "table",
      {},
      h("caption", {}, "terms"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td"),
          h("th", { scope: "col" }, typeset(symbols[0])),
          pair
            ? [
                h("td"),
                h("th", { scope: "col" }, typeset(symbols[1])),
                h("td"),
                h("th", { scope: "col" }, typeset(symbols.join("·"))),
              ]
            : [],
        ),
      ),
      h("tbody", {}, rows),
      h(
        "tfoot",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "row", colspan: 1 + wide }, TOTALS[step.op]),
          h("td", {}, formatNumber(value, DIGITS)),
        ),
      ),
    ),
  );
}

function textParts(found) {
  const details = h("details", {}, h("summary", {}, "as text, and as NumPy"));
  details.addEventListener("toggle", () => {
    if (details.children.length > 1) return;
    details.append(
      h("pre", { tabindex: 0 }, asText(found, DIGITS)),
      h("pre", { tabindex: 0 }, asNumpy(found)),
    );
  });
  return [details];
}

function editParts({ step, value, index }) {
  if (
    step.op !== "given" ||
    step.name === "width" ||
    (step.name === "scale" && state.switches.has("scale"))
  )
    return [];
  const input = h("input", {
    type: "text",
    inputmode: "text",
    autocomplete: "off",
    value: formatNumber(value, 17).replaceAll("−", "-"),
    id: "edit",
  });
  const wrong = h("span", { class: "wrong", role: "alert" });
  const form = h(
    "form",
    {},
    h("label", { for: "edit" }, "change it to"),
    input,
    h("button", { type: "submit" }, "Set"),
    wrong,
  );
  const place = editPlace(step, index);
  if (state.edits.get(place.key)?.has(place.flat))
    form.insertBefore(
      h("button", { type: "button", onclick: () => doing.change(place, null) }, "Put back"),
      wrong,
    );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = parseNumber(input.value);
    if (typed === null) {
      wrong.textContent = "That is no number. Write it such as 0.5, -1e-3, NaN or -inf.";
      input.focus();
    } else doing.change(place, typed);
  });
  return [form];
}

// Where a given table of yes and no decides, a button to change its cell; else who decides.
function maskParts({ step, place, verdicts: [verdict], hidden }) {
  const given = step.op === "visible";
  if (!verdict || !(hidden || given || step.op === "select")) return [];
  const turns = runs.now.turns(...place);
  const remark = (words) => h("p", { class: "decided" }, words);
  if (!turns.length) {
    const rules = leaves(verdict).filter((leaf) => !leaf.table && leaf.visible === !hidden);
    const names = [...new Set(rules.map((leaf) => cut(leaf.rule, 80)))].join(" and ");
    if (!hidden && !given) return [];
    const bias = rules.some((leaf) => leaf.rule === BIAS) && biasButton(place);
    if (bias) return [remark("The bias is −∞ here; it is given and can be changed:"), bias];
    const said = hidden ? `Hidden by ${names}` : `Visible by ${names}`;
    return [remark(`${said}, which is a rule and no table: there is no cell to change.`)];
  }
  const names = [...new Set(turns.map(({ table }) => cut(table.name, 80)))].join(" and ");
  const button = h(
    "button",
    { type: "button", class: "turn", onclick: () => doing.changeAll(turns, "turn") },
    hidden ? "Show this key" : "Hide this key",
  );
  const reach = reachOf(turns);
  return [
    h("div", { class: "sum" }, button, h("small", {}, `changes a cell of ${names}`)),
    reach ? remark(`This cell of it counts for every ${reach}.`) : "",
  ];
}

const BIAS = "bias −inf";

function biasButton([head, query, key]) {
  const step = runs.now.steps.get("bias");
  const at = { H: head, L: query, S: key };
  const index = step.axes.map((axis) => at[axis]);
  const { labels: names, value } = derive(runs.now, labels, "bias", index);
  const operand = { step: "bias", symbol: step.symbol, index, labels: names, value };
  return h("div", { class: "sum" }, operandButton(operand, "first", true));
}

// What else a cell of a table decides about, because the table has one of it for all.
function reachOf(turns) {
  const { lead, sizes } = layer();
  const whole = [...lead, sizes.H ?? 1, sizes.L ?? 1, sizes.S];
  const kinds = [...lead.map(() => "batch element"), "head", "query", "key"];
  const shared = turns.flatMap(({ table: { cells } }) =>
    kinds.filter((_, k) => {
      const own = cells.shape[k - (whole.length - cells.shape.length)] ?? 1;
      return own === 1 && whole[k] > 1;
    }),
  );
  return [...new Set(shared)].join(" and ");
}

export function editPlace(step, index) {
  const heads = step.axes.filter(isHead).length;
  const own = index.slice(heads);
  const block = runs.now.block(step.name, heads ? index[0] : 0);
  const [row, column] = own.length === 2 ? own : block.byRow ? [own[0], 0] : [0, own[0] ?? 0];
  const key = carried.partKey(
    state.layer,
    "given",
    step.name,
    state.batch,
    heads ? index[0] : null,
  );
  return { key: `${state.layer}|${step.name}|${key}`, flat: row * block.width + column };
}
