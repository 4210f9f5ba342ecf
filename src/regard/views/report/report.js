// The page: what a reader may open, change and choose, with the mouse and with keys. All arithmetic
// is in attention.js.

import { formatNumber } from "./numbers.js";
import { asText, cellName, cut, derive } from "./derivation.js";
import { isHead } from "./attention.js";
import { fill, find, h, stage, tools, why } from "./elements.js";
import {
  carried,
  comparable,
  content,
  doing,
  drawing,
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
import { focusCell, placeOf, viewOf } from "./stations.js";
import { build, fillShelf, lay, pointed, repaint, settle, sheet, zoomTo } from "./stage.js";
import { editPlace } from "./change.js";
import { recall, remember } from "./link.js";
import { mark, showWhy } from "./why.js";
import { rowFigures, stepFigures } from "./summary.js";
import { leave, sentence, walk, walkTo } from "./walk.js";
import { lightUp } from "./words.js";

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
  state.touched = true;
  reveal(cell.step);
  const view = placeOf(cell)?.view;
  if (view?.shelved) view.section.scrollIntoView({ block: "nearest", inline: "nearest" });
  showWhy(focus);
  find(".mark.open")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  if (push) remember();
}

// Open the station that a step is in, and turn to gradients, if need be.
function reveal(name) {
  const step = runs.now.steps.get(name);
  const backwards = step.phase === "backward";
  const there = () => [...shown.values()].some((view) => view.step.name === name || view.station === name);
  if (backwards !== state.backwards && step.phase !== "loss") turnBack(backwards);
  if (there()) return;
  const station = [...shown.values()].find((view) => view.inside.includes(name));
  if (station) shelve(station.name);
}

function shelve(name) {
  const here = /** @type {any} */ (document.activeElement?.closest("[data-station], .gate"));
  state.shelf = name;
  fillShelf();
  repaint();
  for (const one of sheet.querySelectorAll(".opens"))
    one.setAttribute("aria-expanded", String(one.closest("[data-station]").dataset.station === name));
  if (here?.isConnected) find("button", here)?.focus({ preventScroll: true });
}

// Numbers forwards, or their gradients in the same places.
function turnBack(backwards) {
  state.backwards = backwards;
  const box = find("[name=backwards]");
  if (box) box.checked = backwards;
  document.body.classList.toggle("backwards", backwards);
  fillShelf();
  repaint();
  sentence();
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

// Turn the cell of a mask, if a given table decides about it.
function turn(step, index) {
  const cell = { step, index };
  open(cell, { fresh: true, push: false });
  changeAll(runs.now.turns(...derive(runs.now, labels, step, index).place), "");
}

// New numbers in the picture; a new picture where the steps are others.
function recompute() {
  const before = runs.now?.ids;
  refresh();
  if (!before || before.join() !== runs.now.ids.join()) rebuild();
  else repaint();
  say();
}

function rebuild() {
  const active = document.activeElement?.place;
  build();
  if (active && shown.has(active.name)) focusCell(shown.get(active.name), active.row, active.column);
  setTools();
  drawing.pressGallery?.();
  mark();
}

// The tools say what is shown; a switch that changes nothing here cannot be used.
function setTools() {
  for (const name of ["layer", "batch", "head", "digits"]) {
    if (tools.elements[name]) tools.elements[name].value = String(state[name]);
  }
  for (const box of /** @type {any} */ (document.querySelectorAll("[name=switch]"))) {
    box.checked = state.switches.has(box.value);
    box.disabled = !layer().switches.includes(box.value);
  }
}

// What is changed, and what that did.
function say() {
  const lines = [...state.switches].map((name) => content.switches[name]);
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
  settle();
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
  const view = viewOf({ step: name, turned: false });
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
  Object.assign(state, place, { shelf: "" });
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
document.addEventListener("change", (event) => {
  const target = /** @type {any} */ (event.target);
  if (["layer", "batch", "head"].includes(target.name))
    choose({ [target.name]: Number(target.value) });
  else if (target.name === "digits") {
    state.digits = Number(target.value);
    lay();
    showWhy();
    remember();
  } else if (target.name === "theme") {
    if (target.value) document.documentElement.dataset.theme = target.value;
    else delete document.documentElement.dataset.theme;
    repaint();
  } else if (target.name === "backwards") {
    turnBack(target.checked);
    close();
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
  if (place) focusCell(place.view, place.row, place.column);
  remember();
}

// --- mouse and keys -------------------------------------------------------------------------

const cellOf = ({ view, row, column }) => ({ step: view.step.name, index: view.index(row, column) });

stage.addEventListener("click", (event) => {
  const at = pointed(event);
  if (!at) {
    const free = !event.target.closest("button, label, #why, #caption, .word");
    if (free && state.cell) close();
    return;
  }
  if (at.view.canvas) at.view.cursor = [at.row, at.column];
  focusCell(at.view, at.row, at.column);
  open(cellOf(at), { fresh: true });
});
stage.addEventListener("dblclick", (event) => {
  if (pointed(event)?.view.given) find("#edit")?.select();
});
stage.addEventListener("pointerover", (event) => {
  const { target } = event;
  const word = target.closest(".word");
  const lit = word?.lit ?? (target.pair ? { q: target.pair[0] } : null);
  if (word || lit || state.lit) lightUp(find(".words-above"), lit);
  point(event);
});
stage.addEventListener("pointermove", (event) => event.target.closest("canvas") && point(event));
stage.addEventListener("pointerleave", () => mark());

// The cross of the number under the pointer, while none is open.
function point(event) {
  if (state.cell || event.pointerType === "touch") return;
  const at = pointed(event);
  if (at) state.touched = true;
  const seen = at && !at.view.given && !at.view.section.classList.contains("later");
  mark(seen ? cellOf(at) : null);
}

stage.addEventListener(
  "wheel",
  (event) => {
    if (!event.ctrlKey && !(state.zoom > 1 || event.altKey) && ![...shown.values()].some((one) => one.big && !one.shelved)) return;
    if (event.target.closest("#why, #shelf")) return;
    event.preventDefault();
    zoomTo(state.zoom * Math.exp(-event.deltaY * 0.0018), event.clientX, event.clientY);
  },
  { passive: false },
);

// Two fingers enlarge what is between them.
let apart = 0;
const pinch = (event) => {
  const [a, b] = event.touches;
  const now = b ? Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) : 0;
  if (b) event.preventDefault();
  if (b && apart) zoomTo((state.zoom * now) / apart, (a.clientX + b.clientX) / 2, (a.clientY + b.clientY) / 2);
  apart = now;
};
for (const kind of ["touchstart", "touchmove", "touchend"]) stage.addEventListener(kind, pinch, { passive: false });

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

// To which cell of a table a key leads; null if it is no such key.
function target(view, row, column, { key, ctrlKey }) {
  if (key in STEPS) return [row + STEPS[key][0], column + STEPS[key][1]];
  if (key === "Home") return [ctrlKey ? 0 : row, 0];
  if (key === "End") return [ctrlKey ? view.rows - 1 : row, view.columns - 1];
  return null;
}

stage.addEventListener("keydown", (event) => {
  const { key } = event;
  const place = event.target.place;
  const held = event.altKey || event.metaKey || (event.ctrlKey && !["Home", "End"].includes(key));
  if (!place || held) return;
  const view = shown.get(place.name);
  const [row, column] = view.canvas ? view.cursor : [place.row, place.column];
  const at = { view, row, column };
  const show = (focus) => open(cellOf(at), { fresh: true, focus });
  const next = target(view, row, column, event);
  if (next) {
    const [down, across] = next;
    const inside = down >= 0 && down < view.rows && across >= 0 && across < view.columns;
    if (inside && view.canvas) {
      view.cursor = [down, across];
      mark(cellOf({ view, row: down, column: across }));
      find(".live").textContent = asText(derive(runs.now, labels, view.step.name, view.index(down, across)), 4).split("\n")[0];
    } else if (inside) focusCell(view, down, across);
  } else if (key === " " && view.step.name === "visible") turn(view.step.name, view.index(row, column));
  else if (key === "Enter" || key === " ") show("operand");
  else if (key === "Escape" && !state.cell) return;
  else if (key === "Escape") close();
  else if (view.step.name === "visible" && key === "F2") show("turn");
  else if (view.given && (key === "F2" || /^[-\d.]$/.test(key))) {
    show();
    const input = find("#edit");
    input?.focus();
    if (key === "F2") input?.select();
    else if (input) input.value = key;
  } else return;
  event.preventDefault();
  event.stopPropagation();
});

// Elsewhere the arrow keys go through the calculation, and + and − enlarge it.
document.addEventListener("keydown", (event) => {
  const { key, altKey, ctrlKey, metaKey } = event;
  const target = /** @type {any} */ (event.target);
  if (altKey || ctrlKey || metaKey || target.closest("input, select, textarea, summary, #why, .shelved")) return;
  const middle = [stage.getBoundingClientRect().left + stage.clientWidth / 2, innerHeight / 2];
  if (key === "ArrowRight" || key === "ArrowLeft") walk(key === "ArrowRight" ? 1 : -1);
  else if (key === "+" || key === "=") zoomTo(state.zoom * 1.3, ...middle);
  else if (key === "-") zoomTo(state.zoom / 1.3, ...middle);
  else if (key === "Escape") escape();
  else return;
  event.preventDefault();
});

// One thing after the other is closed.
function escape() {
  if (state.cell) close();
  else if (state.shelf) shelve("");
  else if (state.walk !== null) leave();
  else if (state.zoom > 1) zoomTo(1, 0, 0);
}

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
  event.stopPropagation();
});

// Another width is another picture, and where all of it is in sight another height too. A page may begin
// unseen, as in a folded notebook.
const roomNow = () => `${stage.clientWidth} ${sheet.dataset.kind === "wide" ? innerHeight : ""}`;
let lastRoom = "";
function follow() {
  if (roomNow() === lastRoom) return;
  rebuild();
  showWhy();
  lastRoom = roomNow();
}

// --- the start ------------------------------------------------------------------------------

function start() {
  recall();
  build();
  setTools();
  drawing.pressGallery?.();
  say();
  if (state.cell) reveal(state.cell.step);
  showWhy();
  const block = sheet.dataset.kind === "wide" ? "nearest" : "center";
  if (state.cell) find(".mark.open")?.scrollIntoView({ block, inline: "nearest" });
}

Object.assign(doing, { open, back, close, change, changeAll, choose, recompute, show: showWhy });
Object.assign(doing, { mark, reveal, sentence, shelve, turnBack, walkTo });
tools.hidden = false;
tools.elements.link.hidden = location.protocol === "about:"; // in a notebook there is no link
drawing.buildGallery?.();
start();
lastRoom = roomNow();
new ResizeObserver(follow).observe(stage);
addEventListener("resize", follow);
window.addEventListener("popstate", start);
window.addEventListener("hashchange", () => {
  if (history.state === null) start();
});

// For the browser's console, and for tests.
window.regard = {
  state,
  content,
  runs: () => runs,
  text: (step, index) => asText(derive(runs.now, labels, step, index)),
  value: (step, index) => runs.now.value(step, index),
  rebuild,
  figures: () => ({ steps: stepFigures(), rows: rowFigures() }),
  shown,
  reveal,
  shelve,
  turnBack,
  turn: (row, column) => {
    const { axes } = runs.now.steps.get("visible");
    turn("visible", axes.map((axis) => ({ H: state.head, L: row, S: column })[axis]));
  },
  edit: (step, index, value) => change(editPlace(runs.now.steps.get(step), index), value),
};
