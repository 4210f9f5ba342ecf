// One number and the numbers that made it: read off the declarations, and written out as Python's
// regard/explanation/notation.py does, character by character. Must not know the page.

import { formatNumber, gives, numpyLiteral } from "./numbers.js";
import { hiddenBy, leaves } from "./rules.js";
import { isHead, position, running } from "./attention.js";

// `labels(axis)` are the names along an axis; the index has the head first, if there is one.
export function derive(run, labels, name, index) {
  const step = run.steps.get(name);
  const at = Object.fromEntries(step.index.map((letter, k) => [letter, index[k]]));
  const operand = (ref, at) => {
    const where = ref.index.map((one) => position(one, at, run.sizes));
    const own = run.steps.get(ref.step);
    const names = cellLabels(own, where, run.sizes, labels);
    return {
      step: ref.step,
      symbol: own.symbol,
      index: where,
      labels: names,
      value: run.value(ref.step, where),
    };
  };
  const operands = [];
  const terms = [];
  const along = running(step, run.steps);
  if (along === null) {
    operands.push(...step.operands.map((ref) => operand(ref, at)));
  } else {
    const names = labels(along.axis);
    const together = step.operands.filter((ref) => ref.index.includes(along.letter));
    for (const place of positions(run, step, at, along)) {
      const factors = together.map((ref) => operand(ref, { ...at, [along.letter]: place }));
      const value = factors.reduce((product, factor) => product * factor.value, 1);
      terms.push({
        label: names[place],
        operands: factors.map((_, k) => operands.length + k),
        value,
      });
      operands.push(...factors);
    }
    for (const ref of step.operands.filter((ref) => !ref.index.includes(along.letter))) {
      operands.push(operand(ref, at));
      terms.push({ label: "sink", operands: [operands.length - 1], value: operands.at(-1).value });
    }
  }
  const judged = step.op === "visible" || step.over === "visible";
  const verdicts =
    judged && "j" in at && run.rules && !sideways(step, run)
      ? [run.verdict(at.h ?? 0, at.i ?? 0, at.j)]
      : [];
  return {
    step,
    index,
    operands,
    terms,
    verdicts,
    place: [at.h ?? 0, at.i ?? 0, at.j],
    labels: cellLabels(step, index, run.sizes, labels),
    value: run.value(name, index),
    hidden: verdicts.some((verdict) => !verdict.visible),
  };
}

// Whether a step has a number for each key but none for each query, though there are queries.
function sideways(step, run) {
  return run.steps.get("scores").axes.includes("L") && !step.axes.includes("L");
}

function positions(run, step, at, { axis, letter }) {
  const all = Array.from({ length: run.sizes[axis] }, (_, k) => k);
  if (step.over !== "visible" || !(axis === "S" || axis === "L")) return all;
  return all.filter((k) => {
    const cell = { ...at, [letter]: k };
    return (
      run.at({ step: "visible", index: run.steps.get("visible").index }, { h: 0, ...cell }) !== 0
    );
  });
}

function cellLabels(step, index, sizes, labels) {
  const names = [];
  for (const [k, axis] of step.axes.entries()) {
    if (!isHead(axis)) names.push(labels(axis)[index[k]]);
    else if (sizes[axis] > 1) names.push(`${axis === "H" ? "head" : "key head"} ${index[k]}`);
  }
  return names;
}

export function cellName(symbol, labels) {
  return labels.length ? `${symbol}[${labels.join(", ")}]` : symbol;
}

// At most so many characters, counted as Python counts them.
export function cut(text, limit) {
  const characters = Array.from(text);
  return characters.length <= limit ? text : `${characters.slice(0, limit - 1).join("")}…`;
}

// --- a derivation in words ------------------------------------------------------------------

// The arithmetic as lines of text, as regard/explanation/notation.py writes it.
export function asText(derivation, digits = 8) {
  const { step, labels, value, verdicts } = derivation;
  const head = `${cut(cellName(step.symbol, labels), 200)} = ${formatNumber(value, digits)}`;
  const lines = [
    `${head}    ${step.formula}`,
    ...body(derivation, digits).map((line) => `  ${line}`),
  ];
  const names = verdicts.flatMap(hiddenBy);
  if (names.length) lines.push(`  hidden by: ${names.map((name) => cut(name, 80)).join(", ")}`);
  return lines.join("\n");
}

function body(derivation, digits) {
  const { step, operands, hidden } = derivation;
  const shown = operands.map((operand) => formatNumber(operand.value, digits));
  const names = operands.map((operand) => cut(cellName(operand.symbol, operand.labels), 80));
  const remark = doubt(derivation, digits);
  const rules = ruleLines(derivation);
  switch (step.op) {
    case "given":
      return ["a given number"];
    case "visible":
      return rules;
    case "dot":
    case "sum":
    case "max":
      return [...termLines(derivation, digits), ...remark];
    case "multiply":
      return [`${names[0]} · ${names[1]} = ${shown[0]} × ${shown[1]}`, ...remark];
    case "cap":
      return [`c·tanh(${names[0]} / c) = ${shown[1]} × tanh(${shown[0]} / ${shown[1]})`, ...remark];
    case "add":
      return [`${names.join(" + ")} = ${shown.join(" + ")}`, ...remark];
    case "select":
      return operands[0].value
        ? [`visible, so ${names[1]} = ${shown[1]}`]
        : ["hidden, so −∞", ...rules];
    case "subtract": {
      if (hidden) return ["hidden, so −∞", ...rules];
      const taken = shown[1].startsWith("−") ? `(${shown[1]})` : shown[1];
      return [`${names[0]} − ${names[1]} = ${shown[0]} − ${taken}`, ...remark];
    }
    case "exp":
      return hidden
        ? ["hidden, so 0", ...rules]
        : [`exp(${names[0]}) = exp(${shown[0]})`, ...remark];
    case "divide":
      return hidden
        ? ["hidden, so 0", ...rules]
        : [`${names[0]} / ${names[1]} = ${shown[0]} / ${shown[1]}`, ...remark];
    case "log":
      return [`ln(${names[0]}) = ln(${shown[0]})`, ...remark];
    case "inverse_root": {
      const root = formatNumber(Math.sqrt(operands[0].value), digits);
      return [`1 / √${names[0]} = 1 / √${shown[0]} = 1 / ${root}`, ...remark];
    }
  }
  return [`the same number as ${names[0]} = ${shown[0]}`]; // split, merge
}

export function ruleLines({ verdicts }) {
  return verdicts
    .flatMap(leaves)
    .map(
      (leaf) => `${cut(leaf.rule, 80)}: ${leaf.visible ? "visible" : "hidden"} (${leaf.detail})`,
    );
}

// What stands where nothing could be added up or compared.
export function emptyWords({ step }) {
  if (step.op === "max") return "no visible key, so −∞";
  return step.op === "sum" || step.name === "output"
    ? "no visible key, so 0"
    : "nothing to add up, so 0";
}

export const TOTALS = { dot: "sum", sum: "sum", max: "largest" };

function termLines(derivation, digits) {
  const { step, terms, operands, value } = derivation;
  if (!terms.length) return [emptyWords(derivation)];
  const rows = terms.map((term) => {
    const factors = term.operands.map((k) => formatNumber(operands[k].value, digits));
    return [
      cut(term.label, 40),
      factors.length > 1 ? factors.join(" × ") : "",
      formatNumber(term.value, digits),
    ];
  });
  rows.push([TOTALS[step.op], "", formatNumber(value, digits)]);
  const size = (text) => Array.from(text).length;
  const pad = (text, width) => text + " ".repeat(width - size(text));
  const widths = [0, 1].map((k) => Math.max(...rows.map((row) => size(row[k]))));
  return rows.map(([label, product, number]) => {
    const middle = !widths[1]
      ? ""
      : product
        ? `${pad(product, widths[1])} = `
        : " ".repeat(widths[1] + 3);
    return `${pad(label, widths[0])}  ${middle}${number}`;
  });
}

const OVERFLOW = "(the result overflows: it is beyond the largest 64-bit float, 1.8e308)";
const OVERFLOW_IN_SUM =
  "(the terms overflow: beyond the largest 64-bit float, 1.8e308, everything is ∞, and where ∞ " +
  "and −∞ meet, the order of adding decides between ∞, −∞ and NaN)";

// A line that says so where the printed numbers do not give the printed result.
export function doubt({ step, operands, terms, value, hidden }, digits) {
  const rounded = `(numbers are rounded to ${digits} decimals; the result is of unrounded ones)`;
  const roundedTerms = `(terms are rounded to ${digits} decimals; the sum is of unrounded ones)`;
  if (!operands.every((operand) => Number.isFinite(operand.value))) return [];
  if (![value, ...terms.map((term) => term.value)].every(Number.isFinite)) {
    if (!["dot", "sum", "multiply", "add", "subtract", "exp"].includes(step.op)) return [];
    return [terms.length ? OVERFLOW_IN_SUM : OVERFLOW];
  }
  const printed = operands.map((operand) => formatNumber(operand.value, digits));
  for (const term of terms) {
    const factors = term.operands.map((k) => printed[k]);
    if (factors.length > 1 && !gives("multiply", factors, term.value, digits)) return [rounded];
  }
  if (step.op === "dot" || step.op === "sum") {
    return gives(
      "add",
      terms.map((term) => formatNumber(term.value, digits)),
      value,
      digits,
    )
      ? []
      : [roundedTerms];
  }
  if (hidden || gives(step.op, printed, value, digits)) return [];
  return [step.op === "add" || step.op === "subtract" ? roundedTerms : rounded];
}

// One line of NumPy that computes the value from its operands' exact numbers.
export function asNumpy({ step, operands, terms, value, hidden }) {
  const values = operands.map((operand) => numpyLiteral(operand.value));
  switch (step.op) {
    case "dot": {
      const side = (k) => terms.map((term) => values[term.operands[k]]).join(", ");
      return `np.dot([${side(0)}], [${side(1)}])`;
    }
    case "sum":
      return `np.sum([${values.join(", ")}])`;
    case "max":
      return `np.max([${values.join(", ")}], initial=-np.inf)`;
    case "multiply":
      return `${values[0]} * ${values[1]}`;
    case "cap":
      return `${values[1]} * np.tanh(${values[0]} / ${values[1]})`;
    case "add":
      return values.join(" + ");
    case "select":
      return `np.where(${operands[0].value ? "True" : "False"}, ${values[1]}, -np.inf)`;
    case "subtract":
      if (!hidden) return `${values[0]} - ${values[1]}`;
      break;
    case "exp":
      return `np.exp(${values[0]})`;
    case "divide":
      if (!hidden && operands[1].value !== 0) return `${values[0]} / ${values[1]}`;
      break;
    case "log":
      return `np.log(${values[0]})`;
    case "inverse_root":
      if (operands[0].value) return `1 / np.sqrt(${values[0]})`;
  }
  return numpyLiteral(value);
}
