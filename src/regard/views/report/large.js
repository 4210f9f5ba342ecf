// What is too large for digits: pictures with one row in digits below, all heads at a glance, and
// heads of which the page has only the pooled weights.

import { formatNumber, rounded } from "./numbers.js";
import { cut } from "./derivation.js";
import {
  bdi,
  button,
  colHead,
  fill,
  find,
  gallery,
  h,
  main,
  rowHead,
  scrolled,
  table,
} from "./elements.js";
import { carried, content, doing, labels, layer, runs, shown, state } from "./shown.js";
import { fillTable, focusCell } from "./tables.js";
import { mark } from "./why.js";
import { dotsOf, drawMatrix } from "./pictures.js";

const STRONGEST = 8;

// The dot of a picture of so many rows and columns that was clicked.
function dotAt({ clientX, clientY, currentTarget }, { rows, columns }) {
  const box = currentTarget.getBoundingClientRect();
  return [
    Math.min(rows - 1, Math.floor(((clientY - box.top) / box.height) * rows)),
    Math.min(columns - 1, Math.floor(((clientX - box.left) / box.width) * columns)),
  ];
}

const openCell = (view, row, column) => {
  doing.open({ step: view.name, index: view.index(row, column) }, { fresh: true });
  focusCell(view, row, column);
};

const figure = (canvas, ...words) => h("figure.picture", canvas, h("figcaption", words));

export function addPicture(view) {
  const letter = view.block.rowLetter ?? "";
  view.letter = letter;
  const dots = dotsOf(view.rows, view.columns);
  const click = (event) => {
    const [row, column] = dotAt(event, dots);
    setRow(letter, row * dots.tall);
    openCell(view, row * dots.tall, column * dots.broad);
  };
  view.canvas = h("canvas", {
    role: "img",
    "aria-label": `${view.name}: ${view.rows} by ${view.columns} numbers, drawn. One row of them is the table below.`,
    onclick: click,
  });
  const side = Math.max(1, Math.min(8, Math.floor(900 / dots.columns)));
  const height = Math.max(dots.rows * side, Math.min(48, dots.rows * 16));
  view.canvas.style.width = `${dots.columns * side}px`;
  view.canvas.style.height = `${Math.min(720, height)}px`;
  view.number = h("input", {
    type: "number",
    min: 0,
    max: view.rows - 1,
    value: rowOf(view),
    "aria-label": `row of ${view.name}`,
    onchange: () => setRow(letter, Number(view.number.value)),
  });
  view.rowName = h("span");
  view.best = h("p.words");
  view.sheet = h("div.sheet");
  const log = view.name === "weights" || view.name === "exponentials";
  const colours = log
    ? "The stronger the colour, the larger the logarithm of the number; a thousandth of the largest, or less, has none."
    : "The stronger the colour, the larger the number; blue is negative.";
  view.section.append(
    figure(view.canvas, colours),
    h("div.chooser", h("label", "row ", view.number), view.rowName),
    view.sheet,
    view.best,
  );
  view.draw = () => {
    view.picture?.stop();
    view.picture = drawMatrix(view.canvas, {
      rows: view.rows,
      columns: view.columns,
      log,
      marked: view.rows > 1 ? rowOf(view) : null,
      row: (row) => runs.now.seenRow(view.name, view.own ?? 0, row),
    });
  };
  watcher.observe(view.canvas);
  view.canvas.view = view;
  fillRow(view);
}

// Pictures are drawn when they come into view.
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      target.near = isIntersecting;
      if (isIntersecting && target.view && !target.drawn) {
        target.drawn = true;
        target.view.draw();
      }
    }
  },
  { rootMargin: "300px" },
);

export function redraw(view) {
  view.canvas.drawn = view.canvas.near ?? false;
  if (view.canvas.near) view.draw();
}

export const rowOf = (view) => Math.min(state.rows[view.letter] ?? 0, view.rows - 1);

export function fillRow(view) {
  const row = rowOf(view);
  const fresh = !view.table;
  fillTable(view, [row]);
  if (fresh) view.sheet.append(view.table);
  view.number.value = row;
  fill(view.rowName, view.rowLabels.length > 0 && bdi(cut(view.rowLabels[row], 60)));
  if (view.name !== "weights") return;
  const values = runs.now.row("weights", view.own ?? 0, row);
  const order = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, STRONGEST);
  const keys = order.map((column) => [
    " ",
    button(
      [bdi(cut(view.columnLabels[column], 30)), ` ${rounded(values[column], state.digits)}`],
      () => openCell(view, row, column),
    ),
  ]);
  fill(view.best, "Strongest:", keys);
}

export function setRow(letter, row) {
  if (!Number.isInteger(row) || row < 0 || state.rows[letter] === row) return;
  state.rows[letter] = row;
  for (const view of shown.values()) {
    if (!view.small && view.letter === letter) {
      fillRow(view);
      view.picture?.mark(row);
    }
  }
  mark();
}

// A head of which the page has no numbers but the pooled weights.
export function pooledHead() {
  const heading = "The strongest keys of each row";
  const found = layer().overview[`${state.batch}/${state.head}`];
  const step = (...children) => h("section.step", children);
  return h(
    "section.part",
    h("h2", "Weights, pooled"),
    h(
      "div.steps",
      step(pooledPicture(found)),
      step(
        h("h3", h("span.name", heading)),
        scrolled(heading, "div.sheet.long", strongestKeys(found, heading)),
      ),
    ),
  );
}

function pooledPicture(found) {
  const { sizes } = layer();
  const [mean, largest] = [found.mean, found.largest].map((entry) => carried.decode(entry));
  const say = h("p.words", { role: "status" }, "Choose a tile.");
  const kind = h(
    "select",
    { onchange: () => draw() },
    h("option", { value: "largest" }, "largest weight"),
    h("option", { value: "mean" }, "mean weight"),
  );
  const range = (tile, tiles, size) =>
    `${Math.floor((size * tile) / tiles)} to ${Math.floor((size * (tile + 1)) / tiles) - 1}`;
  const click = (event) => {
    const [row, column] = dotAt(event, found);
    const at = row * found.columns + column;
    const queries = range(row, found.rows, sizes.L ?? 1);
    const keys = range(column, found.columns, sizes.S);
    say.textContent = `Queries ${queries}, keys ${keys}: largest ${formatNumber(largest[at], 4)}, mean ${formatNumber(mean[at], 6)}.`;
  };
  const label = "The weights of this head, pooled";
  const canvas = h("canvas", { role: "img", "aria-label": label, onclick: click });
  canvas.style.width = canvas.style.height = "448px";
  const draw = () => drawMatrix(canvas, tilesOf(found, kind.value === "mean" ? mean : largest));
  requestAnimationFrame(draw);
  const words = " in each tile: the stronger the colour, the larger its logarithm.";
  return [figure(canvas, h("label", "The ", kind, words)), say];
}

function strongestKeys(found, caption) {
  const { sizes, alone } = layer();
  const [keys, shares] = [found.keys, found.shares].map((entry) => carried.decode(entry));
  const names = labels("S");
  const places = [...Array(found.each).keys()];
  const cell = (at) =>
    h("td", shares[at] > 0 && [bdi(cut(names[keys[at]], 40)), ` ${rounded(shares[at], 4)}`]);
  const rows = ("L" in sizes ? labels("L") : [alone]).map((name, row) => [
    rowHead(bdi(cut(name, 40))),
    places.map((k) => cell(row * found.each + k)),
  ]);
  return table(caption, [colHead("query"), places.map((k) => colHead(`key ${k + 1}`))], rows);
}

function tilesOf({ rows, columns }, numbers) {
  const row = (number) => ({
    values: numbers.subarray(number * columns, (number + 1) * columns),
    visible: null,
  });
  return { rows, columns, row, log: true };
}

// All heads at a glance; each is a button.
export function buildGallery() {
  const pooled = content.layers.map((own) => Object.keys(own.overview).length);
  const several = content.layers.length > 1 || pooled.some((count) => count > 1);
  if (!several || !pooled.some(Boolean)) return;
  const rows = content.layers.flatMap((own, number) => {
    const batches = own.positions.length || 1;
    return Array.from({ length: batches }, (_, batch) => {
      const name = [own.name, batches > 1 ? `batch ${batch}` : ""].filter(Boolean).join(" · ");
      const heads = Array.from({ length: own.sizes.H ?? 1 }, (_, head) =>
        h("td", headButton(name, { layer: number, batch, head })),
      );
      return [rowHead(bdi(cut(name || "heads", 40))), heads];
    });
  });
  const most = Math.max(...content.layers.map((own) => own.sizes.H ?? 1));
  const numbers = Array.from({ length: most }, (_, k) => colHead(String(k)));
  gallery.append(table("The weights of every head", [h("td"), numbers], rows));
  gallery.hidden = false;
}

function headButton(name, place) {
  const found = content.layers[place.layer].overview[`${place.batch}/${place.head}`];
  const largest = carried.decode(found.largest);
  const exact = carried.isExact(place.layer, place.batch, place.head);
  const canvas = h("canvas", { "aria-hidden": "true" });
  canvas.view = { draw: () => drawMatrix(canvas, tilesOf(found, largest)) };
  watcher.observe(canvas);
  const choose = () => {
    doing.choose(place);
    find(".part", main)?.scrollIntoView({ block: "start" });
  };
  const label = [name, `head ${place.head}`, exact ? "" : "pooled"].filter(Boolean).join(", ");
  const made = button(canvas, choose, { class: exact ? "" : "pooled", "aria-label": label });
  made.place = place;
  return made;
}

export function pressGallery() {
  for (const one of gallery.querySelectorAll("button")) {
    const chosen = Object.entries(one.place).every(([name, number]) => state[name] === number);
    one.setAttribute("aria-pressed", String(chosen));
  }
}
