// What is too large for a table of elements: drawn stations, all heads at a glance, and heads of which
// the page has only the pooled weights.

import { formatNumber } from "./numbers.js";
import { cut } from "./derivation.js";
import { bdi, button, colHead, gallery, h, rowHead, scrolled, stage, table } from "./elements.js";
import { carried, content, doing, drawing, labels, layer, runs, state } from "./shown.js";
import { figure, numbersOf } from "./stations.js";
import { drawMatrix } from "./pictures.js";

// The cell of a drawing of so many rows and columns that was pointed at.
function cellAt({ clientX, clientY }, element, { rows, columns }) {
  const box = element.getBoundingClientRect();
  const at = (place, from, size, count) =>
    Math.max(0, Math.min(count - 1, Math.floor(((place - from) / size) * count)));
  return [at(clientY, box.top, box.height, rows), at(clientX, box.left, box.width, columns)];
}

const figureOf = (canvas, ...words) => h("figure.picture", canvas, h("figcaption", words));

// Whether the colours of a drawing are logarithms: few of many weights are large.
const isLogarithmic = ({ step }) => step.name === "weights" || step.name === "exponentials";

// A station with a dot for each number; keys move over it as over a table.
function drawingOf(view) {
  const { name, rows, columns, step } = view;
  const words = `${step.name}: ${rows} by ${columns} numbers, drawn. Arrow keys move over them, Enter opens one.`;
  view.cursor = [0, 0];
  view.canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": words });
  view.canvas.place = { name };
  view.figures = h("canvas.figures", { "aria-hidden": "true" });
  fillDrawing(view);
  return h("div.drawing", view.canvas, view.figures);
}

function fillDrawing(view) {
  view.drawn?.stop();
  const { turned, rows, columns } = view;
  /** @type {any[]} */
  const all = turned ? numbersOf(view).rows : [];
  const row = (k) => {
    if (turned) return { values: Float64Array.from(all, ({ values }) => values[k]), visible: null };
    const { values, visible } = runs.now.seenRow(view.step.name, view.own ?? 0, k);
    return { values: values.subarray(view.offset, view.offset + view.count), visible };
  };
  view.drawn = drawMatrix(view.canvas, { rows, columns, row, log: isLogarithmic(view), flow: view.step.name === "weights" });
  view.figures.hidden = true;
  showFigures(view);
}

// The numbers of what is in sight of a drawing, where its cells have room for them.
function showFigures(view) {
  const { canvas, figures, type, u, tall, turned } = view;
  if (!type || !canvas.isConnected) {
    figures.hidden = true;
    return;
  }
  const [own, seen] = [canvas, stage].map((one) => one.getBoundingClientRect());
  const window = (from, to, start, end, size, count) => [
    Math.max(0, Math.floor((Math.max(from, start, 0) - start) / size)),
    Math.min(count, Math.ceil((Math.min(to, end) - start) / size)),
  ];
  const [left, right] = window(seen.left, seen.right, own.left, own.right, u, view.columns);
  const [top, bottom] = window(seen.top, Math.min(seen.bottom, innerHeight), own.top, own.bottom, tall, view.rows);
  figures.hidden = right <= left || bottom <= top;
  if (figures.hidden) return;
  const [width, height] = [(right - left) * u, (bottom - top) * tall];
  const sharp = devicePixelRatio || 1;
  [figures.width, figures.height] = [width * sharp, height * sharp];
  for (const [key, value] of Object.entries({ left: left * u, top: top * tall, width, height }))
    figures.style[key] = `${value}px`;
  const pen = figures.getContext("2d");
  const style = getComputedStyle(stage);
  pen.scale(sharp, sharp);
  pen.font = `${type.size}px ${style.fontFamily}`;
  pen.fillStyle = style.color;
  [pen.textAlign, pen.textBaseline] = ["center", "middle"];
  const wanted = turned ? [left, right] : [top, bottom];
  for (let k = wanted[0]; k < wanted[1]; k++) {
    const { values, visible } = runs.now.seenRow(view.step.name, view.own ?? 0, k);
    for (let m = turned ? top : left; m < (turned ? bottom : right); m++) {
      if (visible?.[m] === 0) continue;
      const [row, column] = turned ? [m, k] : [k, m];
      const text = figure(values[m + view.offset], type, true);
      pen.fillText(text, (column - left + 0.5) * u, (row - top + 0.5) * tall + 0.5);
    }
  }
}

// A head of which the page has no numbers but the pooled weights.
function pooledHead() {
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
    const [row, column] = cellAt(event, canvas, found);
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
  return [figureOf(canvas, h("label", "The ", kind, words)), say];
}

function strongestKeys(found, caption) {
  const { sizes, alone } = layer();
  const [keys, shares] = [found.keys, found.shares].map((entry) => carried.decode(entry));
  const names = labels("S");
  const places = [...Array(found.each).keys()];
  const cell = (at) =>
    h("td", shares[at] > 0 && [bdi(cut(names[keys[at]], 40)), ` ${formatNumber(shares[at], 4)}`]);
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
  return { rows, columns, row, log: true, flow: true };
}

// All heads at a glance; each is a button.
function buildGallery() {
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
  drawMatrix(canvas, tilesOf(found, largest));
  const choose = () => doing.choose(place);
  const label = [name, `head ${place.head}`, exact ? "" : "pooled"].filter(Boolean).join(", ");
  const made = button(canvas, choose, { class: exact ? "" : "pooled", "aria-label": label });
  made.place = place;
  return made;
}

function pressGallery() {
  for (const one of gallery.querySelectorAll("button")) {
    const chosen = Object.entries(one.place).every(([name, number]) => state[name] === number);
    one.setAttribute("aria-pressed", String(chosen));
  }
}

Object.assign(drawing, {
  ...{ buildGallery, cellAt, fill: fillDrawing, make: drawingOf, pooledHead },
  ...{ pressGallery, showFigures },
});
