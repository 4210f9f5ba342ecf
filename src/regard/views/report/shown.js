// What the page shows right now, and the small tools to put it there. Text from outside reaches
// the page through textContent alone.

import { cut } from "./derivation.js";
import { Carried } from "./carried.js";

export const find = (selector, root = document) => root.querySelector(selector);
export const content = JSON.parse(find("#content").textContent);
export const carried = new Carried(content, find("#arrays").textContent);
export const main = find("#steps");
export const why = find("#why");
export const tools = find(".tools");
export const gallery = find(".gallery");

// What a reader has chosen, switched and edited.
export const state = {
  layer: 0,
  batch: 0,
  head: 0,
  digits: content.digits,
  cell: null,
  trail: [],
  switches: new Set(),
  edits: new Map(),
  rows: {},
  all: false,
};

// What stands on the page: the view of every step. And the runs behind it.
export const shown = new Map();
export const runs = {};

// What the parts of the page ask each other to do; report.js says how.
export const doing = {};

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== "") element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

export const bdi = (text) => h("bdi", {}, text);

// A formula with its letters as letters of mathematics.
export function typeset(formula) {
  const parts = formula.split(/((?<![A-Za-z_])[A-Zb-z](?![A-Za-z])|_[a-z])/);
  return parts.filter(Boolean).map((part) => {
    if (/^_[a-z]$/.test(part)) return h("sub", {}, part[1]);
    return /^[A-Zb-z]$/.test(part) ? h("var", {}, part) : part;
  });
}

export function nameOf(symbol, labels) {
  const name = cut(labels.join(", "), 120);
  return [h("span", { class: "symbol" }, typeset(symbol)), labels.length ? bdi(`[${name}]`) : ""];
}

export const layer = () => content.layers[state.layer];

export const labels = (axis) => carried.labels(state.layer, axis);

// `plain` is what was given, by the page's own arithmetic, to compare with; `now` is what is shown.
export function refresh() {
  const touched = state.switches.size > 0 || state.edits.size > 0;
  runs.now = carried.run(state, { switches: state.switches, edits: state.edits, known: !touched });
  runs.plain = touched ? carried.run(state) : runs.now;
  runs.touched = touched;
}

export const ownHead = (step, head) => {
  if (step.axes.includes("G")) return Math.floor(head / (layer().sizes.H / layer().sizes.G));
  return step.axes.includes("H") ? head : null;
};

// Whether a step has the same cells in what is shown and in what was given.
export function comparable(name) {
  const [now, plain] = [runs.now.steps.get(name), runs.plain.steps.get(name)];
  return plain !== undefined && now.axes.join() === plain.axes.join();
}
