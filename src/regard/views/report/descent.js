// The loss as a function of one number or of many: what a small change does to it, and a step down its
// slope. Must not know the page.

import { formatNumber, parseNumber } from "./numbers.js";
import { Run, gradientOf, isHead } from "./attention.js";

// The loss; where only the gradient of the result is given, Σ gradient·result, which has the same slopes.
export function lossOf(run) {
  if (run.steps.has("loss")) return run.value("loss", []);
  const given = [...run.steps.values()].find((step) => step.of && step.op === "given");
  const head = given.axes.find(isHead);
  let total = 0;
  for (let own = 0; own < (head ? run.sizes[head] : 1); own++) {
    for (let row = 0; row < run.block(given.of, own).rows; row++) {
      const slopes = run.row(given.name, own, row);
      total = run.row(given.of, own, row).reduce((sum, x, k) => sum + x * slopes[k], total);
    }
  }
  return total;
}

// The same run with one number changed by so much, whether it is given or computed.
function nudged(run, name, index, by) {
  const own = Object.create(Run.prototype);
  Object.assign(own, run, { blocks: new Map(), known: () => null });
  const { block, row, column } = run.locate(name, index);
  run.complete(block);
  const changed = Object.assign(own.block(name, block.head), { data: block.data.slice(), held: null });
  changed.data[row * block.width + column] += by;
  return own;
}

// What the loss does when one number is changed by so much, and what its slope predicts.
export function nudge(run, name, index, by) {
  const slope = run.value(gradientOf(run, name).name, index);
  const [before, half, after] = [0, by / 2, by].map((by) => lossOf(nudged(run, name, index, by)));
  const line = slope * by;
  const [moved, offAtHalf] = [after - before, half - before - line / 2];
  return { before, after, slope, moved, line, off: moved - line, offAtHalf };
}

// The given steps that a gradient step can move.
export const learnable = (run) =>
  [...run.steps.values()]
    .filter(({ op, name }) => op === "given" && name !== "scale" && gradientOf(run, name))
    .map(({ name }) => name);

// The gradient of each number of an input, by head and row. Numbers that were given once for all
// heads, rows or columns have the sum of theirs, so that they stay equal.
function slopesOf(run, name, shared) {
  const slope = gradientOf(run, name).name;
  const head = run.steps.get(name).axes.find(isHead);
  const heads = [...Array(head ? run.sizes[head] : 1).keys()];
  const each = heads.map((own) =>
    Array.from({ length: run.block(name, own).rows }, (_, row) => run.row(slope, own, row)),
  );
  if (!shared) return each;
  const once = [head, "L", "S"].map((axis) => shared.includes(axis));
  const place = (...index) => index.map((k, axis) => (once[axis] ? 0 : k)).join();
  const sums = new Map();
  const over = (use) =>
    each.map((rows, own) => rows.map((row, k) => [...row].map((x, at) => use(place(own, k, at), x))));
  over((key, x) => sums.set(key, (sums.get(key) ?? 0) + x));
  return over((key) => sums.get(key));
}

// What is edited after each number of these inputs moved against its gradient, by `rate` times it;
// null if none of them moves.
export function descended(carried, { layer, batch, edits }, run, names, rate) {
  const after = new Map(edits);
  let moves = false;
  for (const name of names) {
    const head = run.steps.get(name).axes.find(isHead);
    const slopes = slopesOf(run, name, carried.layers[layer].shared[name]);
    for (let own = 0; own < slopes.length; own++) {
      const part = carried.partKey(layer, "given", name, batch, head ? own : null);
      const given = carried.decode(carried.editable(String(layer), name, part));
      const moved = new Map();
      const { rows, width } = run.block(name, own);
      for (let row = 0; row < rows; row++) {
        const values = run.row(name, own, row);
        for (let k = 0, flat = row * width; k < width; k++, flat++) {
          const value = values[k] - rate * slopes[own][row][k];
          moves ||= !Object.is(value, values[k]);
          if (!Object.is(value, given[flat])) moved.set(flat, value);
        }
      }
      const key = `${layer}|${name}|${part}`;
      if (moved.size) after.set(key, moved);
      else after.delete(key);
    }
  }
  return moves ? after : null;
}

// --- what is typed, and what is said --------------------------------------------------------

// What was typed as a nudge: {by}, or what is {wrong} with it.
export function readNudge(text) {
  const by = parseNumber(text);
  if (by === null || !Number.isFinite(by))
    return { wrong: "That is not a number. Write it as in 0.01 or -1e-3." };
  return by ? { by } : { wrong: "A change of 0 moves nothing. Write it as in 0.01 or -1e-3." };
}

const LOSS_DIGITS = 6;
const RISES = 5; // steps in a row after which a rising loss diverges
const BEYOND = 100; // or when it is so many times the first

// What was typed as a rate: {rate}, or what is {wrong} with it.
export function readRate(text) {
  const rate = parseNumber(text);
  if (rate === null || !Number.isFinite(rate))
    return { wrong: "The rate is not a number. Write it as in 0.1 or 1e-3." };
  if (rate === 0) return { wrong: "At a rate of 0 nothing moves. Give one above 0, such as 0.1." };
  if (rate > 0) return { rate };
  return { wrong: "A negative rate would climb. Give one above 0, such as 0.1." };
}

// Why there can be no step after these losses; "" if there can.
export function trouble(losses) {
  const [first, last, steps] = [losses[0], losses.at(-1), losses.length - 1];
  const mend = "The rate is too large: start over with a smaller one.";
  if (!Number.isFinite(last) && steps)
    return `The loss overflows: after ${counted(steps)} it is ${formatNumber(last)}. ${mend}`;
  if (!Number.isFinite(last))
    return `The loss is ${formatNumber(last)}, so there is no slope to follow.`;
  const late = losses.slice(-1 - RISES);
  const rising = late.length > RISES && late.every((loss, k) => !k || loss > late[k - 1]);
  if (!rising && !(last > BEYOND * first)) return "";
  const [from, to] = [rising ? late[0] : first, last].map(shortly);
  return `The loss diverges: it rose from ${from} to ${to}. ${mend}`;
}

export const counted = (steps) => `${steps} step${steps === 1 ? "" : "s"}`;
export const shortly = (loss) => formatNumber(Number(loss.toPrecision(LOSS_DIGITS)), LOSS_DIGITS);
