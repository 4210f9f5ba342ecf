// The numbers of a step as a table: texts, shades and alignment as the printed tables have them, and
// cells that keys can reach.

import { formatNumber, rounded } from "./numbers.js";
import { cut } from "./derivation.js";
import { hiddenBy } from "./visibility.js";
import { isHead } from "./attention.js";
import { bdi, colHead, find, h, rowHead, table, typeset } from "./elements.js";
import { comparable, content, labels, layer, ownHead, runs, shown, state } from "./shown.js";

const PRINTED = 32; // larger matrices are drawn
const LEVELS = 9; // of shade
const DIGITS = 8; // of what a number was

// The view of a step: where its numbers are, and what its table looks like.
/** @returns {View} */
export function viewOf(name) {
  const step = runs.now.steps.get(name);
  const own = ownHead(step, state.head);
  const block = runs.now.block(name, own ?? 0);
  const axes = step.axes.filter((axis) => !isHead(axis));
  const rowAxis = axes.length === 2 || axes[0] === "L" ? axes[0] : null;
  const columnAxis = axes.length === 2 ? axes[1] : rowAxis ? null : (axes[0] ?? null);
  const alone = axes.length && !("L" in layer().sizes) && !/^[Wb]_/.test(name) ? layer().alone : "";
  return {
    name,
    step,
    own,
    block,
    rows: block.rows,
    columns: block.width,
    rowLabels: rowAxis ? labels(rowAxis) : alone ? [alone] : [],
    columnLabels: columnAxis ? labels(columnAxis) : [],
    notes: name in layer().notes ? content.labelSets[layer().notes[name]] : [],
    small: Math.max(block.rows, block.width) <= PRINTED,
    given: step.op === "given" && name !== "width",
    index: (row, column) => [
      ...(own === null ? [] : [own]),
      ...(axes.length === 2 ? [row, column] : rowAxis ? [row] : columnAxis ? [column] : []),
    ],
  };
}

// The number that is darkest, or 0 where nothing is shaded.
function largestOf({ step, name }, data) {
  const { op, axes } = step;
  const alongKeys = axes.length === 1 && axes[0] === "S" && "L" in layer().sizes && op !== "given";
  if (op === "visible" || !axes.length || axes.at(-1) === "L" || alongKeys) return 0;
  if (name === "weights") return 1;
  const size = (visible) => (most, value, k) =>
    visible?.[k] === 0 || !Number.isFinite(value) ? most : Math.max(most, Math.abs(value));
  return data.reduce((most, { values, visible }) => values.reduce(size(visible), most), 0);
}

// The cells of some rows as texts and classes: the same that the printed tables have.
export function cellsOf(view, rows) {
  const { step, name } = view;
  const data = rows.map((row) => runs.now.seenRow(name, view.own ?? 0, row));
  const largest = largestOf(view, data);
  const compared = runs.touched && comparable(name);
  const cells = data.map(({ values, visible }, r) => {
    const before = compared ? runs.plain.row(name, view.own ?? 0, rows[r]) : values;
    return Array.from(values, (value, column) => {
      const was = before[column];
      const changed = !Object.is(was, value);
      const hidden = visible?.[column] === 0;
      const own = hidden ? hiddenCell(rows[r], column) : numberCell(step, value, largest);
      const hints = [own.hint, changed && `was ${formatNumber(was, DIGITS)}`];
      return { ...own, changed, hint: hints.filter(Boolean).join("; ") };
    });
  });
  align(cells);
  return cells;
}

function hiddenCell(row, column) {
  const names = hiddenBy(runs.now.verdict(state.head, row, column));
  const more = names.length > 1 ? ` +${names.length - 1}` : "";
  const list = names.map((one) => cut(one, 80)).join(", ");
  return { text: cut(names[0], 12) + more, style: "hidden", hint: `hidden by: ${list}` };
}

function numberCell(step, value, largest) {
  if (step.op === "visible" && !value) return { text: "0", style: "off" };
  if (!Number.isFinite(value)) return { text: formatNumber(value), style: "odd" };
  const level = largest ? Math.min(LEVELS, Math.ceil((LEVELS * Math.abs(value)) / largest)) : 0;
  const style = level ? `${value < 0 ? "n" : "p"}${level}` : "";
  return { text: rounded(value, state.digits), style };
}

// What has to follow each number, unseen, so that the decimal points of a column align.
export function align(cells) {
  if (cells.length < 2) return;
  const isWord = ({ text, style }) => style === "hidden" || style === "odd" || text.includes("e");
  const fraction = (cell) => (isWord(cell) ? "" : (cell.text.match(/\..*/)?.[0] ?? ""));
  for (let column = 0; column < (cells[0]?.length ?? 0); column++) {
    const width = Math.max(...cells.map((row) => fraction(row[column]).length));
    const full = width ? `.${"0".repeat(width - 1)}` : "";
    for (const { [column]: cell } of cells)
      cell.pad = isWord(cell) ? "" : full.slice(fraction(cell).length);
  }
}

// Put a cell into a table.
export function dress(td, cell) {
  const text = td.firstChild ?? td.appendChild(document.createTextNode(""));
  if (text.data !== cell.text) text.data = cell.text;
  if (td.className !== cell.style) td.className = cell.style;
  if (cell.changed) td.classList.add("changed");
  for (const [name, value] of Object.entries({ "data-pad": cell.pad, title: cell.hint })) {
    if (value) td.setAttribute(name, value);
    else td.removeAttribute(name);
  }
  return td;
}

const numbersOf = (tr) =>
  [...tr.cells].filter((td) => td.tagName === "TD" && !td.classList.contains("remark"));

// What a table has to have in common with another to take over its numbers.
export function formOf({ rows, columns, rowLabels, columnLabels, step }, shownRows = rows) {
  const sizes = [shownRows, columns, columnLabels.length, rowLabels.length];
  return JSON.stringify([...sizes, state.layer, step.axes]);
}

// Show these rows; a table of the same form that is there already is kept.
export function fillTable(view, rows = [...Array(view.rows).keys()]) {
  const cells = cellsOf(view, rows);
  const form = formOf(view, rows.length);
  const old = view.table;
  if (old?.dataset.form !== form) {
    view.table = emptyTable(view, rows);
    view.table.dataset.form = form;
    old?.replaceWith(view.table);
    makeGrid(view);
  } else if (view.rowLabels.length) {
    for (const [k, tr] of [...old.tBodies[0].rows].entries()) {
      const name = find("th bdi", tr);
      if (name) name.textContent = cut(view.rowLabels[rows[k]], 60);
    }
  }
  view.cells = new Map();
  for (const [k, tr] of [...view.table.tBodies[0].rows].entries()) {
    for (const [column, td] of numbersOf(tr).entries()) {
      dress(td, cells[k][column]);
      td.place = { name: view.name, row: rows[k], column };
      view.cells.set(`${rows[k]},${column}`, td);
    }
  }
}

function emptyTable(view, rows) {
  const { rowLabels, columnLabels, notes } = view;
  const label = (text) => bdi(cut(text, 60));
  const heads = columnLabels.length
    ? columnLabels.map((text) => colHead(label(text)))
    : colHead(typeset(view.step.symbol));
  const body = rows.map((row) => [
    rowLabels.length > 0 && rowHead(label(rowLabels[row])),
    Array.from({ length: view.columns }, () => h("td")),
    notes.length > 0 && h("td.remark", label(notes[row])),
  ]);
  return table(view.name, [rowLabels.length > 0 && h("td"), heads], body);
}

// Arrow keys for a table: one of its cells is reached by Tab.
/** @param {View} view */
export function makeGrid({ name, step, table }) {
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", `${name}, ${step.formula}`);
  table.removeAttribute("tabindex");
  for (const [k, td] of [...table.tBodies[0].rows].flatMap(numbersOf).entries()) {
    td.setAttribute("role", "gridcell");
    td.tabIndex = k ? -1 : 0;
  }
}

// The view and place of a cell, if its table is on the page and shows its head.
export function placeOf({ step, index }) {
  const view = shown.get(step);
  if (!view) return null;
  if (view.own !== null && index[0] !== view.own) return null;
  const { row, column } = runs.now.locate(step, index);
  return { view, row, column, td: view.cells.get(`${row},${column}`) ?? null };
}

export function focusCell(view, row, column) {
  const td = view.cells.get(`${row},${column}`);
  if (!td) return;
  const before = find("[tabindex='0']", view.table);
  if (before) before.tabIndex = -1;
  td.tabIndex = 0;
  bringIntoSight(td);
  td.focus({ preventScroll: true });
}

// Scroll to a cell, unless it is in sight, and open what it is folded into.
export function bringIntoSight(td, block = "nearest") {
  const details = td?.closest("details");
  if (details) details.open = true;
  td?.scrollIntoView({ block, inline: "nearest" });
}
