// Below the steps: the statistics of the head that is shown, and whether what was expected comes out.

import { formatNumber, numpyLiteral, rounded } from "./numbers.js";
import { cellName, cut, derive } from "./derivation.js";
import { meets, missed, moments, spread, wantedCells } from "./figures.js";
import {
  bdi,
  carried,
  content,
  doing,
  find,
  h,
  labels,
  layer,
  main,
  ownHead,
  runs,
  state,
} from "./shown.js";
import { align, dress, viewOf } from "./tables.js";

const OF_STEPS = ["mean", "variance", "min", "max", "cells"];
const OF_ROWS = ["entropy", "effective keys", "largest weight"];
const PRINTED = 32; // rows of a table; more of them can be scrolled
const MOST_MISSED = 5; // of the numbers of one expectation that came out differently
const AT_ONCE = 1 << 13; // scores; the statistics of more are made when somebody looks

export const stepFigures = () =>
  [...runs.now.steps.values()]
    .filter((step) => step.axes.length && step.op !== "visible")
    .map((step) => [step.name, moments(runs.now.rows(step.name, ownHead(step, state.head) ?? 0))]);

export const rowFigures = () =>
  runs.now
    .rows("weights", ownHead(runs.now.steps.get("weights"), state.head) ?? 0)
    .map(({ values }) => spread(values));

// --- statistics -----------------------------------------------------------------------------

function statistics() {
  const steps = stepFigures();
  const rows = rowFigures();
  const names = labels("S");
  const words = runs.touched ? "" : layer().scaleWords;
  return [
    about(
      "The numbers of each step",
      table(
        "statistics of each step",
        OF_STEPS,
        steps.map(([name]) => name),
        steps.map(([, figures]) => figures),
      ),
      words,
    ),
    about(
      "How each query spreads its weight",
      table(
        "statistics of each row of weights",
        OF_ROWS,
        viewOf("weights").rowLabels,
        rows.map((figures) => figures.slice(0, 3)),
        rows.map((figures) => names[figures[3]] ?? ""),
      ),
      content.spread,
    ),
  ];
}

const about = (title, table, words) =>
  h(
    "section",
    { class: "about" },
    h("h3", {}, h("span", { class: "name" }, title)),
    table,
    words ? h("p", { class: "words" }, words) : [],
  );

function table(caption, headers, names, rows, notes = null) {
  const cells = rows.map((row) =>
    row.map((value) => ({
      text: rounded(value, state.digits),
      style: Number.isFinite(value) ? "" : "odd",
    })),
  );
  align(cells);
  const body = cells.map((row, k) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, bdi(cut(names[k] ?? "", 60))),
      row.map((cell) => {
        const td = h("td");
        dress(td, cell);
        return td;
      }),
      notes ? [h("td", { class: "remark" }, bdi(cut(notes[k], 60)))] : [],
    ),
  );
  const heads = headers.map((header) => h("th", { scope: "col" }, bdi(header)));
  if (notes) heads.push(h("th", { scope: "col", class: "remark" }, bdi("its key")));
  const made = h(
    "table",
    {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, h("td"), heads)),
    h("tbody", {}, body),
  );
  const long = rows.length > PRINTED ? " long" : "";
  return h(
    "div",
    { class: `sheet${long}`, tabindex: 0, role: "region", "aria-label": caption },
    made,
  );
}

// --- what should come out -------------------------------------------------------------------

let decoded = { of: null, list: [] };

function expectations() {
  if (decoded.of !== layer()) {
    const axes = (name) => runs.plain.steps.get(name)?.axes;
    const list = layer().expect.map((one) => ({
      ...one,
      axes: axes(one.step),
      values: one.values && carried.decode(one.values),
      variance: one.variance && carried.decode(one.variance)[0],
    }));
    decoded = { of: layer(), list };
  }
  return decoded.list;
}

// What is expected of one cell, and whether it comes out; undefined if nothing is.
export function expectedOf({ step, index }) {
  for (const one of expectations()) {
    if (one.step !== step || !one.values || missed(runs.now, one) === null) continue;
    const cell = wantedCells(runs.now, one).find((cell) => cell.index.join() === index.join());
    if (cell)
      return {
        wanted: exactly(cell.wanted),
        right: meets(one, runs.now.value(step, index), cell.wanted),
      };
  }
}

function exactly(value) {
  if (!Number.isFinite(value)) return formatNumber(value);
  return numpyLiteral(value).replace(/^-/, "−").replace(/\.0$/, "");
}

// The sentences about one expectation: [whether it is right, words, the cell that they are about].
function judged(one) {
  if (one.unfit) return [[false, one.unfit]];
  const found = missed(runs.now, one);
  if (found === null) return [[null, `${one.step} is not part of what is shown`]];
  if (!found.length) return [[true, one.right]];
  const lines = found.slice(0, MOST_MISSED).map(({ index, expected, got }) => {
    const name = index
      ? nameOf(one.step, index)
      : `variance of ${one.step}`;
    const words = `${name}: ${exactly(expected)} is expected, ${exactly(got)} comes out`;
    return [false, words, index && { step: one.step, index }];
  });
  const more = found.length - MOST_MISSED;
  return more > 0 ? [...lines, [false, `${one.step}: ${more} more differ`]] : lines;
}

function nameOf(name, index) {
  const { step, labels: names } = derive(runs.now, labels, name, index);
  return cut(cellName(step.symbol, names), 80);
}

function said(all) {
  const count = (verdict) => all.filter((lines) => lines[0][0] === verdict).length;
  const wrong = count(false);
  if (wrong) return `${wrong} of ${all.length} ${wrong === 1 ? "differs" : "differ"}`;
  if (count(null)) return `${count(true)} of ${all.length} come out`;
  return all.length === 1 ? "it comes out" : `all ${all.length} come out`;
}

function checks() {
  const all = expectations().map(judged);
  const items = all.flat().map(([right, words, cell]) => {
    const name = right === null ? "absent" : right ? "right" : "wrong";
    const open = () => doing.open(cell, { fresh: true, focus: "heading" });
    return h(
      "li",
      { class: name },
      h("b", {}, name),
      " ",
      h(
        "span",
        {},
        bdi(words),
        cell ? [" ", h("button", { type: "button", onclick: open }, "open it")] : [],
      ),
    );
  });
  return { words: `What should come out: ${said(all)}`, list: h("ul", {}, items) };
}

// --- on the page ----------------------------------------------------------------------------

function details(name, words) {
  const made = h("details", { class: `part ${name}` }, h("summary", {}, words));
  main.append(made);
  return made;
}

// Answers with which of the two were open.
export function dropSummary() {
  return ["figures", "checks"].map((name) => {
    const old = find(`details.${name}`, main);
    const open = old?.open ?? false;
    old?.remove();
    return open;
  });
}

// Everything anew, for other steps or another head.
export function buildSummary() {
  const [open, opened] = dropSummary();
  if (layer().countable) details("figures", "Statistics").open = open;
  if (layer().expect.length) details("checks", "").open = opened;
  fillSummary();
}

// New numbers in what stands there. `kept`: those of the file are still right.
export function fillSummary(kept = false) {
  const box = find("details.figures", main);
  if (box) {
    const fill = () => {
      box.stale = false;
      find(".steps", box)?.remove();
      box.append(h("div", { class: "steps" }, statistics()));
    };
    const { L = 1, S } = layer().sizes;
    box.stale = !kept || L > PRINTED;
    box.ontoggle = () => box.open && box.stale && fill();
    if (!kept && (box.open || L * S <= AT_ONCE)) fill();
  }
  const list = find("details.checks", main);
  if (list && layer().expect.length) {
    const { words, list: items } = checks();
    find("summary", list).textContent = words;
    find("ul", list)?.remove();
    list.append(items);
  }
}
