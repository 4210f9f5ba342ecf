// What the page's script says of every number: driven by test_report_script.py, a line
// of JSON in, a line out.

import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [folder] = process.argv.slice(2);
const take = (name) => import(pathToFileURL(`${folder}/${name}.js`));
const { formatNumber, isRounded, numpyLiteral, parseNumber } = await take("numbers");
const { asLatex, asNumpy, asText, derive } = await take("derivation");
const { Carried } = await take("carried");
const { OPERATIONS } = await take("operations");
const { descended, learnable, nudge } = await take("descent");
const { missed, moments, spread } = await take("figures");

const inWords = (value) =>
  Number.isFinite(value) && !Object.is(value, -0)
    ? value
    : Object.is(value, -0)
      ? "-0"
      : String(value);
const number = (value) =>
  typeof value === "string"
    ? value === "-0"
      ? -0
      : Number(value.replace("inf", "Infinity"))
    : value;

const asMap = (edits) => {
  const map = new Map();
  for (const [key, flat, value] of edits)
    map.set(key, (map.get(key) ?? new Map()).set(flat, number(value)));
  return map;
};

// The statistics of every head of every batch element: [batch, head, {step: …}, rows].
function figures({ content, arrays, edits = [] }) {
  const book = new Carried(content, arrays);
  const own = content.layers[0];
  const found = [];
  for (let batch = 0; batch < Math.max(1, own.positions.length); batch++) {
    const run = book.run({ layer: 0, batch }, { edits: asMap(edits) });
    for (let head = 0; head < (own.sizes.H ?? 1); head++) {
      const shared = own.sizes.H / own.sizes.G;
      const of = ({ axes }) => (axes.includes("G") ? Math.floor(head / shared) : head);
      const steps = [...run.steps.values()].filter(
        (step) => step.axes.length && step.op !== "visible",
      );
      found.push([
        batch,
        head,
        Object.fromEntries(
          steps.map((step) => [step.name, moments(run.rows(step.name, of(step))).map(inWords)]),
        ),
        run.rows("weights", head).map(({ values }) => spread(values).map(inWords)),
      ]);
    }
  }
  return found;
}

// What does not come out as expected: [step, index, expected].
function checks({ content, arrays, edits = [] }) {
  const book = new Carried(content, arrays);
  const run = book.run({ layer: 0, batch: 0 }, { edits: asMap(edits) });
  return content.layers[0].expect.map((one) => {
    const values = one.values && book.decode(one.values);
    const variance = one.variance && book.decode(one.variance)[0];
    const { axes } = run.steps.get(one.step);
    return missed(run, { ...one, axes, values, variance }).map(({ index, expected }) => [
      one.step,
      index,
      inWords(expected),
    ]);
  });
}

function everyCell({ content, arrays, switches = [], edits = [], known, texts }) {
  const book = new Carried(content, arrays);
  const map = asMap(edits);
  const found = [];
  for (const [layer, own] of content.layers.entries()) {
    for (let batch = 0; batch < Math.max(1, own.positions.length); batch++) {
      const run = book.run({ layer, batch }, { switches: new Set(switches), edits: map, known });
      for (const step of run.steps.values()) {
        const shape = step.axes.map((axis) => own.sizes[axis]);
        const count = shape.reduce((a, b) => a * b, 1);
        for (let flat = 0; flat < count; flat++) {
          const index = [];
          for (let k = shape.length - 1, rest = flat; k >= 0; k--) {
            index.unshift(rest % shape[k]);
            rest = Math.floor(rest / shape[k]);
          }
          const cell = [batch, step.name, index, inWords(run.value(step.name, index))];
          if (texts) {
            const why = derive(run, (axis) => book.labels(layer, axis), step.name, index);
            cell.push(asText(why), asNumpy(why), asLatex(why, 8));
          }
          found.push(cell);
        }
      }
    }
  }
  return found;
}

// Gradient steps on every given number, or on `only` these: what can move, then after each step the
// edits and every cell.
function learn({ content, arrays, rate, steps, only, edits: before = [] }) {
  const book = new Carried(content, arrays);
  const place = { layer: 0, batch: 0, edits: asMap(before), switches: new Set() };
  const at = () => book.run(place, place);
  const names = only ?? learnable(at());
  const found = [];
  for (let k = 0; k < steps; k++) {
    place.edits = descended(book, place, at(), names, rate);
    const edits = [...place.edits].flatMap(([key, own]) =>
      [...own].map(([flat, value]) => [key, flat, inWords(value)]),
    );
    found.push([edits, everyCell({ content, arrays, edits })]);
  }
  return [names, found];
}

// What a small change of each cell of a step does to the loss.
function nudges({ content, arrays, cases }) {
  const book = new Carried(content, arrays);
  const run = book.run({ layer: 0, batch: 0 });
  return cases.map(([step, index, by]) => {
    const { slope, before, after, off, offAtHalf } = nudge(run, step, index, by);
    return [slope, before, after, off, offAtHalf].map(inWords);
  });
}

const tasks = {
  format: ({ cases }) => cases.map(([value, digits]) => formatNumber(number(value), digits)),
  literal: ({ cases }) => cases.map((value) => numpyLiteral(number(value))),
  rounded: ({ cases }) => cases.map(([value, digits]) => isRounded(number(value), digits)),
  parse: ({ cases }) =>
    cases.map((text) => {
      const value = parseNumber(text);
      return value === null ? null : inWords(value);
    }),
  operations: () => Object.keys(OPERATIONS),
  cells: everyCell,
  checks,
  figures,
  learn,
  nudges,
};

for await (const line of createInterface({ input: process.stdin })) {
  const answers = JSON.parse(line).map((one) => tasks[one.task](one));
  process.stdout.write(JSON.stringify(answers) + "\n");
}
