// The picture on the screen: its stations, the words above it, what lies between scores and weights,
// and the shelf on which a station opens.

import { isHead } from "./attention.js";
import { cut } from "./derivation.js";
import { button, fill, find, h, main, stage, typeset, widthOf } from "./elements.js";
import { fit, groupsOf } from "./picture.js";
import { carried, content, doing, drawing, layer, picture, runs, shown, state } from "./shown.js";
import { MOST, fillCells, gridOf, isLater, numbersOf, typeOf, unshaded, viewOf } from "./stations.js";
import { buildSummary, dropSummary, fillSummary } from "./summary.js";
import { drawWords, hasWords, wordsFit } from "./words.js";

const NARROW = 700; // pixels of a screen that shows one cross below the other
const LEAST = 28; // pixels of a cell with a number
const STRIP = 186; // below the picture, for what opens there
const MARGIN = 28;
const PILL = 92; // of the steps between scores and weights
const PAPER = 680; // pixels of a sheet
const MOST_LISTED = 6; // steps between scores and weights
const SHORT = 12; // cells of a long axis beside few words, and the part of many that a short one has
const MOST_DOTS = 14; // keys of a mask that is drawn between scores and weights
export const sheet = h("div.sheet-of-all");
const caption = find("#caption");
const whatIf = find(".what-if");
export const shelf = h("section", { id: "shelf", "aria-label": "The steps on the way" });

/** @type {any} */
let placed = null; // what `fit` found
let kind = ""; // wide or narrow
/** @type {any[]} */
let drawnGroups = [];
let sentenceHeight = 0; // pixels of the sentence above a narrow picture
let bottom = 0; // of the tables

// --- names ----------------------------------------------------------------------------------

// How many cells an axis is long. What is drawn needs no room for numbers: beside the words its other axes
// are not longer, nor too short to be seen.
function lengthOf(count) {
  const { L = 1, S } = layer().sizes;
  const most = count > MOST ? Math.min(count, Math.max(L, S, SHORT)) : count;
  return Math.max(L, S) > MOST ? Math.max(most, L / SHORT, S / SHORT) : most;
}

const isNamed = ({ axis }) =>
  axis === "L" || axis === "S" || (axis && content.labelSets[layer().labels[axis]] !== null);

// Pixels that the names of a table's rows need; 0 where the table left of it has the same rows.
function gutterOf(view, group) {
  const beside = group.some((one) => one.row === view.row && one.column === view.column - 1);
  if (beside || view.source || !isNamed(view.down)) return 0;
  const longest = Math.max(0, ...[...view.down.labels.slice(0, 500), view.down.labels.at(-1) ?? ""].map((label) => widthOf(cut(label, 18), 12)));
  return Math.ceil(Math.min(112, longest)) + 8;
}

const numberOf = (step) => {
  const steps = [...runs.now.steps.values()].filter(
    ({ name, op, phase }) => op !== "given" && phase === "forward" && isStation(name),
  );
  return steps.indexOf(step) + 1;
};

const isStation = (name) => [...shown.values()].some((view) => view.station === name && !view.copy && !view.shelved);

// The title, as long as there is room for.
function titleOf(view, room) {
  const { step, copy, turned, given } = view;
  const number = copy || given || step.of ? 0 : numberOf(step);
  const still = copy || given; // nothing is computed here
  const words = [copy ? "again" : given ? "given" : "", turned ? "turned" : ""].filter(Boolean).join(", ");
  const backward = step.phase === "backward";
  const formula = step.formula.length > 24 ? step.symbol : step.formula;
  const [name, symbol] = [step.name, still ? step.symbol : formula];
  const lead = (number ? 22 : 0) + (view.inside.length && view.name !== "weights" ? 22 : 0);
  const width = (parts) => lead + widthOf(parts.filter(Boolean).join("  "), 13.5) + 6;
  const [first, second, more] =
    [
      !backward && name !== symbol && !copy && [name, symbol, words],
      !backward && [name, "", words],
      ["", symbol, words],
      !backward && [name, "", ""],
      ["", symbol, ""],
    ].find((parts) => parts && width(parts) <= room) || ["", step.symbol, ""];
  const opens = view.inside.some((one) => runs.now.steps.has(one)) && view.name !== "weights";
  const open = () => doing.shelve(state.shelf === view.name ? "" : view.name);
  return [
    number > 0 && h("em", String(number)),
    first && h("b", first === step.symbol ? typeset(first) : first),
    second && h("span.formula", typeset(second)),
    more && h("small", more),
    opens && button("▾", open, { class: "opens", "aria-label": `how ${step.name} come about`, "aria-expanded": String(state.shelf === view.name) }),
  ].filter(Boolean).flatMap((part, k) => (k ? [" ", part] : [part]));
}

// --- the stations ---------------------------------------------------------------------------

function makeSection(view) {
  view.title = h("h2");
  view.body = view.big ? drawing.make(view) : gridOf(view);
  if (view.big) makeNames(view);
  view.section = h(
    "section.station",
    { "data-step": view.step.name, "data-station": view.name },
    view.title,
    view.body,
  );
  dressSection(view);
  shown.set(view.name, view);
  return view.section;
}

function dressSection({ section, step, copy, given }) {
  section.dataset.step = step.name;
  const kinds = { copy, given: given && !copy, backward: step.of || step.phase === "backward", flow: step.name === "weights" };
  for (const [name, on] of Object.entries(kinds)) section.classList.toggle(name, Boolean(on));
}

// The names at the sides of a drawing, as many as there is room for.
function makeNames(view) {
  view.names = [h("div.names.down"), h("div.names.right")];
  view.body.append(...view.names);
}

function fillNames({ names, down, right, gutter, heads, u, tall }) {
  const longest = Math.max(0, ...right.labels.map((label) => cut(label, 12).length));
  const sides = [
    [names[0], gutter ? down : null, tall, 13, "top"],
    [names[1], heads ? right : null, u, 6 * longest + 8, "left"],
  ];
  for (const [box, side, size, need, edge] of sides) {
    const every = side && Math.ceil(need / size);
    const some = side ? side.labels.filter((_, k) => k % every === 0 && (k * size + need <= side.size * size + 4 || !k)) : [];
    fill(
      box,
      some.map((label, k) => {
        const one = h("span", { title: label }, cut(label, edge === "top" ? 18 : 12));
        one.style[edge] = `${k * every * size}px`;
        return one;
      }),
    );
  }
}

function place(view, { x, y, w, h: height }) {
  const { section, heads, gutter } = view;
  const [u, tall] = [w / view.columns || 1, height / view.rows || 1];
  Object.assign(view, { x, y, w, height, u, tall, type: typeOf(u, tall) });
  const top = y - (heads ? 17 : 0);
  const styles = {
    left: x - gutter,
    top: top - 22,
    "--u": u,
    "--h": tall,
    "--gutter": gutter,
    "--heads": heads ? 17 : 0,
    "--size": view.type?.size ?? 10,
    "--w": w,
    "--tall": height,
  };
  for (const [name, value] of Object.entries(styles)) section.style.setProperty(name, `${value}px`);
  section.style.setProperty("--columns", String(view.columns));
  section.classList.toggle("tiny", !view.type && !view.big);
  section.classList.toggle("bare", !gutter);
}

// The pixels to the right of where a title begins that are its own.
function roomFor(view) {
  const next = [...shown.values()].filter(
    (one) => one.x > view.x && Math.abs(one.y - view.y) < 26 + (one.heads ? 17 : 0) && one.section.parentNode === sheet,
  );
  const edge = Math.min(...next.map((one) => one.x - one.gutter), placed.width + 40);
  return edge - view.x - 10;
}

export function build() {
  for (const view of shown.values()) view.drawn?.stop();
  shown.clear();
  sheet.replaceChildren();
  const exact = carried.isExact(state.layer, state.batch, state.head);
  find(".pooled-head", main)?.remove();
  stage.hidden = !exact;
  stage.replaceChildren(sheet);
  sheet.append(overlay, wordsBox, gate, caption, shelf);
  if (whatIf) sheet.append(whatIf);
  if (!exact) {
    const made = drawing.pooledHead();
    made.classList.add("pooled-head");
    main.prepend(made);
    dropSummary();
    return;
  }
  const width = stage.clientWidth;
  kind = width < NARROW ? "narrow" : "wide";
  let own = viewsOf(kind);
  if (kind === "wide" && width < 1000 && !own.flat().some((view) => view.big)) {
    const { u } = fit(own, { width: width - 2 * MARGIN, height: 600, least: LEAST });
    if (u < LEAST) own = viewsOf((kind = "narrow"));
  }
  overlay.before(...own.flat().map(makeSection));
  drawnGroups = own;
  lay();
  fillShelf();
  buildSummary();
}

function viewsOf(which) {
  const there = ({ step }) => runs.now.steps.has(step);
  return groupsOf(picture(), which).map((group) => {
    const views = group.filter(there).map((station) => ({ ...viewOf(station), station: station.step }));
    for (const view of views) {
      view.gutter = gutterOf(view, views);
      [view.wide, view.high] = [view.columns, view.rows].map(lengthOf);
      view.heads = view.right.labels.length > 0 && (view.row === 0 || (!view.above && isNamed(view.right)));
    }
    return views;
  });
}

export const overlay = h("div.overlay");
const wordsBox = h("div.words-above");
const gate = h("div.gate");

// Put everything where there is room for it.
export function lay() {
  const groups = drawnGroups;
  if (stage.hidden) return;
  const width = stage.clientWidth - 2 * MARGIN * (kind === "wide" ? 1 : 0.5);
  const tall = kind === "wide" ? innerHeight - stage.offsetTop - STRIP : Infinity;
  const left = MARGIN * (kind === "wide" ? 1 : 0.5);
  const room = { width, tallest: kind === "wide" ? 40 : 26, height: Math.max(tall, 320), least: LEAST, minimum: wantedWidth(), zoom: state.zoom, between: kind === "wide" ? STRIP : 0 };
  placed = fit(groups, room);
  let above = wordsFit(placed, left, groups) ? 10 : wordsHeight();
  if (above > 10 && kind === "wide") placed = fit(groups, { ...room, height: room.height - above });
  sheet.dataset.kind = kind;
  caption.style.cssText = "";
  doing.sentence();
  if (kind === "narrow") {
    caption.style.top = `${above}px`;
    above += sentenceHeight = caption.offsetHeight + 20;
  }
  for (const view of groups.flat()) {
    const at = placed.places.get(view.name);
    place(view, { ...at, x: at.x + left, y: at.y + above });
  }
  bottom = above + (kind === "wide" ? placed.bottom : placed.height);
  sheet.style.width = `${Math.max(placed.width + 2 * left, stage.clientWidth)}px`;
  stage.style.setProperty("--paper-zoom", String(Math.min(1, PAPER / Math.max(placed.width + 2 * left, 1))));
  stage.classList.toggle("zoomed", state.zoom > 1);
  stage.classList.toggle("scrolls", placed.width + left > stage.clientWidth);
  if (kind === "wide") {
    caption.style.left = `${left}px`;
    caption.style.top = `${bottom + 22}px`;
    caption.style.width = `${Math.max(240, Math.min(520, middleOfGate() - PILL / 2 - left - 14))}px`;
  }
  shelf.style.top = `${bottom + 14}px`;
  placeGate();
  const strip = kind === "wide" ? STRIP : (whatIf?.offsetHeight ?? 0) + 24;
  sheet.style.height = `${Math.max(above + placed.height + 24, bottom + strip)}px`;
  for (const view of groups.flat()) fill(view.title, titleOf(view, roomFor(view)));
  repaint();
}

// Room for what is said of a change.
export function settle() {
  if (kind === "wide") sheet.style.minHeight = `${bottom + caption.offsetHeight + 30}px`;
  else if (state.walk === null && caption.offsetHeight + 20 !== sentenceHeight && !stage.hidden) lay();
}

// A reader who asks for many decimals gets cells that are wide enough.
const wantedWidth = () => (state.digits > 4 ? 13 * 0.65 * (state.digits + 4) : 0);
const wordsHeight = () => (hasWords() ? 128 : 16);

// New numbers in what is there.
export function repaint() {
  for (const [name, old] of shown) {
    const fresh = viewOf({ ...old, step: old.station });
    const gone = fresh.step.name !== old.step.name;
    for (const key of ["step", "block", "own", "index", "given"]) old[key] = fresh[key];
    if (gone) relabel(old);
    if (old.big) {
      drawing.fill(old);
      if (old.names) fillNames(old);
    } else fillCells(old);
    old.section.classList.toggle("later", state.walk !== null && isLater(old));
    shown.set(name, old);
  }
  drawWords(wordsBox, kind);
  drawGate();
  fillSummary();
  doing.mark();
}

// Another step in the same place: a gradient instead of a number, or back.
function relabel(view) {
  dressSection(view);
  find("[role=grid]", view.section)?.setAttribute("aria-label", `${view.step.name}, ${view.step.formula}`);
  fill(view.title, titleOf(view, roomFor(view)));
}

// --- between scores and weights -------------------------------------------------------------

function chain() {
  const weights = shown.get("weights");
  const axes = weights ? runs.now.steps.get("weights").axes.join() : "";
  return (weights?.inside ?? []).filter((name) => {
    const step = runs.now.steps.get(name);
    return step && step.op !== "given" && step.axes.join() === axes && !step.of;
  });
}

function drawGate() {
  const weights = shown.get("weights");
  gate.hidden = !weights;
  if (!weights) return;
  const open = state.shelf === "weights";
  const names = chain();
  const listed = names.length > MOST_LISTED ? [...names.slice(0, MOST_LISTED - 1), `${names.length - MOST_LISTED + 1} more`] : names;
  const later = (name) => state.walk !== null && runs.now.steps.has(name) && isLater({ step: { name } });
  const words = listed.map((name, k) => [" ", h(later(name) ? "span.later" : "span", k < listed.length - 1 ? name : `${name} ▾`)]);
  const steps = names.length > 0 &&
    button(words, () => doing.shelve(open ? "" : "weights"), {
      class: "steps-between",
      title: "the steps on the way, one by one",
      "aria-expanded": String(open),
    });
  fill(gate, dots(), steps, rampOf(weights));
}

// A dot for each pair: click one to hide a key, or to show it.
function dots() {
  const view = shown.get("weights");
  const { S, L = 1 } = layer().sizes;
  if (kind !== "wide" || view.big || S > MOST_DOTS)
    return kind === "wide" && h("span.arrow", { "aria-hidden": "true" }, "→");
  const step = runs.now.steps.get("visible");
  const size = Math.min(14, 84 / S);
  const made = Array.from({ length: L * S }, (_, k) => {
    const [i, j] = [Math.floor(k / S), k % S];
    const index = step?.axes.map((axis) => ({ H: state.head, L: i, S: j })[axis]);
    const seen = !step || runs.now.value("visible", index);
    const title = seen ? "visible: click to hide" : "hidden: click to show";
    const dot = h(seen ? "i.dot" : "i.dot.no", { title });
    dot.style.cssText = `left:${j * size}px;top:${i * view.tall}px;width:${size}px;height:${view.tall}px`;
    dot.addEventListener("click", () => doing.changeAll(runs.now.turns(state.head, i, j), ""));
    return dot;
  });
  const box = h("div.dots", { "aria-hidden": "true" }, made);
  box.style.width = `${S * size}px`;
  return box;
}

// Halfway between scores and weights.
function middleOfGate() {
  const weights = shown.get("weights");
  const source = shown.get(weights?.source);
  return source ? (source.x + source.w + weights.x) / 2 : 600;
}

function placeGate() {
  const weights = shown.get("weights");
  if (!weights) return;
  const source = shown.get(weights.source);
  if (kind === "wide" && source) {
    const right = source.x + source.w;
    gate.style.cssText = `left:${right}px;top:${weights.y}px;width:${weights.x - right}px;height:${weights.height}px`;
    gate.style.setProperty("--below", `${bottom - weights.y + 12}px`);
    if (!whatIf) return;
    const edge = stage.clientWidth - MARGIN - whatIf.offsetWidth;
    const left = Math.max(middleOfGate() + PILL / 2 + 8, Math.min(weights.x + Math.max(weights.w + 16, 120), edge));
    const below = left < weights.x + (weights.big ? 190 : 120) ? 42 : 18; // the scale of the colours
    whatIf.style.cssText = `left:${left}px;top:${bottom + below}px`;
    shelf.style.width = `${left - 12}px`; // what is switched is seen in the steps beside it
  } else {
    shelf.style.width = "100%";
    const y = source ? source.y + source.height + 6 : weights.y - 60;
    gate.style.cssText = `left:14px;top:${y}px;width:${stage.clientWidth - 28}px`;
    gate.style.setProperty("--below", "0px");
    if (whatIf) whatIf.style.cssText = `left:14px;top:${bottom + 24}px`;
  }
}

// What the colours of the weights mean: they are of the largest, which is said.
function rampOf(weights) {
  if (unshaded(weights) || state.backwards) return [];
  const ramp = (from, to) => h("span.ramp", { title: "The colours of the weights" }, from, h("i"), to);
  if (weights.big) return ramp("a thousandth", "the largest");
  const { largest, least } = numbersOf(weights);
  const short = (value) => String(Number(value.toPrecision(2)));
  return ramp(short(least), short(largest));
}

// --- the shelf ------------------------------------------------------------------------------

const SHELF = 36; // pixels of a cell

export function fillShelf() {
  for (const [name, view] of shown) {
    if (!view.shelved) continue;
    view.drawn?.stop();
    shown.delete(name);
  }
  const view = shown.get(state.shelf);
  shelf.hidden = !view;
  stage.classList.toggle("shelf-open", Boolean(view));
  if (!view) {
    sheet.append(caption);
    return;
  }
  const steps = view.inside.filter((name) => {
    const step = runs.now.steps.get(name);
    return step && (!step.of || state.backwards) && (step.phase !== "backward" || state.backwards);
  });
  const close = button("×", () => doing.shelve(""), { class: "close", "aria-label": "close the steps" });
  let named = null;
  const views = steps.map((name) => {
    const station = { name, step: name, column: 0, row: 0, turned: view.turned, left: "", above: "", source: "", inside: [], copy: false };
    const axes = runs.now.steps.get(name).axes.filter((axis) => !isHead(axis));
    /** @type {any} */
    const own = { ...viewOf({ ...station, turned: view.turned && axes.length === 2 }), station: name, shelved: true };
    own.gutter = own.down.axis === named ? 0 : gutterOf(own, []);
    named = own.down.axis ?? named; // the names of rows are once on the shelf
    own.heads = own.right.labels.length > 0;
    return own;
  });
  const list = h("div.shelved", { tabindex: 0, role: "group", "aria-label": `steps to ${view.step.name}` }, views.map(makeSection));
  fill(shelf, close, h("h2", `The steps to ${view.step.name}`), caption, list);
  const tall = 20;
  for (const own of views) {
    const most = own.big ? Math.min(320 / own.columns, 8) : SHELF;
    const [u, high] = [own.big ? most : SHELF, own.big ? Math.min(240 / own.rows, 8) : tall];
    place(own, { x: 0, y: 0, w: own.columns * u, h: own.rows * high });
    own.title.title = `${own.step.name}: ${own.step.formula}`;
    fill(own.title, titleOf(own, Math.max(own.w, 72 - own.gutter)));
    if (own.big) {
      fillNames(own);
      drawing.fill(own);
    } else fillCells(own);
  }
  sheet.style.minHeight = `${shelf.offsetTop + shelf.offsetHeight}px`;
  if (kind !== "wide") shelf.style.top = `${shown.get(state.shelf).y + shown.get(state.shelf).height + 40}px`;
}

// --- zoom -----------------------------------------------------------------------------------

// Larger or smaller cells; what is under the pointer stays there.
export function zoomTo(zoom, x, y) {
  const next = Math.max(1, Math.min(16, zoom));
  if (next === state.zoom || !placed) return;
  const box = stage.getBoundingClientRect();
  const [px, py] = [x - box.left + stage.scrollLeft, y - box.top + stage.scrollTop];
  const apart = (one) => Math.hypot(
    Math.max(one.x - px, 0, px - one.x - one.w), Math.max(one.y - py, 0, py - one.y - one.height));
  const views = [...shown.values()].filter((one) => !one.shelved);
  if (!views.length) return;
  const near = views.reduce((best, one) => (apart(one) < apart(best) ? one : best));
  const [fx, fy] = [(px - near.x) / near.w, (py - near.y) / near.height];
  state.zoom = next;
  lay();
  stage.scrollLeft = near.x + fx * near.w - (x - box.left);
  stage.scrollTop = near.y + fy * near.height - (y - box.top);
  for (const view of shown.values()) if (view.big) drawing.showFigures(view);
}

stage.addEventListener("scroll", () => {
  for (const view of shown.values()) if (view.big) drawing.showFigures(view);
});

// The cell of a station under the pointer.
export function pointed(event) {
  const cell = event.target.closest("[role=gridcell]");
  if (cell?.place) return { view: shown.get(cell.place.name), ...cell.place };
  const canvas = event.target.closest("canvas");
  const view = canvas?.place && shown.get(canvas.place.name);
  if (!view) return null;
  const [row, column] = drawing.cellAt(event, view.canvas, view);
  return { view, row, column };
}

