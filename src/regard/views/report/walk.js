// Step by step: one operation after the other, each with a sentence; what is not computed yet is empty.

import { button, fill, find, h, stage, typeset } from "./elements.js";
import { content, doing, layer, runs, shown, state } from "./shown.js";
import { repaint } from "./stage.js";

const POINT = " Point at a number to see what makes it, click it for its sum.";

// What there is to know before the first step.
function rule() {
  if (state.backwards)
    return [h("b", "Each number has its gradient in its place:"), " how much the loss rises as the number rises by 1. Purple: it rises, green: it falls.", POINT];
  const made = runs.now.steps.has("row_sums") ? "is its score’s share of the row." : "is made of the score in its place.";
  return [
    h("b", "A number’s row is left of it, its column above it:"),
    " multiplied pair by pair and added up, they make it. ",
    shown.get("weights")?.source ? [h("b", "A weight"), ` ${made}`] : "",
    POINT,
  ];
}

// The places of the steps that a reader goes through: of a picture backwards, its gradients.
function stops() {
  const steps = [...runs.now.steps.values()];
  const aside = new Set(layer().aside);
  const own = ({ name, op, axes, phase }) =>
    !["given", "inverse_root"].includes(op) &&
    axes.length > 0 &&
    !aside.has(name) &&
    (phase === "backward") === state.backwards;
  return steps.flatMap((step, k) => (own(step) ? [k] : []));
}

export function walk(by) {
  const all = stops();
  const at = state.walk === null ? (by > 0 ? -1 : all.length) : all.indexOf(state.walk ?? -1);
  const next = at + by;
  if (next < 0 || next >= all.length) leave();
  else walkTo(all[next]);
}

export function walkTo(k) {
  if (state.cell) doing.close();
  state.walk = k;
  const step = [...runs.now.steps.values()][k];
  if (step && !state.backwards) {
    const open = [...shown.values()].some((view) => view.station === step.name && !view.shelved);
    if (open && state.shelf) doing.shelve("");
    else if (!open) doing.reveal(step.name);
  }
  repaint();
  sentence();
}

export function leave() {
  state.walk = null;
  if (state.shelf) doing.shelve("");
  repaint();
  sentence();
}

// The sentences of the file for a step.
function wordsOf(name) {
  const words = layer().words[`${state.batch}/${state.head}`]?.[name] ?? [];
  return words.slice(0, 1).map((one) => content.sentences[one]);
}

export function sentence() {
  const all = stops();
  const at = all.indexOf(state.walk ?? -1);
  const step = state.walk === null ? null : [...runs.now.steps.values()][state.walk];
  const words = step
    ? [h("b", step.name), " ", h("span.formula", typeset(step.formula)), ". ", wordsOf(step.name)]
    : rule();
  fill(find(".say"), words);
  stage.classList.toggle("walking", step !== null);
  const dot = (k, n) =>
    button("", () => walkTo(k), {
      class: k === state.walk ? "at" : state.walk !== null && k < state.walk ? "done" : "",
      "aria-label": `step ${n + 1}`,
      "aria-current": k === state.walk ? "step" : null,
    });
  fill(
    find(".walk"),
    button("‹", () => walk(-1), { "aria-label": "the step before" }),
    all.length < 40 && h("span.stops", all.map(dot)),
    button("›", () => walk(1), { "aria-label": "the next step" }),
    h("span", step ? `${at + 1} of ${all.length}` : "step by step: ← →"),
  );
  for (const view of shown.values())
    view.section.classList.toggle("now", step !== null && view.step.name === step.name);
  find(".now")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}
