// Below the steps: the statistics of the head that is shown, and whether what was expected comes out.

import { formatNumber, numpyLiteral } from "./numbers.js";
import { cellName, cut, derive } from "./derivation.js";
import { meets, missed, moments, spread, wantedCells } from "./figures.js";
import { bdi, button, colHead, find, h, main, rowHead, scrolled, table } from "./elements.js";
import { carried, content, doing, labels, layer, ownHead, runs, state } from "./shown.js";

const OF_STEPS = ["mean", "variance", "min", "max", "cells"];
const OF_ROWS = ["entropy", "effective keys", "largest weight"];
const PRINTED = 32; // rows of a table; more of them can be scrolled
const MOST_MISSED = 5; // of the numbers of one expectation that came out differently
const NOISE = 2 ** -45; // what adding up many numbers may leave of them where the sum is 0

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
  return [
    about(
      "The numbers of each step",
      figures("statistics of each step", OF_STEPS, ...unzipped(steps.map(withoutNoise))),
      runs.touched ? "" : layer().scaleWords,
    ),
    about(
      "How each query spreads its weight",
      figures(
        "statistics of each row of weights",
        OF_ROWS,
        "L" in layer().sizes ? labels("L") : [layer().alone],
        rows.map((own) => own.slice(0, 3)),
        rows.map((own) => names[own[3]] ?? ""),
      ),
      content.spread,
    ),
  ];
}

// A mean or a variance that is only rounding is shown as 0.
/** @param {any[]} own */
function withoutNoise([name, [mean, variance, least, most, cells]]) {
  const noise = Math.max(Math.abs(least), Math.abs(most)) * NOISE;
  const real = [Math.abs(mean) < noise ? 0 : mean, variance < noise * noise ? 0 : variance];
  return [name, [...real, least, most, cells]];
}

const unzipped = (pairs) => [0, 1].map((k) => pairs.map((pair) => pair[k]));

const about = (title, made, words) =>
  h("section.about", h("h3", h("span.name", title)), made, words && h("p.words", words));

function figures(caption, headers, names, rows, notes = null) {
  const cell = (value) => h(Number.isFinite(value) ? "td" : "td.odd", formatNumber(value, state.digits));
  const body = rows.map((row, k) => [
    rowHead(bdi(cut(names[k] ?? "", 60))),
    row.map(cell),
    notes && h("td.remark", bdi(cut(notes[k], 60))),
  ]);
  const note = notes && h("th.remark", { scope: "col" }, bdi("its key"));
  const heads = [h("td"), headers.map((header) => colHead(bdi(header))), note];
  const kind = notes && rows.length > PRINTED ? "div.sheet.long" : "div.sheet";
  return scrolled(caption, kind, table(caption, heads, body));
}

// --- what should come out -------------------------------------------------------------------

/** @type {{of: any, list: any[]}} */
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

// A problem expects results of the numbers that it gives: where some are changed, it is checked with
// those, not with the changed ones.
const checked = () => (state.edits.size ? runs.plain : runs.now);

// What is expected of one cell, and whether it comes out, "" if given numbers are changed; undefined
// if nothing is expected.
export function expectedOf({ step, index }) {
  for (const one of expectations()) {
    if (one.step !== step || !one.values || missed(runs.now, one) === null) continue;
    const cell = wantedCells(runs.now, one).find((cell) => cell.index.join() === index.join());
    if (!cell) continue;
    const right = meets(one, runs.now.value(step, index), cell.wanted);
    const verdict = state.edits.size ? "" : right ? "right" : "wrong";
    return { wanted: exactText(cell.wanted), verdict };
  }
  return undefined;
}

function exactText(value) {
  if (!Number.isFinite(value)) return formatNumber(value);
  return numpyLiteral(value).replace(/^-/, "−").replace(/\.0$/, "");
}

// The sentences about one expectation: [whether it is right, words, the cell that they are about].
function judged(one) {
  if (one.unfit) return [[false, one.unfit]];
  const found = missed(checked(), one);
  if (found === null) return [[null, `${one.step} is not part of what is shown`]];
  if (!found.length) return [[true, one.right]];
  const lines = found.slice(0, MOST_MISSED).map(({ index, expected, got }) => {
    const name = index ? labelOf(one.step, index) : `variance of ${one.step}`;
    const words = `${name}: ${exactText(expected)} is expected, ${exactText(got)} comes out`;
    return [false, words, index && { step: one.step, index }];
  });
  const more = found.length - MOST_MISSED;
  return more > 0 ? [...lines, [false, `${one.step}: ${more} more differ`]] : lines;
}

function labelOf(name, index) {
  const { step, labels: names } = derive(checked(), labels, name, index);
  return cut(cellName(step.symbol, names), 80);
}

function summed(all) {
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
    const link = cell && [" ", button("open it", open)];
    return h(`li.${name}`, h("b", name), " ", h("span", bdi(words), link));
  });
  const of = state.edits.size ? " of the numbers given" : "";
  return { words: `What should come out${of}: ${summed(all)}`, list: h("ul", items) };
}

// --- on the page ----------------------------------------------------------------------------

function details(name, words) {
  const made = h(`details.part.${name}`, h("summary", words));
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

// New numbers; the statistics are made when they are looked at.
export function fillSummary() {
  const box = find("details.figures", main);
  if (box) {
    const compute = () => {
      box.stale = false;
      find(".steps", box)?.remove();
      box.append(h("div.steps", statistics()));
    };
    box.stale = true;
    box.ontoggle = () => box.open && box.stale && compute();
    if (box.open) compute();
  }
  const list = find("details.checks", main);
  if (list && layer().expect.length) {
    const { words, list: items } = checks();
    find("summary", list).textContent = words;
    find("ul", list)?.remove();
    list.append(items);
  }
}
