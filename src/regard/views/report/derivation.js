// One number and the numbers that made it: read off the declarations, and written out as Python's
// regard/explanation/derivation.py does, character by character. Must not know the page.

import { formatNumber, isRounded, numpyLiteral } from "./numbers.js";
import { hiddenBy, leaves } from "./visibility.js";
import { isHead, position } from "./attention.js";
import { filled } from "./operations.js";

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
  const judged = [step.op, step.over].includes("visible") && !sideways(step, run);
  const place = [at.h ?? at.g ?? 0, at.i ?? 0, at.j];
  const verdicts = judged && "j" in at && run.rules ? [run.verdict(...place)] : [];
  const hidden = verdicts.some((verdict) => !verdict.visible);
  const letter = step.running;
  if (!letter) {
    operands.push(...step.operands.map((ref) => operand(ref, at)));
  } else if (!hidden) {
    const runs = ({ index }) => index.some((one) => one.split(/\W+/).includes(letter));
    const { each } = step.operation;
    const together = each ? step.operands : step.operands.filter(runs);
    const first = step.operands.find(runs);
    const axis = run.steps.get(first.step).axes[first.index.indexOf(letter)] ?? "R";
    for (const place of positions(run, step, at, axis)) {
      const factors = together.map((ref) => operand(ref, { ...at, [letter]: place }));
      const given = factors.map((factor) => factor.value);
      const value = each ? each(...given) : given.reduce((a, b) => a * b, 1);
      const numbers = factors.map((_, k) => operands.length + k);
      terms.push({ label: termLabel(axis, factors, labels, place), operands: numbers, value });
      operands.push(...factors);
    }
    for (const ref of step.operands.filter((ref) => !together.includes(ref))) {
      operands.push(operand(ref, at));
      terms.push({ label: "sink", operands: [operands.length - 1], value: operands.at(-1).value });
    }
  }
  const own = cellLabels(step, index, run.sizes, labels);
  const slopeOf = step.of ? cellName(run.steps.get(step.of).symbol, own) : "";
  const value = run.value(name, index);
  return { step, index, operands, terms, verdicts, place, labels: own, slopeOf, value, hidden };
}

function termLabel(axis, [{ index }], labels, place) {
  if (axis === "H" || axis === "R") return `head ${index[0]}`;
  return axis === "G" ? `key head ${index[0]}` : labels(axis)[place];
}

// Whether a step has a number for each key but none for each query, though there are queries.
function sideways(step, run) {
  return run.steps.get("scores").axes.includes("L") && !step.axes.includes("L");
}

function positions(run, step, at, axis) {
  const all = Array.from({ length: run.sizes[axis] }, (_, k) => k);
  if (step.over !== "visible" || !(axis === "S" || axis === "L")) return all;
  const visible = { step: "visible", index: run.steps.get("visible").index };
  return all.filter((k) => run.at(visible, { h: at.g ?? 0, ...at, [step.running]: k }) !== 0);
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

// The arithmetic as lines of text, as regard/explanation/derivation.py writes it.
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
  const { step, hidden, value } = derivation;
  const { total, lead, names, numbers } = step.operation;
  const rules = ruleLines(derivation);
  const meant = meaning(derivation, digits);
  const last = [...remarks(derivation, digits), ...(meant ? [`(${meant})`] : [])];
  if (hidden && (names || total)) return [`hidden, so ${formatNumber(value, digits)}`, ...rules];
  if (total) return [...termLines(derivation, digits), ...last];
  if (!names) return rules.length ? rules : [lead, ...last];
  const sides = [names, numbers].map((side) => written(derivation, side, digits));
  return [lead + sides.join(" = "), ...last];
}

// What a gradient says about the number that it belongs to; "" of any other number.
export function meaning({ slopeOf, hidden, value }, digits = 8) {
  if (!slopeOf || hidden || !Number.isFinite(value)) return "";
  const moved = `as ${cut(slopeOf, 80)} rises, the loss`;
  if (value === 0) return `${moved} stays the same`;
  const way = value > 0 ? "rises" : "falls";
  return `${moved} ${way} ${formatNumber(Math.abs(value), digits)} times as fast`;
}

// What goes into the places of a template.
function wordOf(operands, digits, number = (k) => formatNumber(operands[k].value, digits)) {
  return (kind, k) => {
    if (kind === "n") return cut(cellName(operands[k].symbol, operands[k].labels), 80);
    if (kind === "r") return formatNumber(Math.sqrt(operands[k].value), digits);
    const shown = number(k);
    return kind === "b" && shown.startsWith("−") ? `(${shown})` : shown;
  };
}

function written({ operands, terms }, template, digits, ...number) {
  return filled(template, wordOf(operands, digits, ...number), termsOf({ operands, terms }));
}

// One term of a sum or a comparison: how it is made of its operands; "" of a single number.
export function termText({ step, operands }, term, digits) {
  const word = wordOf(operands, digits);
  if (step.operation.term && term.operands.length)
    return filled(step.operation.term, (kind, k) => word(kind, term.operands[k]), []);
  const factors = term.operands.map((k) => word("", k));
  return factors.length > 1 ? factors.join(" × ") : "";
}

// The operands of every term; of an addition every operand is one.
const termsOf = ({ operands, terms }) =>
  terms.length ? terms.map((term) => term.operands) : operands.map((_, k) => [k]);

// The right side of the equation: texts, and in between the numbers of the operands.
export function pieces(derivation, digits = 8) {
  const mark = "\u0000";
  const number = (k) => mark + k + mark;
  const { lead, numbers } = derivation.step.operation;
  return (lead + written(derivation, numbers, digits, number))
    .split(mark)
    .map((piece, k) => (k % 2 ? Number(piece) : piece));
}

export function ruleLines({ verdicts }) {
  const words = ({ rule, visible, detail }) =>
    `${cut(rule, 80)}: ${visible ? "visible" : "hidden"} (${detail})`;
  return verdicts.flatMap(leaves).map(words);
}

// The words where there is nothing to add up or to compare.
export function emptyWords({ step, value }, digits = 8) {
  const nothing = step.running === "j" ? "no visible key" : "nothing to add up";
  return `${nothing}, so ${formatNumber(value, digits)}`;
}

// A sum, exact but for the last rounding: `partials` add up to it, and none shares a bit with another.
function exactSum(values) {
  const plain = values.reduce((total, value) => total + value, 0);
  if (!Number.isFinite(plain)) return plain;
  let partials = [];
  for (const value of values) {
    const kept = [];
    let sum = value;
    for (const partial of partials) {
      const [large, small] = Math.abs(sum) < Math.abs(partial) ? [partial, sum] : [sum, partial];
      sum = large + small;
      const lost = small - (sum - large);
      if (lost) kept.push(lost);
    }
    partials = [...kept, sum];
  }
  return partials.reduceRight((total, partial) => total + partial, 0);
}

const MOST_TERMS = 16; // of a text

// The largest terms in their order, and one for the rest: their sum, or of a maximum the largest.
export function shownTerms({ step, terms }, most) {
  if (terms.length <= most) return { kept: terms, rest: null };
  const sign = { max: 1, threshold: 1, first_at: -1 }[step.op] ?? 0; // what counts is the largest
  const size = ({ value }) => (Number.isNaN(value) ? Infinity : sign * value || Math.abs(value));
  const large = new Set([...terms].sort((a, b) => size(b) - size(a)).slice(0, most - 1));
  const left = terms.filter((term) => !large.has(term)).map((term) => term.value);
  const extreme = () => sign * Math.max(...left.map((one) => sign * one));
  const value = sign ? extreme() : step.op === "length" ? Math.hypot(...left) : exactSum(left);
  const label = `${left.length} more, ${["at least", "together", "at most"][sign + 1]}`;
  return { kept: terms.filter((term) => large.has(term)), rest: { label, operands: [], value } };
}

function termLines(derivation, digits) {
  const { step, terms, value } = derivation;
  if (!terms.length) return [emptyWords(derivation, digits)];
  const { kept, rest } = shownTerms(derivation, MOST_TERMS);
  const rows = [...kept, ...(rest ? [rest] : [])].map((term) => {
    const product = termText(derivation, term, digits);
    return [cut(term.label, 40), product, formatNumber(term.value, digits)];
  });
  rows.push([step.operation.total, "", formatNumber(value, digits)]);
  const size = (text) => Array.from(text).length;
  const pad = (text, width) => text + " ".repeat(width - size(text));
  const widths = [0, 1].map((k) => Math.max(...rows.map((row) => size(row[k]))));
  const none = widths[1] ? " ".repeat(widths[1] + 3) : "";
  return rows.map(([label, product, number]) => {
    const middle = product ? `${pad(product, widths[1])} = ` : none;
    return `${pad(label, widths[0])}  ${middle}${number}`;
  });
}

const OVERFLOW = "(the result overflows: it is beyond the largest 64-bit float, 1.8e308)";
const OVERFLOW_IN_SUM =
  "(the terms overflow: beyond the largest 64-bit float, 1.8e308, everything is ∞, and where ∞ " +
  "and −∞ meet, the order of adding decides between ∞, −∞ and NaN)";

// That finite operands overflow, and that a shown number is rounded.
export function remarks({ step, operands, terms, value, hidden }, digits = 8) {
  if (hidden || step.op === "given") return [];
  const { overflows, exact } = step.operation;
  const given = operands.map((operand) => operand.value);
  const made = [value, ...terms.map((term) => term.value)];
  const found = [];
  if (overflows && given.every(Number.isFinite) && !made.every(Number.isFinite))
    found.push(terms.length ? OVERFLOW_IN_SUM : OVERFLOW);
  if (!exact && [...given, ...made].some((number) => isRounded(number, digits)))
    found.push(`(numbers are rounded to ${digits} decimals; the result is of unrounded ones)`);
  return found;
}

// One line of NumPy that computes the value from its operands' exact numbers.
export function asNumpy({ step, operands, terms, value, hidden }) {
  const { numpy, nonzero } = step.operation;
  if (hidden || !numpy || operands[nonzero]?.value === 0) return numpyLiteral(value);
  const word = (_, k) => numpyLiteral(operands[k].value);
  return filled(numpy, word, termsOf({ operands, terms }));
}

// The arithmetic as one LaTeX equation.
export function asLatex(derivation, digits = 8) {
  const { step, labels, operands, value, hidden } = derivation;
  const sides = [`{${step.latex}}_{${labels.map(latexText).join(", ")}}`, latexNumber(value, digits)];
  if (operands.length && !hidden) sides.splice(1, 0, latexSide(derivation, digits));
  return sides.join(" = ");
}

function latexSide(derivation, digits) {
  const { step, operands } = derivation;
  const { latex_numbers: template, total } = step.operation;
  const word = (kind, k) => {
    const shown = latexNumber(operands[k].value, digits);
    return kind === "b" && shown.startsWith("-") ? `(${shown})` : shown;
  };
  const { kept, rest } = shownTerms(derivation, MOST_TERMS);
  const wanted = kept.length ? kept.map((term) => term.operands) : operands.map((_, k) => [k]);
  const side = filled(template, word, wanted);
  if (!rest) return side;
  const size = latexNumber(total === "sum" ? Math.abs(rest.value) : rest.value, digits);
  if (total !== "sum") return `${side} \\quad ${latexText(`and ${rest.label}`)} \\; ${size}`;
  return `${side} ${rest.value < 0 ? "-" : "+"} \\underbrace{${size}}_{${latexText(rest.label)}}`;
}

function latexNumber(value, digits) {
  const text = formatNumber(value, digits)
    .replace("−", "-")
    .replace("∞", "\\infty")
    .replace("NaN", "\\mathrm{NaN}");
  if (!/^[-\d].*e/.test(text)) return text;
  const [mantissa, power] = text.split("e");
  return `${mantissa} \\cdot 10^{${Number(power)}}`;
}

const INERT = { "\\": "\\textbackslash{}", "^": "\\textasciicircum{}", "~": "\\textasciitilde{}" };

// Text from outside, in which LaTeX finds nothing to do.
const latexText = (label) =>
  `\\text{${cut(label, 80).replace(/[\\^~&%$#_{}]/g, (one) => INERT[one] ?? `\\${one}`)}}`;
