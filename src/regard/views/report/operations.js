// The operations of the textbook in the page: their values. Their words come with the data, from
// regard/textbook/operations.py. Must not know which steps there are.

const add = (a, b = -0) => a + b;
const larger = (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : Math.max(a, b));
const same = (a) => a;

// 1 − tanh² would cancel where tanh is near 1.
function softcapSlope(x, softcap) {
  const e = Math.exp(-2 * Math.abs(x / softcap));
  return (4 * e) / (1 + e) ** 2;
}

// The slope of tanh.
const bent = (x) => softcapSlope(x, 1);

const smaller = (a, b) => -larger(-a, -b);

// σ, and its slope.
const sigmoid = (x) => (x >= 0 ? 1 : Math.exp(x)) / (1 + Math.exp(-Math.abs(x)));
function sigmoidSlope(x) {
  const e = Math.exp(-Math.abs(x));
  return e / (1 + e) ** 2;
}

// The τ with Σ max(x − τ, 0) = 1; −∞ where there is nothing to add up.
function threshold(scores) {
  if (scores.some(Number.isNaN)) return NaN;
  const below = [...scores].sort((a, b) => b - a);
  const most = below[0] ?? -Infinity;
  if (!Number.isFinite(most)) return most < 0 ? most : NaN;
  let [sum, found] = [0, NaN];
  for (const [k, score] of below.entries()) {
    sum += score - most;
    if (1 + (k + 1) * (score - most) <= sum) break;
    found = most + (sum - 1) / (k + 1);
  }
  return found;
}

// The normal distribution: its density, and its distribution function by a series where that is
// short, else by a continued fraction for the tail.
const density = (x) => Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI);
function normal(x) {
  if (Math.abs(x) < 3) {
    let [term, sum] = [x, x];
    for (let k = 3; Math.abs(term) > 1e-17; k += 2) sum += term *= (x * x) / k;
    return 0.5 + sum * density(x);
  }
  let below = Math.abs(x);
  for (let k = 60; k; k--) below = Math.abs(x) + k / below;
  const tail = density(x) / below;
  return x > 0 ? 1 - tail : tail;
}

// The argument of the tanh by which gelu is approximated.
const cube = (x) => Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3);
function geluTanhSlope(x) {
  const steep = Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * x * x);
  return (1 + Math.tanh(cube(x))) / 2 + (x * steep * bent(cube(x))) / 2;
}

const oneHot = (number, chosen) => (Number.isNaN(chosen) ? NaN : Number(number === chosen));
const terms = (each) => ({ each, fold: add, empty: 0, hidden: 0 });

// `value` makes a cell of its operands, which is `hidden` where a rule hides its key; `fold` joins
// the terms of a sum or a maximum, from `empty` on, and `all` makes the cell of all of them. A term
// is the product of the operands that run, or what `each` makes of all operands.
export const OPERATIONS = {
  dot: { fold: add, empty: 0, hidden: 0 },
  row_dot: { fold: add, empty: 0, hidden: 0 },
  multiply: { value: (a, b) => a * b, hidden: 0 },
  softcap: { value: (x, softcap) => softcap * Math.tanh(x / softcap) },
  softcap_slope: { value: softcapSlope, hidden: 0 },
  add: { value: (...x) => x.reduce(add) },
  select: { value: (visible, x) => (visible ? x : -Infinity) },
  keep: { value: (visible, x) => (visible ? x : 0) },
  max: { fold: larger, empty: -Infinity },
  at_maximum: { value: (d, x, maximum) => (x === maximum ? d : 0), hidden: 0 },
  subtract: { value: (a, b) => a - b, hidden: -Infinity },
  exp: { value: Math.exp, hidden: 0 },
  sum: { fold: add, empty: 0 },
  divide: { value: (a, b) => (b === 0 ? 0 : a / b), hidden: 0 },
  log: { value: Math.log },
  negate: { value: (x) => -x, hidden: 0 },
  softmax_gradient: { value: (p, dP, delta) => p * (dP - delta), hidden: 0 },
  half_square: { value: (a, b) => (a - b) ** 2 / 2 },
  inverse_root: { value: (width) => (width ? 1 / Math.sqrt(width) : 1) },
  same: { value: same, hidden: 0 },
  split: { value: same },
  merge: { value: same },
  tanh_dot: terms((v, a, b) => v * Math.tanh(a + b)),
  tanh_sum: terms((d, a, b) => d * Math.tanh(a + b)),
  tanh_slope_sum: terms((d, v, a, b) => d * v * bent(a + b)),
  squared_distance: terms((a, b) => (a - b) ** 2),
  pull: terms((d, a, b) => 2 * d * (a - b)),
  length: { fold: (a, b) => Math.hypot(a, b), empty: 0 },
  sigmoid: { value: sigmoid, hidden: 0 },
  sigmoid_slope: { value: sigmoidSlope, hidden: 0 },
  elu_plus_one: { value: (x) => (x > 0 ? x + 1 : Math.exp(x)) },
  elu_slope: { value: (x) => (x > 0 ? 1 : Math.exp(x)) },
  first_at: {
    each: (x, most, number) => (Number.isNaN(most) ? NaN : x === most ? number : Infinity),
    fold: smaller,
    empty: Infinity,
  },
  one_hot: { value: oneHot, hidden: 0 },
  one_hot_straight: { value: oneHot, hidden: 0 },
  zero: { value: () => 0, hidden: 0 },
  threshold: { all: threshold },
  above: { value: (x, threshold) => larger(x - threshold, 0), hidden: 0 },
  positive: { value: (x) => (Number.isNaN(x) ? NaN : Number(x > 0)), hidden: 0 },
  cos: { value: Math.cos },
  sin: { value: Math.sin },
  angle: { value: (position, frequency) => position * frequency + 0 },
  rotate: { value: (x, cosine, other, sine) => x * cosine + (sine ? other * sine : 0) },
  rotate_back: { value: (x, cosine, other, sine) => x * cosine - (sine ? other * sine : 0) },
  apart: { value: (a, b) => Math.abs(a - b) },
  pick: terms((number, place, wanted) => (place === wanted ? number : 0)),
  norm_factor: { value: (mean, epsilon) => 1 / Math.sqrt(mean + epsilon) },
  gelu: { value: (x) => x * normal(x), hidden: 0 },
  gelu_slope: { value: (x) => normal(x) + x * density(x), hidden: 0 },
  gelu_tanh: { value: (x) => (x * (1 + Math.tanh(cube(x)))) / 2, hidden: 0 },
  gelu_tanh_slope: { value: geluTanhSlope, hidden: 0 },
  silu: { value: (x) => x / (1 + Math.exp(-x)), hidden: 0 },
  silu_slope: { value: (x) => sigmoid(x) * (1 + x * sigmoid(-x)), hidden: 0 },
  relu: { value: (x) => larger(x, 0), hidden: 0 },
};

// A further part of a sum or a list; a negative number is subtracted, not added.
function after(between, part) {
  const negative = between === " + " && /^[−-]/.test(part);
  return negative ? ` ${part[0]} ${part.slice(1)}` : between + part;
}

// A template with its places filled, as `fill` in regard/textbook/operation.py does.
export function filled(template, word, terms) {
  return template.replace(
    /⟨([^|]*)\|([^⟩]*)⟩|\$([a-z]?)(\d)/g,
    (_, each, between, kind, number) =>
      each === undefined
        ? word(kind, Number(number))
        : terms
            .map((term) => filled(each, (kind, number) => word(kind, term[number]), terms))
            .map((part, k) => (k ? after(between, part) : part))
            .join(""),
  );
}
