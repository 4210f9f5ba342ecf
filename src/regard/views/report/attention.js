// Attention in the page: runs the steps that regard/textbook/steps.py declares. It knows no formula:
// which cells of which steps go into a cell is in the exported declarations. Must not know the page.

import { OPERATIONS } from "./operations.js";
import { judge, turnsOf } from "./visibility.js";

// --- declarations ---------------------------------------------------------------------------

// An index such as "h//(H//G)" or "g*D+d" as a function of letters and sizes.
export function indexMap(text) {
  const tokens = text.match(/\/\/|[A-Za-z]+|[()*%+]/g);
  let next = 0;
  const atom = () => {
    const token = tokens[next++];
    if (token !== "(") return (at, sizes) => (token in at ? at[token] : sizes[token]);
    const inside = sum();
    next++; // the closing bracket
    return inside;
  };
  const product = () => {
    let left = atom();
    while (["*", "//", "%"].includes(tokens[next])) {
      const sign = tokens[next++];
      const [first, second] = [left, atom()];
      left = (at, sizes) => {
        const [a, b] = [first(at, sizes), second(at, sizes)];
        return sign === "*" ? a * b : sign === "//" ? Math.floor(a / b) : a % b;
      };
    }
    return left;
  };
  const sum = () => {
    let left = product();
    while (tokens[next] === "+") {
      next++;
      const [first, second] = [left, product()];
      left = (at, sizes) => first(at, sizes) + second(at, sizes);
    }
    return left;
  };
  return sum();
}

const maps = new Map();
export function position(index, at, sizes) {
  if (index in at) return at[index];
  if (!maps.has(index)) maps.set(index, indexMap(index));
  return maps.get(index)(at, sizes);
}

export const isHead = (axis) => axis === "H" || axis === "G";

// The step that is the gradient of another one; undefined if that has none.
export const gradientOf = (run, name) => [...run.steps.values()].find((step) => step.of === name);

// A step of more numbers than this keeps only its latest rows.
const MOST_HELD = 1 << 22;
const ROWS_HELD = 64;

// --- running the steps ----------------------------------------------------------------------

// The steps of one batch element over given arrays, computed row by row when asked.
//
// `steps` are declarations and `operations` the words of each; `given(name, head)` are the numbers of a given step and `known(name,
// head)` those that are already computed, or null; `rules` says which keys are hidden.
export class Run {
  constructor(
    { steps, sizes, letters, operations = {}, rules = null, positions = 0, batch = [], ids = [], byHand = /** @type {any} */ (null) },
    given,
    known = () => null,
  ) {
    this.steps = new Map(
      steps.map((step) => [
        step.name,
        {
          ...step,
          index: step.axes.map((axis) => letters[axis]),
          operation: { ...OPERATIONS[step.op], ...operations[step.op] },
        },
      ]),
    );
    this.ids = ids;
    this.byHand = byHand; // how a reader hides a key that no table decides about
    this.sizes = sizes;
    this.given = given;
    this.known = known;
    this.rules = rules;
    this.batch = batch;
    this.positions = positions; // of each query, or of the first if the others follow one by one
    this.blocks = new Map();
  }

  // Where one cell is; the head first in its index, if the step has one.
  locate(name, index) {
    const heads = this.steps.get(name).axes.filter(isHead).length;
    const own = index.slice(heads);
    const block = this.block(name, heads ? index[0] : 0);
    const [row, column] = own.length === 2 ? own : block.byRow ? [own[0], 0] : [0, own[0] ?? 0];
    return { block, row, column };
  }

  // The number of one cell.
  value(name, index) {
    const { block, row, column } = this.locate(name, index);
    return block.data[this.start(block, row) + column];
  }

  // One row of a step as a Float64Array, computed if need be; of a long step it does not stay.
  row(name, head, row) {
    const block = this.block(name, head);
    const start = this.start(block, row);
    return block.data.subarray(start, start + block.width);
  }

  // One row with what is visible of it; null: nothing of it can be hidden.
  seenRow(name, head, row) {
    const seen = this.hides(this.steps.get(name)) ? this.steps.get("visible") : null;
    const visible = seen && this.row("visible", seen.axes.includes("H") ? head : 0, row);
    return { values: this.row(name, head, row), visible };
  }

  // All rows of a step, each as `seenRow` gives it.
  rows(name, head) {
    const { rows } = this.block(name, head);
    return Array.from({ length: rows }, (_, row) => this.seenRow(name, head, row));
  }

  // Whether cells of a step may be hidden keys.
  hides({ over, axes }) {
    return over === "visible" && axes.at(-1) === "S" && (axes.includes("L") || !("L" in this.sizes));
  }

  // One head of a step (a key head for a step with the axis G): rows × width, perhaps not filled.
  block(name, head) {
    const step = this.steps.get(name);
    const key = step.axes.some(isHead) ? `${name}/${head}` : name;
    let block = this.blocks.get(key);
    if (block) return block;
    const own = step.axes.filter((axis) => !isHead(axis));
    const sizes = own.map((axis) => this.sizes[axis]);
    const byRow = own.length === 2 || own[0] === "L";
    const [rows, width] = own.length === 2 ? sizes : byRow ? [sizes[0], 1] : [1, sizes[0] ?? 1];
    block = { step, head, rows, width, byRow, held: null, rowLetter: null, columnLetter: null };
    const letters = step.index.filter((_, k) => !isHead(step.axes[k]));
    if (own.length === 2) [block.rowLetter, block.columnLetter] = letters;
    else if (byRow) [block.rowLetter] = letters;
    else [block.columnLetter = null] = letters;
    const source = step.op === "given" ? this.given : this.known;
    block.data = source(name, step.axes.some(isHead) ? head : null);
    if (!block.data) {
      const long = own.join() === "L,S" && rows * width > MOST_HELD && !this.sideways();
      block.held = new Int32Array(long ? ROWS_HELD : rows).fill(-1); // which row is in each place
      block.data = new Float64Array(block.held.length * width);
    }
    this.blocks.set(key, block);
    return block;
  }

  // Where a row begins in the data of its block; it is computed if it is not there.
  start(block, row) {
    if (block.held === null) return row * block.width;
    const place = row % block.held.length;
    if (block.held[place] !== row) {
      block.held[place] = row;
      this.fill(block, row, place * block.width);
    }
    return place * block.width;
  }

  complete(block) {
    for (let row = 0; row < block.rows; row++) this.start(block, row);
  }

  // Whether anything is added up along the rows of the scores: softmax over the wrong axis.
  sideways() {
    const sums = this.steps.get("row_sums"); // which not every mechanism has
    return "L" in this.sizes && sums !== undefined && !sums.axes.includes("L");
  }

  fill(block, row, start) {
    const { step, width, data } = block;
    const at = this.lettersOf(block, row);
    if (step.op === "visible") {
      for (let j = 0; j < width; j++)
        data[start + j] = this.verdict(at.h ?? 0, at.i ?? 0, j).visible ? 1 : 0;
      return;
    }
    const cell = this.operation(block, at);
    for (let column = 0; column < width; column++) {
      if (block.columnLetter) at[block.columnLetter] = column;
      data[start + column] = cell();
    }
  }

  lettersOf(block, row) {
    const at = { h: block.head };
    if (block.step.axes.includes("G")) at.g = block.head;
    if (block.rowLetter) at[block.rowLetter] = row;
    return at;
  }

  // The cell that an operand names.
  at(ref, at) {
    return this.value(
      ref.step,
      ref.index.map((index) => position(index, at, this.sizes)),
    );
  }

  // How one cell of a row is computed; `at` holds its letters and changes between calls.
  operation({ step }, at) {
    if (this.crossesHeads(step)) return this.acrossHeads(step, at);
    const { value, hidden } = step.operation;
    const operands = step.operands.map((ref) => this.operand(ref, at));
    const hides =
      step.over === "visible"
        ? this.operand({ step: "visible", index: this.steps.get("visible").index }, at)
        : null;
    const runs = ({ row, column }) => step.running && [row, column].includes(step.running);
    const numbers = operands.map(() => 0);
    const cell = step.running
      ? this.reduction(step, at, operands, hides && runs(hides) ? hides : null)
      : () => {
          for (const [k, operand] of operands.entries()) numbers[k] = this.read(operand, at);
          return value(...numbers);
        };
    if (hides === null || hidden === undefined || runs(hides)) return cell;
    return () => (this.read(hides, at) === 0 ? hidden : cell());
  }

  // Whether an operand's head changes along the row, or heads are added up.
  crossesHeads({ operands, running }) {
    return operands.some(({ step, index }) => {
      const head = index[this.steps.get(step).axes.findIndex(isHead)];
      return index.some((one) => /[*%]/.test(one)) || (running !== "" && head === running);
    });
  }

  acrossHeads({ operands, running, operation }, at) {
    const numbers = () => operands.map((ref) => this.at(ref, at));
    if (!running) return () => operation.value(...numbers());
    const count = this.sizes[{ r: "R", g: "G", h: "H" }[running]];
    return () => {
      let total = operation.empty;
      for (let k = 0; k < count; k++) {
        at[running] = k;
        total = operation.fold(
          total,
          numbers().reduce((a, b) => a * b),
        );
      }
      return total;
    };
  }

  // Where an operand's numbers are, and which letters say row and column.
  operand(ref, at) {
    const { axes } = this.steps.get(ref.step);
    const head = axes.findIndex(isHead);
    const block = this.block(ref.step, head < 0 ? 0 : position(ref.index[head], at, this.sizes));
    const letters = ref.index.filter((_, k) => !isHead(axes[k]));
    const byRow = letters.length === 2 || block.byRow;
    const [row, column = null] = byRow ? letters : [null, ...letters];
    return { block, row, column };
  }

  read({ block, row, column }, at) {
    return block.data[this.start(block, row ? at[row] : 0) + (column ? at[column] : 0)];
  }

  // The same where a term is no product, or where all terms are needed at once.
  ofTerms({ running, operation }, at, operands, hides) {
    const { each = (x) => x, all, fold, empty } = operation;
    const long = operands.find(({ row, column }) => [row, column].includes(running));
    const count = long.row === running ? long.block.rows : long.block.width;
    return () => {
      const found = [];
      for (let k = 0; k < count; k++) {
        at[running] = k;
        if (hides !== null && this.read(hides, at) === 0) continue;
        found.push(each(...operands.map((operand) => this.read(operand, at))));
      }
      delete at[running];
      return all ? all(found) : found.reduce(fold, empty);
    };
  }

  // Σ or max along the letter that the cell does not have, over visible keys only where declared.
  reduction(step, at, operands, hides) {
    const { running, operation } = step;
    const { fold, empty } = operation;
    if (operation.each || operation.all) return this.ofTerms(step, at, operands, hides);
    const runs = (operand) => operand.row === running || operand.column === running;
    const along = operands.filter(runs);
    const beside = operands.filter((operand) => !runs(operand));
    const all = hides ? [...along, hides] : along;
    for (const { block, row } of all) if (row === running) this.complete(block);
    const [first] = along;
    const count = first.row === running ? first.block.rows : first.block.width;
    const walk = all.map((operand) => ({
      operand,
      step: operand.row === running ? operand.block.width : 1,
      from: 0,
    }));
    const unit = { step: 0 };
    return () => {
      for (const one of walk) {
        const { block, row, column } = one.operand;
        const r = row && row !== running ? at[row] : 0;
        one.from = this.start(block, r) + (column && column !== running ? at[column] : 0);
      }
      const [a, b = unit] = walk.slice(0, along.length);
      const seen = all.length > along.length ? walk.at(-1) : null;
      const [x, y] = [a.operand.block.data, b === unit ? null : b.operand.block.data];
      let total = empty;
      for (let k = 0; k < count; k++) {
        if (seen !== null && seen.operand.block.data[seen.from + k * seen.step] === 0) continue;
        let term = x[a.from + k * a.step];
        if (y !== null) term *= y[b.from + k * b.step];
        total = fold(total, term);
      }
      for (const operand of beside) total = fold(total, this.read(operand, at));
      return total;
    };
  }

  verdict(head, query, key) {
    return judge(this.rules, this.placeOf(head, query, key));
  }

  // Which cells of tables, turned, would show or hide this key; if no table decides, it is hidden by hand.
  turns(head, query, key) {
    const place = this.placeOf(head, query, key);
    const found = turnsOf(this.rules, place);
    const visible = !this.rules || judge(this.rules, place).visible;
    return found.length || !visible || !this.byHand ? found : [this.byHand(query, key)];
  }

  placeOf(head, query, key) {
    const { batch, positions } = this;
    const position = typeof positions === "number" ? positions + query : positions[query];
    return { batch, head, query, key, position, run: this };
  }
}
