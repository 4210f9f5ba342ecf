// The numbers of a step as a table: texts, shades and alignment as the printed tables have them, and
// cells that keys can reach.

import { formatNumber, rounded } from "./numbers.js";
import { cut } from "./derivation.js";
import { hiddenBy } from "./rules.js";
import { isHead } from "./attention.js";
import {
  bdi,
  comparable,
  content,
  h,
  labels,
  layer,
  find,
  ownHead,
  runs,
  shown,
  state,
  typeset,
} from "./shown.js";

const PRINTED = 32; // larger matrices are drawn
const LEVELS = 9; // of shade
const DIGITS = 8; // of what a number was

// One view for each step: where its numbers are, and how the table stands on the page.
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

export function visibleRow(view, row) {
  return runs.now.hides(view.step)
    ? runs.now.row(
        "visible",
        runs.now.steps.get("visible").axes.includes("H") ? state.head : 0,
        row,
      )
    : null;
}

// The cells of some rows as texts and classes: the same that the printed tables have.
function cellsOf(view, rows) {
  const { step, name } = view;
  const data = rows.map((row) => ({
    values: runs.now.row(name, view.own ?? 0, row),
    visible: visibleRow(view, row),
  }));
  const shaded =
    step.op !== "visible" &&
    step.axes.length &&
    step.axes.at(-1) !== "L" &&
    !(
      step.axes.length === 1 &&
      step.axes[0] === "S" &&
      "L" in layer().sizes &&
      step.op !== "given"
    );
  let largest = shaded ? (name === "weights" ? 1 : 0) : 0;
  if (shaded && name !== "weights") {
    for (const { values, visible } of data) {
      for (let k = 0; k < values.length; k++) {
        if ((visible === null || visible[k]) && Number.isFinite(values[k]))
          largest = Math.max(largest, Math.abs(values[k]));
      }
    }
  }
  const before =
    runs.touched && comparable(name)
      ? rows.map((row) => runs.plain.row(name, view.own ?? 0, row))
      : null;
  const cells = data.map(({ values, visible }, r) =>
    Array.from(values, (value, column) => {
      const was = before ? before[r][column] : value;
      const changed = !Object.is(was, value);
      if (visible !== null && visible[column] === 0) {
        const names = hiddenBy(runs.now.verdict(state.head, rows[r], column));
        const list = names.map((one) => cut(one, 80)).join(", ");
        const text = cut(names[0], 12) + (names.length > 1 ? ` +${names.length - 1}` : "");
        return {
          text,
          style: "hidden",
          hint: `hidden by: ${list}${changed ? `; was ${formatNumber(was, DIGITS)}` : ""}`,
          changed,
        };
      }
      if (step.op === "visible" && !value) return { text: "0", style: "off", changed, was };
      if (!Number.isFinite(value)) return { text: formatNumber(value), style: "odd", changed, was };
      const level = largest ? Math.min(LEVELS, Math.ceil((LEVELS * Math.abs(value)) / largest)) : 0;
      return {
        text: rounded(value, state.digits),
        style: level ? `${value < 0 ? "n" : "p"}${level}` : "",
        changed,
        was,
      };
    }),
  );
  align(cells);
  return cells;
}

// What has to follow each number, unseen, so that the points of a column stand below each other.
export function align(cells) {
  if (cells.length < 2) return;
  const fraction = ({ text, style }) => {
    const plain = style !== "hidden" && style !== "odd" && !text.includes("e");
    return plain && text.includes(".") ? text.slice(text.indexOf(".")) : "";
  };
  for (let column = 0; column < (cells[0]?.length ?? 0); column++) {
    const width = Math.max(...cells.map((row) => fraction(row[column]).length));
    const full = width ? `.${"0".repeat(width - 1)}` : "";
    for (const row of cells) {
      const cell = row[column];
      const word = cell.style === "hidden" || cell.style === "odd" || cell.text.includes("e");
      cell.pad = word ? "" : full.slice(fraction(cell).length);
    }
  }
}

export function dress(td, cell) {
  const text = td.firstChild ?? td.appendChild(document.createTextNode(""));
  if (text.data !== cell.text) text.data = cell.text;
  if (td.className !== cell.style) td.className = cell.style;
  if (cell.changed) td.classList.add("changed");
  for (const [name, value] of [
    ["data-pad", cell.pad],
    ["title", cell.hint ?? (cell.changed ? `was ${formatNumber(cell.was, DIGITS)}` : "")],
  ]) {
    if (value) td.setAttribute(name, value);
    else td.removeAttribute(name);
  }
}

// A table of these rows; what stands in it already is kept where it has the same form.
export function fillTable(view, rows) {
  const cells = cellsOf(view, rows);
  const heads = view.columnLabels.map((label) => h("th", { scope: "col" }, bdi(cut(label, 60))));
  const corner = view.rowLabels.length ? [h("td")] : [];
  const old = view.table;
  const form = JSON.stringify([
    rows.length,
    view.columns,
    view.columnLabels.length,
    view.rowLabels.length,
    state.layer,
    view.step.axes,
  ]);
  if (!old || old.dataset.form !== form) {
    const table = h(
      "table",
      {},
      h("caption", {}, view.name),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          corner,
          heads.length ? heads : h("th", { scope: "col" }, typeset(view.step.symbol)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            view.rowLabels.length
              ? [h("th", { scope: "row" }, bdi(cut(view.rowLabels[row], 60)))]
              : [],
            Array.from({ length: view.columns }, () => h("td")),
            view.notes.length ? [h("td", { class: "remark" }, bdi(cut(view.notes[row], 60)))] : [],
          ),
        ),
      ),
    );
    table.dataset.form = form;
    if (old) old.replaceWith(table);
    view.table = table;
    makeGrid(view);
  } else if (view.rowLabels.length) {
    for (const [k, tr] of [...old.tBodies[0].rows].entries()) {
      const name = find("th bdi", tr);
      if (name) name.textContent = cut(view.rowLabels[rows[k]], 60);
    }
  }
  view.cells = new Map();
  for (const [k, tr] of [...view.table.tBodies[0].rows].entries()) {
    const tds = [...tr.cells].filter(
      (td) => td.tagName === "TD" && !td.classList.contains("remark"),
    );
    for (const [column, td] of tds.entries()) {
      dress(td, cells[k][column]);
      td.place = { name: view.name, row: rows[k], column };
      view.cells.set(`${rows[k]},${column}`, td);
    }
  }
}

// Arrow keys for a table: one of its cells is reached by Tab.
export function makeGrid(view) {
  const { table } = view;
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", `${view.name}, ${view.step.formula}`);
  table.removeAttribute("tabindex");
  let first = true;
  for (const tr of table.tBodies[0].rows) {
    for (const td of tr.cells) {
      if (td.tagName !== "TD" || td.classList.contains("remark")) continue;
      td.setAttribute("role", "gridcell");
      td.tabIndex = first ? 0 : -1;
      first = false;
    }
  }
}
// The view and place of a cell, if its table is on the page and shows its head.
export function placeOf({ step, index }) {
  const view = shown.get(step);
  if (!view) return null;
  const heads = view.step.axes.filter(isHead).length;
  if (heads && index[0] !== view.own) return null;
  const own = index.slice(heads);
  const [row, column] = own.length === 2 ? own : view.block.byRow ? [own[0], 0] : [0, own[0] ?? 0];
  return { view, row, column, td: view.cells.get(`${row},${column}`) ?? null };
}

export function focusCell(view, row, column) {
  const td = view.cells.get(`${row},${column}`);
  if (!td) return;
  const before = find("[tabindex='0']", view.table);
  if (before) before.tabIndex = -1;
  td.tabIndex = 0;
  const details = td.closest("details");
  if (details) details.open = true;
  td.focus({ preventScroll: false });
  td.scrollIntoView({ block: "nearest", inline: "nearest" });
}
