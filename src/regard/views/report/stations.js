// The tables of the picture: which numbers each shows, and its cells as texts, shades and hints.

import { formatNumber } from "./numbers.js";
import { cut } from "./derivation.js";
import { gradientOf, isHead, position } from "./attention.js";
import { hiddenBy } from "./visibility.js";
import { bdi, h, widthOf } from "./elements.js";
import { comparable, content, labels, layer, ownHead, picture, runs, shown, state } from "./shown.js";

export const MOST = 32; // rows or columns of a table of elements; larger ones are drawn
const FAINT = 0.08; // the colour of the least weight

// Which numbers a station shows now, and how: rows and columns are those on the screen.
/** @returns {View} */
export function viewOf(station) {
  const backwards = state.backwards && !state.forward.has(station.step);
  const gradient = backwards && gradientOf(runs.now, station.step);
  const step = gradient || runs.now.steps.get(station.step);
  const own = ownHead(step, state.head);
  const block = runs.now.block(step.name, own ?? 0);
  const axes = step.axes.filter((axis) => !isHead(axis));
  const rowAxis = axes.length === 2 || axes[0] === "L" ? axes[0] : null;
  const columnAxis = axes.length === 2 ? axes[1] : rowAxis ? null : (axes[0] ?? null);
  const { offset, count } = partOf(columnAxis, block.width);
  const names = (axis) => (axis ? labels(axis) : []);
  const alone = !("L" in layer().sizes) && !rowAxis && axes.length > 0;
  const sides = [
    { size: block.rows, labels: alone ? [layer().alone] : names(rowAxis), axis: rowAxis },
    { size: count, labels: names(columnAxis).slice(offset, offset + count), axis: columnAxis },
  ];
  if (station.turned) sides.reverse();
  const index = (row, column) => {
    const [r, c] = station.turned ? [column, row] : [row, column];
    const places = axes.length === 2 ? [r, c + offset] : rowAxis ? [r] : columnAxis ? [c + offset] : [];
    return own === null ? places : [own, ...places];
  };
  const [down, right] = sides;
  const notes = content.labelSets[layer().notes[station.step]] ?? [];
  return {
    notes: rowAxis && !station.turned ? notes : [],
    ...station,
    step,
    own,
    block,
    offset,
    count,
    index,
    rows: down.size,
    columns: right.size,
    down,
    right,
    big: Math.max(down.size, right.size) > MOST,
    given: step.op === "given" && step.name !== "width",
  };
}

// The part of an axis, which all heads share, that belongs to the head that is shown.
function partOf(axis, width) {
  const packed = picture().slices[axis];
  if (!packed) return { offset: 0, count: width };
  const { sizes } = layer();
  const [g, h] = [Math.floor(state.head / (sizes.H / sizes.G)), state.head];
  const own = packed.at(-1).toUpperCase();
  const offset = position(packed, { g, h, [packed.at(-1)]: 0 }, sizes);
  return { offset, count: sizes[own] };
}

// Where a cell is on the picture; a factor is looked for in the copy that belongs to its product.
export function placeOf({ step, index }, user = "") {
  const found = [];
  for (const view of shown.values()) {
    if (view.step.name !== step && view.station !== step) continue;
    if (view.own !== null && index[0] !== view.own) continue;
    const { row, column } = runs.now.locate(view.step.name, index);
    const at = column - view.offset;
    if (at < 0 || at >= view.count) continue;
    const [r, c] = view.turned ? [at, row] : [row, at];
    found.push({ view, row: r, column: c, cell: view.cells?.[r * view.columns + c] ?? null });
  }
  return found.find(({ view }) => view.name.endsWith(`>${user}`)) ?? found[0] ?? null;
}

// --- what a cell shows ----------------------------------------------------------------------

// The largest number of a table, which is darkest, and the least.
function extremesOf(rows) {
  let [largest, least] = [0, Infinity];
  for (const { values, visible } of rows)
    for (let k = 0; k < values.length; k++) {
      const size = Math.abs(values[k]);
      if (visible?.[k] === 0 || !Number.isFinite(size)) continue;
      if (size > largest) largest = size;
      if (size < least) least = size;
    }
  return { largest, least };
}

export const unshaded = ({ step }) => step.op === "visible" || !step.axes.length || step.axes.at(-1) === "L";

// The numbers of a station row by row as its step has them, and what its colours go from and to: those
// of weights from the least one on, so that weights that are nearly alike can be told apart.
export function numbersOf(view) {
  const rows = Array.from({ length: view.block.rows }, (_, row) => {
    const { values, visible } = runs.now.seenRow(view.step.name, view.own ?? 0, row);
    const end = view.offset + view.count;
    return view.count === values.length
      ? { values, visible }
      : { values: values.subarray(view.offset, end), visible };
  });
  const { largest, least } = unshaded(view) ? { largest: 0, least: 0 } : extremesOf(rows);
  return { rows, largest, least: view.step.name === "weights" && least < largest ? least : 0 };
}

// The largest type of cells of so many pixels in which −0.00 has room, and for how many digits there is
// room then; null: for no number.
export function typeOf(u, tall) {
  const size = Math.max(9, Math.min(15, Math.floor(tall * 0.62), (10 * (u - 4)) / widthOf("−0.00", 10)));
  const [digit, minus] = ["0", "−"].map((text) => widthOf(text, size));
  const room = (u - 3) / digit;
  return room < 3 || tall < 13 ? null : { size, room, minus: minus / digit };
}

const roomOf = (text, minus) =>
  text.length - (text.match(/[.,]/g)?.length ?? 0) / 2 + (text.includes("−") ? minus - 1 : 0);

// A number with as many decimals as there is room for, at most those that a reader asked for.
export function figure(value, { room, minus }, signed) {
  if (!Number.isFinite(value)) return formatNumber(value);
  const most = Math.floor(room - 1.5 - (signed ? minus : 0));
  for (let digits = Math.min(state.digits, Math.max(most, 0)); digits >= 0; digits--) {
    const text = inDigits(value, digits).replace("e+", "e");
    if (roomOf(text, minus) <= room) return text;
  }
  return value.toExponential(0).replace("-", "−").replace("e+", "e");
}

function inDigits(value, digits) {
  if (value === 0 || Math.abs(value) >= 10 ** -Math.min(4, digits)) return formatNumber(value, digits);
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && /[1-9]/.test(text) ? `−${text}` : text;
}

// Every cell of a table of elements, in the order in which it is on the screen.
function cellsOf(view) {
  const { rows, ...colours } = numbersOf(view);
  const { step, own, offset } = view;
  const compared = runs.touched && comparable(step.name);
  const signed = rows.some(({ values }) => values.some((value) => value < 0));
  const made = rows.map(({ values, visible }, row) => {
    const before = compared ? runs.plain.row(step.name, own ?? 0, row) : null;
    return Array.from(values, (value, column) => {
      const changed = before !== null && !Object.is(before[column + offset], value);
      const was = changed ? `was ${formatNumber(before[column + offset])}` : "";
      const hidden = visible?.[column] === 0;
      const cell = hidden ? hiddenCell(row, column) : numberCell(view, value, colours, signed);
      return { ...cell, changed, hint: cell.hint && was ? `${cell.hint}; ${was}` : cell.hint || was };
    });
  });
  if (!view.turned) return made.flat();
  return Array.from({ length: view.count }, (_, column) => made.map((row) => row[column])).flat();
}

function hiddenCell(row, column) {
  const names = hiddenBy(runs.now.verdict(state.head, row, column));
  const list = names.map((one) => cut(one, 80)).join(", ");
  return { text: "–", kind: "hidden", share: 0, hint: `hidden by: ${list}` };
}

function numberCell({ step, type }, value, { largest, least }, signed) {
  if (step.op === "visible")
    return { text: value ? "1" : "0", kind: value ? "" : "off", share: 0, hint: "" };
  const text = type ? remembered(value, type, signed) : "";
  if (!Number.isFinite(value)) return { text, kind: "odd", share: 0, hint: "" };
  const beyond = least ? FAINT + ((1 - FAINT) * (Math.abs(value) - least)) / (largest - least) : 0;
  const share = beyond || (largest ? Math.abs(value) / largest : 0);
  return { text, kind: value < 0 ? "n" : "p", share, hint: "" };
}

// Most numbers are the same after an edit: how they are written is kept.
const kept = new Map();
function remembered(value, type, signed) {
  const kind = type.room + (signed ? 0.001 : 0) + state.digits * 1000;
  if (!kept.has(kind)) kept.set(kind, new Map());
  const own = kept.get(kind);
  if (own.size > 20_000) own.clear();
  const key = Object.is(value, -0) ? "-0" : value;
  if (!own.has(key)) own.set(key, figure(value, type, signed));
  return own.get(key);
}

// New numbers in the cells that are there.
export function fillCells(view) {
  if (!view.cells) return;
  const later = state.walk !== null && isLater(view);
  for (const [k, cell] of cellsOf(view).entries()) dress(view.cells[k], cell, later);
}

// Whether a step by step reader has not come so far.
export const isLater = (view) =>
  !view.given && [...runs.now.steps.keys()].indexOf(view.step.name) > (state.walk ?? Infinity);

function dress(element, { text, kind, share, hint, changed }, later) {
  const words = later ? "" : text;
  const word = element.firstChild;
  if (word.data !== words) word.data = words;
  const style = later ? "later" : changed ? `${kind} changed` : kind;
  if (element.kind !== style) element.className = element.kind = style;
  const shade = later ? 0 : Math.round(share * 100);
  if (element.shade !== shade) element.style.setProperty("--share", String((element.shade = shade)));
  if (element.title !== hint) element.title = hint;
}

// --- a table of elements --------------------------------------------------------------------

// Names, rows and cells; one of the cells is reached by Tab.
export function gridOf(view) {
  const { rows, columns, down, right, step, notes } = view;
  view.cells = [];
  const name = (role, text, note = "") =>
    h("span", { role, title: note ? `${text}: ${note}` : text }, bdi(cut(text, 60)));
  const heads = Array.from({ length: columns }, (_, k) => name("columnheader", right.labels[k] ?? ""));
  const body = Array.from({ length: rows }, (_, row) => {
    const cells = Array.from({ length: columns }, (_, column) => {
      const cell = h("span", { role: "gridcell", tabindex: row || column ? -1 : 0 });
      cell.append("");
      cell.place = { name: view.name, row, column };
      view.cells.push(cell);
      return cell;
    });
    return h("div", { role: "row" }, name("rowheader", down.labels[row] ?? "", notes[row]), cells);
  });
  const corner = h("span.corner", { role: "columnheader" });
  const grid = h(
    "div.grid",
    { role: "grid", "aria-label": `${step.name}, ${step.formula}` },
    h("div.heads", { role: "row" }, corner, heads),
    body,
  );
  fillCells(view);
  return grid;
}

export function focusCell(view, row, column) {
  const cell = view.cells?.[row * view.columns + column];
  if (!cell) return view.canvas?.focus({ preventScroll: true });
  for (const other of view.cells) if (other.tabIndex === 0) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.scrollIntoView({ block: "nearest", inline: "nearest" });
  cell.focus({ preventScroll: true });
}
