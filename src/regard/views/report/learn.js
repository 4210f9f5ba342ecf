// Gradient steps in the page: which inputs move, by how much, and the loss as a curve.

import { button, fill, h, stage } from "./elements.js";
import { counted, descended, learnable, readRate, shortly, trouble } from "./descent.js";
import { carried, doing, extras, runs, state } from "./shown.js";
import { remember } from "./link.js";
import { curveOf } from "./curve.js";

const RUN = 1000; // steps until a run stops by itself
const KEPT = 1 << 20; // numbers in all the steps that can be undone


// --- what was learned -----------------------------------------------------------------------

let losses = []; // before the first step, and after each
let before = []; // what was edited before each of the last steps
let begun = null; // and before the first one
let left = 0; // steps that are still to be made
let said = "";
let next = restart; // what the next numbers of the page mean for the losses

function restart() {
  losses = runs.now.steps.has("loss") ? [runs.now.value("loss", [])] : [];
  before = [];
  begun = new Map([...state.edits].map(([key, own]) => [key, new Map(own)]));
  left = 0;
  said = "";
}

// Show other edits, which are steps and no change of the reader's.
function show(edits, then) {
  state.edits = edits;
  next = then;
  doing.recompute();
}

function step(names, rate) {
  const after = descended(carried, state, runs.now, names, rate);
  if (after === null) {
    said = "Nothing moves any more: each gradient is 0, or too small to change its number.";
    return halt();
  }
  before.push(state.edits);
  const numbers = [...after.values()].reduce((sum, own) => sum + own.size, 0);
  if (before.length * numbers > KEPT) before.shift();
  show(after, () => {
    losses.push(runs.now.value("loss", []));
    said = trouble(losses);
    left = said ? 0 : left - 1;
  });
  if (left > 0) requestAnimationFrame(() => left > 0 && step(names, rate));
  else halt();
}

function go(steps) {
  const { rate, wrong } = readRate(parts.rate.value);
  const names = learnable(runs.now).filter((name) => chosen.has(name));
  const none = names.length ? "" : "No input is chosen: choose at least one that may move.";
  said = wrong ?? (none || trouble(losses));
  if (wrong) parts.rate.focus();
  if (said) return draw();
  left = steps;
  step(names, rate);
}

// The end of some steps: the open number and the link follow.
function halt() {
  left = 0;
  said ||= `${counted(losses.length - 1)} took the loss from ${shortly(losses[0])} to ${shortly(losses.at(-1))}.`;
  draw();
  doing.show();
  remember();
}

function undo() {
  show(before.at(-1), () => {
    before.pop();
    losses.pop();
  });
  said = "";
  landed();
}

function startOver() {
  show(begun, restart);
  landed();
}

// After going back: where no step is left to undo, the focus leaves the buttons that undo.
function landed() {
  if (losses.length === 1) said = "Back at the start.";
  halt();
  if (!before.length) parts.one.focus();
}

// --- on the page ----------------------------------------------------------------------------

let chosen = null; // the inputs that move
let box = null;
/** @type {Record<string, any>} */
const parts = {};

function make() {
  parts.title = h("summary");
  parts.inputs = h("fieldset");
  parts.rate = h("input", { type: "text", autocomplete: "off", id: "rate", value: "0.1" });
  parts.one = h("button", { type: "submit" }, "One step");
  parts.ten = button("Ten steps", () => go(10));
  parts.run = button("Run", () => (left ? halt() : go(RUN)));
  parts.undo = button("Undo a step", undo);
  parts.over = button("Start over", startOver);
  parts.said = h("p.said", { role: "status" });
  parts.curve = h("div.curve");
  const submit = (event) => {
    event.preventDefault();
    go(1);
  };
  const form = h(
    "form",
    { onsubmit: submit, "aria-label": "Gradient steps" },
    h("p", "A step moves each number of these inputs against its gradient, by the rate times it."),
    parts.inputs,
    h("div.row", h("label", { for: "rate" }, "rate"), parts.rate, parts.one, parts.ten, parts.run),
    h("div.row", parts.undo, parts.over),
    parts.said,
  );
  box = h("details.learn", parts.title, h("div.lesson", form, parts.curve));
  stage.after(box);
}

function update() {
  next();
  next = restart;
  if (!box) make();
  draw();
}

function draw() {
  const names = learnable(runs.now);
  const able = losses.length > 0 && names.length > 0;
  box.hidden = !runs.plain.steps.has("loss");
  chosen ??= new Set(names.filter(names.some(isMatrix) ? isMatrix : isProjection));
  if (names.join() !== parts.names) {
    fill(parts.inputs, h("legend", "inputs that move"), names.map(inputBox));
    parts.names = names.join();
  }
  const loss = able && ` the loss is ${shortly(losses.at(-1))}`;
  const after = losses.length > 1 && ` after ${counted(losses.length - 1)}`;
  fill(parts.title, h("b", "Learn"), loss, after);
  for (const name of ["one", "ten", "run"]) parts[name].disabled = !able;
  parts.undo.disabled = parts.over.disabled = !before.length;
  parts.run.textContent = left ? "Stop" : "Run";
  if (!left) parts.said.textContent = said;
  fill(parts.curve, able && curveOf(losses));
}

const isMatrix = (name) => name.startsWith("W_");
const isProjection = (name) => ["queries", "keys", "values"].includes(name);

function inputBox(name) {
  const onchange = ({ target }) => (target.checked ? chosen.add(name) : chosen.delete(name));
  const field = h("input", { type: "checkbox", value: name, onchange });
  field.checked = chosen.has(name);
  return h("label.switch", field, " ", name);
}

extras.push({ update });
