// Changing what is given: a field for a number, a button for the cell of a mask, and where in the
// file's arrays a change belongs.

import { exactly, parseNumber } from "./numbers.js";
import { cut, derive } from "./derivation.js";
import { isHead } from "./attention.js";
import { button, h } from "./elements.js";
import { carried, doing, labels, layer, runs, state } from "./shown.js";
import { leaves } from "./visibility.js";
import { operandButton } from "./operands.js";

const BIAS = "bias −inf";

export function editField({ step, value, index }) {
  const fixed = step.name === "width" || (step.name === "scale" && state.switches.has("scale"));
  if (step.op !== "given" || fixed) return [];
  const input = h("input", {
    type: "text",
    inputmode: "text",
    autocomplete: "off",
    value: exactly(value),
    id: "edit",
  });
  const wrong = h("span.wrong", { role: "alert" });
  const place = editPlace(step, index);
  const submit = (event) => {
    event.preventDefault();
    const typed = parseNumber(input.value);
    if (typed !== null) return doing.change(place, typed);
    wrong.textContent = "That is not a number. Write it as in 0.5, -1e-3, NaN or -inf.";
    input.focus();
  };
  return h(
    "form",
    { onsubmit: submit },
    h("label", { for: "edit" }, "change it to"),
    input,
    h("button", { type: "submit" }, "Set"),
    state.edits.get(place.key)?.has(place.flat) &&
      button("Put back", () => doing.change(place, null)),
    wrong,
  );
}

// Where a given table of yes and no decides, a button to change its cell; else who decides.
/** @param {{step: any, place: any, verdicts: Verdict[], hidden: boolean}} derivation */
export function maskField({ step, place, verdicts: [verdict], hidden }) {
  const given = step.op === "visible";
  if (!(hidden || given || step.op === "select" || step.name === "weights")) return [];
  const turns = runs.now.turns(...place);
  const remark = (words) => h("p.decided", words);
  const listed = (names) => [...new Set(names.map((name) => cut(name, 80)))].join(" and ");
  if (!turns.length) {
    if (!verdict || (!hidden && !given)) return [];
    const rules = leaves(verdict).filter((leaf) => !leaf.table && leaf.visible === !hidden);
    const bias = rules.some((leaf) => leaf.rule === BIAS) && biasButton(place);
    if (bias) return [remark("The bias is −∞ here; it is given and can be changed:"), bias];
    const said = `${hidden ? "Hidden" : "Visible"} by ${listed(rules.map((leaf) => leaf.rule))}`;
    return remark(`${said}, which is a rule and not a table: there is no cell to change.`);
  }
  const names = listed(turns.map(({ table }) => table.name));
  const words = hidden ? "Show this key" : "Hide this key";
  const reach = reachOf(turns);
  return [
    h(
      "div.sum",
      button(words, () => doing.changeAll(turns, "turn"), { class: "turn" }),
      h("small", `changes a cell of ${names}`),
    ),
    reach && remark(`This cell of it counts for every ${reach}.`),
  ];
}

function biasButton([head, query, key]) {
  const step = runs.now.steps.get("bias");
  const at = { H: head, L: query, S: key };
  const index = step.axes.map((axis) => at[axis]);
  const { labels: names, value } = derive(runs.now, labels, "bias", index);
  const operand = { step: "bias", symbol: step.symbol, index, labels: names, value };
  return h("div.sum", operandButton(operand, "first", true));
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

// By which key an array's changes are known, and the place in it.
export function editPlace(step, index) {
  const head = step.axes.some(isHead) ? index[0] : null;
  const { block, row, column } = runs.now.locate(step.name, index);
  const key = carried.partKey(state.layer, "given", step.name, state.batch, head);
  return { key: `${state.layer}|${step.name}|${key}`, flat: row * block.width + column };
}
