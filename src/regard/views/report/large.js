// What is too large for digits: pictures with one row in digits below, all heads at a glance, and
// heads of which the page has only the pooled weights.

import { formatNumber, rounded } from "./numbers.js";
import { cut } from "./derivation.js";
import {
  bdi,
  carried,
  content,
  doing,
  find,
  gallery,
  h,
  labels,
  layer,
  main,
  runs,
  shown,
  state,
} from "./shown.js";
import { fillTable, focusCell, visibleRow } from "./tables.js";
import { mark } from "./why.js";
import { dotsOf, drawMatrix } from "./pictures.js";

const STRONGEST = 8;

export function addPicture(view) {
  const letter = view.block.rowLetter ?? "";
  view.letter = letter;
  view.canvas = h("canvas", {
    role: "img",
    "aria-label": `${view.name}: ${view.rows} by ${view.columns} numbers, drawn. One row of them is the table below.`,
  });
  const dots = dotsOf(view.rows, view.columns);
  const side = Math.max(1, Math.min(8, Math.floor(900 / dots.columns)));
  view.canvas.style.width = `${dots.columns * side}px`;
  view.canvas.style.height = `${Math.min(720, Math.max(dots.rows * side, Math.min(48, dots.rows * 16)))}px`;
  view.canvas.addEventListener("click", (event) => {
    const box = view.canvas.getBoundingClientRect();
    const row = Math.min(
      view.rows - 1,
      Math.floor(((event.clientY - box.top) / box.height) * dots.rows) * dots.tall,
    );
    const column = Math.min(
      view.columns - 1,
      Math.floor(((event.clientX - box.left) / box.width) * dots.columns) * dots.broad,
    );
    setRow(letter, row);
    doing.open({ step: view.name, index: view.index(row, column) }, { fresh: true });
    focusCell(view, row, column);
  });
  view.number = h("input", {
    type: "number",
    min: 0,
    max: view.rows - 1,
    value: rowOf(view),
    "aria-label": `row of ${view.name}`,
  });
  view.number.addEventListener("change", () => setRow(letter, Number(view.number.value)));
  view.rowName = h("span");
  view.best = h("p", { class: "words" });
  const log = view.name === "weights" || view.name === "exponentials";
  view.section.append(
    h(
      "figure",
      { class: "picture" },
      view.canvas,
      h(
        "figcaption",
        {},
        log
          ? "The stronger the colour, the larger the logarithm of the number; a thousandth of the largest, or less, has none."
          : "The stronger the colour, the larger the number; blue is negative.",
      ),
    ),
    h("div", { class: "chooser" }, h("label", {}, "row ", view.number), view.rowName),
    (view.sheet = h("div", { class: "sheet" })),
    view.best,
  );
  view.draw = () => {
    view.picture?.stop();
    view.picture = drawMatrix(view.canvas, {
      rows: view.rows,
      columns: view.columns,
      log,
      marked: view.rows > 1 ? rowOf(view) : null,
      row: (row) => ({
        values: runs.now.row(view.name, view.own ?? 0, row),
        visible: visibleRow(view, row),
      }),
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
  view.rowName.replaceChildren(view.rowLabels.length ? bdi(cut(view.rowLabels[row], 60)) : "");
  view.best.replaceChildren();
  if (view.name === "weights") {
    const values = runs.now.row("weights", view.own ?? 0, row);
    const order = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, STRONGEST);
    view.best.append(
      "Strongest: ",
      ...order.flatMap((column, k) => [
        k ? " " : "",
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              doing.open({ step: "weights", index: view.index(row, column) }, { fresh: true });
              focusCell(view, row, column);
            },
          },
          bdi(cut(view.columnLabels[column], 30)),
          ` ${rounded(values[column], state.digits)}`,
        ),
      ]),
    );
  }
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
  const found = layer().overview[`${state.batch}/${state.head}`];
  const own = layer();
  const [rows, columns] = [own.sizes.L ?? 1, own.sizes.S];
  const [mean, largest, keys, shares] = ["mean", "largest", "keys", "shares"].map((name) =>
    carried.decode(found[name]),
  );
  const canvas = h("canvas", { role: "img", "aria-label": "The weights of this head, pooled" });
  canvas.style.width = canvas.style.height = "448px";
  const say = h("p", { class: "words", role: "status" }, "Choose a tile.");
  const kind = h(
    "select",
    {},
    h("option", { value: "largest" }, "largest weight"),
    h("option", { value: "mean" }, "mean weight"),
  );
  const drawn = () => drawMatrix(canvas, tilesOf(found, kind.value === "mean" ? mean : largest));
  kind.addEventListener("change", drawn);
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.min(
      found.rows - 1,
      Math.floor(((event.clientY - box.top) / box.height) * found.rows),
    );
    const column = Math.min(
      found.columns - 1,
      Math.floor(((event.clientX - box.left) / box.width) * found.columns),
    );
    const range = (tile, tiles, size) => [
      Math.floor((size * tile) / tiles),
      Math.floor((size * (tile + 1)) / tiles) - 1,
    ];
    const [r, c] = [range(row, found.rows, rows), range(column, found.columns, columns)];
    const at = row * found.columns + column;
    say.textContent = `Queries ${r[0]} to ${r[1]}, keys ${c[0]} to ${c[1]}: largest ${formatNumber(largest[at], 4)}, mean ${formatNumber(mean[at], 6)}.`;
  });
  requestAnimationFrame(drawn);
  const each = found.each;
  const names = [labels("S"), "L" in own.sizes ? labels("L") : [own.alone]];
  const table = h(
    "table",
    {},
    h("caption", {}, "The strongest keys of each row"),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "query"),
        Array.from({ length: each }, (_, k) => h("th", { scope: "col" }, `key ${k + 1}`)),
      ),
    ),
    h(
      "tbody",
      {},
      Array.from({ length: rows }, (_, row) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, bdi(cut(names[1][row], 40))),
          Array.from({ length: each }, (_, k) => row * each + k).map((at) =>
            h(
              "td",
              {},
              shares[at] ? [bdi(cut(names[0][keys[at]], 40)), ` ${rounded(shares[at], 4)}`] : [],
            ),
          ),
        ),
      ),
    ),
  );
  return h(
    "section",
    { class: "part" },
    h("h2", {}, "Weights, pooled"),
    h(
      "div",
      { class: "steps" },
      h(
        "section",
        { class: "step" },
        h(
          "figure",
          { class: "picture" },
          canvas,
          h(
            "figcaption",
            {},
            h(
              "label",
              {},
              "The ",
              kind,
              " in each tile: the stronger the colour, the larger its logarithm.",
            ),
          ),
        ),
        say,
      ),
      h(
        "section",
        { class: "step" },
        h("h3", {}, h("span", { class: "name" }, "The strongest keys of each row")),
        h(
          "div",
          {
            class: "sheet long",
            tabindex: 0,
            role: "region",
            "aria-label": "The strongest keys of each row",
          },
          table,
        ),
      ),
    ),
  );
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
  const several =
    content.layers.some((own) => Object.keys(own.overview).length > 1) || content.layers.length > 1;
  if (!several || !content.layers.some((own) => Object.keys(own.overview).length)) return;
  const rows = [];
  for (const [number, own] of content.layers.entries()) {
    const heads = own.sizes.H ?? 1;
    const batches = own.offset.length || 1;
    for (let batch = 0; batch < batches; batch++) {
      const name = [own.name, batches > 1 ? `batch ${batch}` : ""].filter(Boolean).join(" · ");
      rows.push(
        h(
          "tr",
          {},
          h("th", { scope: "row" }, bdi(cut(name || "heads", 40))),
          Array.from({ length: heads }, (_, head) => {
            const found = own.overview[`${batch}/${head}`];
            const canvas = h("canvas", { "aria-hidden": "true" });
            const exact = carried.isExact(number, batch, head);
            const largest = carried.decode(found.largest);
            canvas.view = { draw: () => drawMatrix(canvas, tilesOf(found, largest)) };
            watcher.observe(canvas);
            const button = h(
              "button",
              {
                type: "button",
                class: exact ? "" : "pooled",
                "aria-label": `${name ? `${name}, ` : ""}head ${head}${exact ? "" : ", pooled"}`,
                onclick: () => {
                  doing.choose({ layer: number, batch, head });
                  find(".part", main)?.scrollIntoView({ block: "start" });
                },
              },
              canvas,
            );
            button.place = { layer: number, batch, head };
            return h("td", {}, button);
          }),
        ),
      );
    }
  }
  const most = Math.max(...content.layers.map((own) => own.sizes.H ?? 1));
  gallery.append(
    h(
      "table",
      {},
      h("caption", {}, "The weights of every head"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td"),
          Array.from({ length: most }, (_, k) => h("th", { scope: "col" }, String(k))),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
  gallery.hidden = false;
}

export function pressGallery() {
  for (const button of gallery.querySelectorAll("button")) {
    const { layer: number, batch, head } = button.place;
    button.setAttribute(
      "aria-pressed",
      String(number === state.layer && batch === state.batch && head === state.head),
    );
  }
}
