// Numbers about the numbers: the statistics of regard/explanation/questions.py, and whether what was expected comes
// out. Must not know the page.

import { isHead } from "./attention.js";

// Mean, variance, smallest, largest and count of the cells that count; each of `rows` has its values,
// and which of them are visible (null: all).
export function moments(rows) {
  const cells = rows.flatMap(({ values, visible }) =>
    Array.from(values).filter((_, k) => visible === null || visible[k]),
  );
  const count = cells.length;
  if (!count) return [NaN, NaN, NaN, NaN, 0];
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const least = cells.reduce((a, b) => Math.min(a, b));
  const most = cells.reduce((a, b) => Math.max(a, b));
  const mean = least === most ? least : sum(cells) / count;
  return [mean, sum(cells.map((cell) => (cell - mean) ** 2)) / count, least, most, count];
}

// How a row spreads its weight: entropy in nats, effective keys, the largest weight and its key (-1:
// none).
export function spread(weights) {
  const row = Array.from(weights);
  const total = row.reduce((sum, weight) => sum + weight, 0);
  if (total === 0) return [0, 0, 0, -1];
  const entropy = row
    .map((weight) => weight / total)
    .reduce((sum, share) => (share === 0 ? sum : sum - share * Math.log(share)), 0);
  const odd = row.findIndex(Number.isNaN);
  const largest = odd < 0 ? row.reduce((a, b) => Math.max(a, b)) : NaN;
  return [entropy, Math.exp(entropy), largest, odd < 0 ? row.indexOf(largest) : odd];
}

// What does not come out of one expectation: cells, or the variance (index null), with both numbers.
// null: what is shown has no such step.
export function missed(run, expected) {
  const step = run.steps.get(expected.step);
  if (!step || step.axes.join() !== expected.axes.join()) return null;
  const axis = step.axes.find(isHead);
  const heads = expected.head === undefined ? Array(run.sizes[axis] ?? 1).keys() : [expected.head];
  const found = [];
  if (expected.variance !== undefined) {
    const rows = [...heads].flatMap((head) => run.rows(expected.step, head));
    const got = moments(rows)[1];
    if (!meets(expected, got, expected.variance))
      found.push({ index: null, expected: expected.variance, got });
  }
  for (const { index, wanted } of wantedCells(run, expected)) {
    const got = run.value(expected.step, index);
    if (!meets(expected, got, wanted)) found.push({ index, expected: wanted, got });
  }
  return found;
}

// The cells that an expectation is about, and their numbers.
export function wantedCells(run, { step, at, head, values = [] }) {
  const cells = at ? [at] : indices(run.steps.get(step), run.sizes, head);
  return Array.from(values, (wanted, k) => ({ index: cells[k], wanted }));
}

// Infinities and NaN are met as such.
export function meets({ within, relative }, got, wanted) {
  if (Number.isFinite(got) && Number.isFinite(wanted))
    return Math.abs(got - wanted) <= within + relative * Math.abs(wanted);
  return got === wanted || (Number.isNaN(got) && Number.isNaN(wanted));
}

// Every index of a step in order, of one head if it is given.
function indices(step, sizes, head) {
  /** @type {number[][]} */
  let all = [[]];
  for (const axis of step.axes) {
    const own = isHead(axis) && head !== undefined ? [head] : [...Array(sizes[axis]).keys()];
    all = all.flatMap((index) => own.map((n) => [...index, n]));
  }
  return all;
}
