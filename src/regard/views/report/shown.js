// What the page shows right now: what a reader chose, and the runs behind it.

import { Carried } from "./carried.js";
import { find } from "./elements.js";

export const content = JSON.parse(find("#content").textContent);
export const carried = new Carried(content, find("#arrays").textContent);

// What a reader has chosen, switched and edited.
/**
 * @type {{layer: number, batch: number, head: number, digits: number, cell: Cell | null,
 *   trail: Cell[], switches: Set<string>, edits: Map<string, Map<number, number>>,
 *   all: boolean, shelf: string, walk: number | null, backwards: boolean, zoom: number,
 *   touched: boolean, forward: Set<string>, lit: {q?: number, k?: number} | null}}
 */
export const state = {
  layer: 0,
  batch: 0,
  head: 0,
  digits: content.digits,
  cell: null,
  trail: [],
  switches: new Set(),
  edits: new Map(),
  all: false,
  shelf: "", // the station that is open
  walk: null, // the step that a step by step reader has come to
  backwards: false, // whether gradients are shown
  zoom: 1,
  touched: false, // whether a reader has pointed at a number
  forward: new Set(), // the steps whose numbers are shown though gradients are: factors of the open one
  lit: null, // the word that is pointed at
};

// The view of every step on the page, and the runs behind them.
/** @type {Map<string, any>} */
export const shown = new Map();
/** @type {{now?: any, plain?: any, touched?: boolean}} */
export const runs = {};

// What the parts of the page ask each other to do; report.js says how.
/** @type {Record<string, Function>} */
export const doing = {};

// What pages with gradients add: `panel(derivation)` to an open number, `update()` after a change.
/** @type {{panel?: Function, update?: Function}[]} */
export const extras = [];

// What pages with large tables or several heads add; see large.js.
/** @type {Record<string, Function>} */
export const drawing = {};

export const layer = () => content.layers[state.layer];

export const picture = () => content.pictures[layer().picture];

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

// Whether there is such a cell in what is shown now.
export function fitsNow({ step, index }) {
  const axes = runs.now.steps.get(step)?.axes;
  return axes?.length === index.length && index.every((n, k) => n < layer().sizes[axes[k]]);
}
