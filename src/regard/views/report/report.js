// The page: what a reader may open, change and choose, with the mouse and with keys. All arithmetic
// is in attention.js.

import { formatNumber } from "./numbers.js";
import { asText, cellName, cut, derive } from "./derivation.js";
import { isHead } from "./attention.js";
import { fill, find, h, main, tools, why } from "./elements.js";
import {
  carried,
  comparable,
  content,
  doing,
  extras,
  fitsNow,
  labels,
  layer,
  ownHead,
  refresh,
  runs,
  shown,
  state,
} from "./shown.js";
import { bringIntoSight, fillTable, focusCell, placeOf, viewOf } from "./tables.js";
import { editPlace } from "./change.js";
import { recall, remember } from "./link.js";
import { mark, showWhy } from "./why.js";
import { buildGallery, fillRow, pressGallery, redraw, setRow } from "./large.js";
import { adopt, build } from "./steps.js";
import { fillSummary, rowFigures, stepFigures } from "./summary.js";

const DIGITS = 8;
const MOST_COMPARED = 1 << 16; // scores, for a sentence about what an edit did

// --- opening a number -----------------------------------------------------------------------
// Open a cell: from a table (`fresh`) or as the next one of the trail.
function open(cell, { fresh = false, focus = "", push = true } = {}) {
  const step = runs.now.steps.get(cell.step);
  if (!step) return;
  const axis = step.axes.find(isHead);
  if (axis) {
    const own = ownHead(step, state.head);
    const [head] = cell.index;
    if (own !== head) {
      state.head = axis === "G" ? head * (layer().sizes.H / layer().sizes.G) : head;
      rebuild();
    }
  }
  state.cell = cell;
  state.all = false;
  state.trail = fresh ? [cell] : [...state.trail, cell];
  if (state.trail.length > 40) state.trail.shift();
  const place = placeOf(cell);
  if (place && !place.view.small) setRow(place.view.letter, place.row);
  showWhy(focus);
  bringIntoSight(placeOf(cell)?.td);
  if (push) remember();
}

function back(focus) {
  if (state.trail.length < 2) return;
  state.trail.pop();
  open(state.trail.pop(), { focus });
}

const change = (place, value) => changeAll([{ place, value }]);

// Change given cells; a value of null puts one back.
function changeAll(changes, focus = "heading") {
  for (const { place, value } of changes) {
    const given = carried.decode(carried.editable(...place.key.split("|")))[place.flat];
    const own = state.edits.get(place.key) ?? new Map();
    if (value === null || Object.is(value, given)) own.delete(place.flat);
    else own.set(place.flat, value);
    if (own.size) state.edits.set(place.key, own);
    else state.edits.delete(place.key);
  }
  recompute();
  showWhy(focus);
  remember();
}

// The same with the keys of a table: its cell is turned, if a given table decides about it.
function turn(view, row, column) {
  const cell = { step: view.name, index: view.index(row, column) };
  open(cell, { fresh: true, push: false });
  changeAll(runs.now.turns(...derive(runs.now, labels, cell.step, cell.index).place), "");
}

// New numbers in the tables on the page; new tables where the steps are others.
function recompute() {
  const before = runs.now?.ids;
  refresh();
  if (!before || before.join() !== runs.now.ids.join()) rebuild();
  else repaint();
  say();
}

function repaint() {
  for (const view of shown.values()) {
    Object.assign(view, { block: viewOf(view.name).block });
    if (view.small) fillTable(view);
    else {
      fillRow(view);
      redraw(view);
    }
  }
  fillSummary();
  mark();
}

function rebuild() {
  const active = document.activeElement?.place;
  const opened = find("details.aside", main)?.open;
  build();
  if (opened && find("details.aside", main)) find("details.aside", main).open = true;
  if (active?.name && shown.has(active.name))
    focusCell(shown.get(active.name), active.row, active.column);
  setTools();
  pressGallery();
  mark();
}

// The tools say what is shown; a switch that changes nothing here cannot be used.
function setTools() {
  for (const name of ["layer", "batch", "head", "digits"]) {
    if (tools.elements[name]) tools.elements[name].value = String(state[name]);
  }
  for (const box of tools.querySelectorAll("[name=switch]")) {
    box.checked = state.switches.has(box.value);
    box.disabled = !layer().switches.includes(box.value);
  }
}

// What is changed, and what that did.
function say() {
  const lines = [...state.switches].map((name) => content.switches[name].words);
  const changed = changedWords();
  if (changed) lines.push(`${changed} changed. ${effect()}`);
  else if (state.switches.size) lines.push(effect());
  if (runs.touched && carried.isExact(state.layer, state.batch, state.head))
    lines.push(
      "What differs has a marked corner; the sentences below the tables are about the numbers as they were given.",
    );
  const spans = lines.map((line) => [h("span", line), " "]);
  fill(find(".status"), lines.length > 0 && h("p", spans));
  tools.elements.reset.disabled = !runs.touched;
  for (const one of extras) one.update?.();
}

// How many given numbers, and cells of masks, are not as they were given.
function changedWords() {
  const counts = { number: 0, cell: 0 };
  for (const [key, own] of state.edits)
    counts[key.split("|")[1] === "mask" ? "cell" : "number"] += own.size;
  const words = (count, noun, rest = "") =>
    count && `${count} ${noun}${count > 1 ? "s" : ""}${rest}`;
  const { number, cell } = counts;
  return [words(number, "given number"), words(cell, "cell", " of a mask")]
    .filter(Boolean)
    .join(" and ");
}

// Which number of the result changed most.
function effect() {
  if (!carried.isExact(state.layer, state.batch, state.head)) return "";
  const name = ["projected_output", "merged"].find((one) => runs.now.steps.has(one)) ?? "output";
  if (!comparable(name)) return "";
  const view = shown.get(name) ?? viewOf(name);
  if (view.rows * layer().sizes.S > MOST_COMPARED) return ""; // it would need every row of everything
  let most = { apart: 0 };
  for (let row = 0; row < view.rows; row++) {
    const [now, plain] = [runs.now, runs.plain].map((run) => run.row(name, view.own ?? 0, row));
    for (let column = 0; column < view.columns; column++) {
      const apart = Math.abs(now[column] - plain[column]);
      const odd = Number.isNaN(apart) && !Object.is(now[column], plain[column]);
      if (odd || apart > most.apart)
        most = { apart: odd ? Infinity : apart, row, column, was: plain[column], is: now[column] };
    }
  }
  if (!most.apart) return "The result stays the same.";
  const cell = derive(runs.now, labels, name, view.index(most.row, most.column));
  return `The result changes most at ${cut(cellName(cell.step.symbol, cell.labels), 80)}: from ${formatNumber(most.was, 4)} to ${formatNumber(most.is, 4)}.`;
}

// --- what can be chosen ---------------------------------------------------------------------

function choose(place) {
  Object.assign(state, place);
  const own = layer();
  state.head = Math.min(state.head, (own.sizes.H ?? 1) - 1);
  state.batch = Math.min(state.batch, Math.max(0, own.positions.length - 1));
  for (const name of state.switches) if (!own.switches.includes(name)) state.switches.delete(name);
  refresh();
  state.cell = state.cell && inThisHead(state.cell);
  state.trail = state.cell ? [state.cell] : [];
  rebuild();
  say();
  showWhy();
  remember();
}

// The same place in the head that is shown now, if there is one.
function inThisHead({ step, index }) {
  const axes = runs.now.steps.get(step)?.axes;
  if (!carried.isExact(state.layer, state.batch, state.head) || !fitsNow({ step, index }))
    return null;
  const head = ownHead(runs.now.steps.get(step), state.head);
  return { step, index: index.map((n, k) => (isHead(axes[k]) ? head : n)) };
}

tools.addEventListener("submit", (event) => event.preventDefault());
tools.addEventListener("change", ({ target }) => {
  if (["layer", "batch", "head"].includes(target.name))
    choose({ [target.name]: Number(target.value) });
  else if (target.name === "digits") {
    state.digits = Number(target.value);
    repaint();
    remember();
  } else if (target.name === "theme") {
    if (target.value) document.documentElement.dataset.theme = target.value;
    else delete document.documentElement.dataset.theme;
    for (const canvas of document.querySelectorAll("canvas")) if (canvas.drawn) canvas.view?.draw();
  } else if (target.name === "switch") {
    if (target.checked) state.switches.add(target.value);
    else state.switches.delete(target.value);
    switched();
  }
});
tools.elements.reset.addEventListener("click", () => {
  state.switches.clear();
  state.edits.clear();
  setTools();
  switched();
});
function switched() {
  recompute();
  if (state.cell && !fitsNow(state.cell)) close();
  else showWhy();
  remember();
}

tools.elements.link.addEventListener("click", async () => {
  const button = tools.elements.link;
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "It is in the address bar";
  }
  setTimeout(() => {
    button.textContent = "Copy link";
  }, 2000);
});

function close() {
  const cell = state.cell;
  state.cell = null;
  state.trail = [];
  showWhy();
  const place = cell && placeOf(cell);
  if (place?.td) focusCell(place.view, place.row, place.column);
  remember();
}

// --- mouse and keys -------------------------------------------------------------------------

main.addEventListener("click", ({ target }) => {
  const td = target.closest("[role=gridcell]");
  if (!td?.place) return;
  const view = shown.get(td.place.name);
  focusCell(view, td.place.row, td.place.column);
  open({ step: view.name, index: view.index(td.place.row, td.place.column) }, { fresh: true });
});

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

// To which cell of a table a key leads; null if it is no such key.
function target(view, row, column, { key, ctrlKey }) {
  if (key in STEPS) return [row + STEPS[key][0], column + STEPS[key][1]];
  if (key === "Home") return [ctrlKey ? 0 : row, 0];
  if (key === "End") return [ctrlKey ? view.rows - 1 : row, view.columns - 1];
  return null;
}

main.addEventListener("keydown", (event) => {
  const { key } = event;
  const td = event.target.closest("[role=gridcell]");
  const held = event.altKey || event.metaKey || (event.ctrlKey && !["Home", "End"].includes(key));
  if (!td?.place || held) return;
  const { name, row, column } = td.place;
  const view = shown.get(name);
  const show = (focus) =>
    open({ step: name, index: view.index(row, column) }, { fresh: true, focus });
  const next = target(view, row, column, event);
  if (next) {
    const [down, across] = next;
    const inside = down >= 0 && down < view.rows && across >= 0 && across < view.columns;
    if (inside && !view.small && down !== row) setRow(view.letter, down);
    if (inside) focusCell(view, down, across);
  } else if (key === " " && name === "visible") turn(view, row, column);
  else if (key === "Enter" || key === " ") show("operand");
  else if (key === "Escape") close();
  else if (name === "visible" && key === "F2") show("turn");
  else if (view.given && (key === "F2" || /^[-\d.]$/.test(key))) {
    show();
    const input = find("#edit");
    input?.focus();
    if (key === "F2") input?.select();
    else if (input) input.value = key;
  } else return;
  event.preventDefault();
});

why.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT" && event.key !== "Escape") return;
  const operands = [...why.querySelectorAll(".operand")];
  const now = operands.indexOf(document.activeElement);
  const [first, second] = operands.map((one) => one.closest("tr"));
  const across = first && first === second ? 2 : 1;
  const move = { ArrowDown: across, ArrowUp: -across, ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move && operands.length)
    operands[Math.max(0, Math.min(operands.length - 1, now + move))].focus();
  else if (event.key === "Backspace") back("operand");
  else if (event.key === "Escape") close();
  else return;
  event.preventDefault();
});

// --- the start ------------------------------------------------------------------------------

function fresh() {
  const quiet =
    !state.layer && !state.batch && !state.head && !runs.touched && state.digits === content.digits;
  return quiet && find(".step table", main) && !shown.size;
}

function start() {
  recall();
  if (fresh() && carried.isExact(0, 0, 0)) adopt();
  else build();
  setTools();
  pressGallery();
  say();
  const place = state.cell && placeOf(state.cell);
  if (place && !place.view.small) setRow(place.view.letter, place.row);
  showWhy();
  if (state.cell) bringIntoSight(placeOf(state.cell)?.td, "center");
}

Object.assign(doing, { open, back, close, change, changeAll, choose, recompute, show: showWhy });
tools.hidden = false;
tools.elements.link.hidden = location.protocol === "about:"; // in a notebook there is no link
buildGallery();
start();
window.addEventListener("popstate", start);
window.addEventListener("hashchange", () => {
  if (history.state === null) start();
});

// For the browser's console, and for tests.
window.regard = {
  state,
  content,
  runs: () => runs,
  text: (step, index) => asText(derive(runs.now, labels, step, index), DIGITS),
  value: (step, index) => runs.now.value(step, index),
  rebuild,
  figures: () => ({ steps: stepFigures(), rows: rowFigures() }),
  turn: (row, column) => turn(shown.get("visible"), row, column),
  edit: (step, index, value) => change(editPlace(runs.now.steps.get(step), index), value),
};
