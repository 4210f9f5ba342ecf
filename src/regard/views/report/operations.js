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

// `value` makes a cell of its operands, which is `hidden` where a rule hides its key; `fold` joins
// the terms of a sum or a maximum, from `empty` on.
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
};

// A template with its places filled, as `fill` in regard/textbook/operations.py does.
export function fill(template, word, terms) {
  return template.replace(
    /⟨([^|]*)\|([^⟩]*)⟩|\$([a-z]?)(\d)/g,
    (_, each, between, kind, number) =>
      each === undefined
        ? word(kind, Number(number))
        : terms
            .map((term) => fill(each, (kind, number) => word(kind, term[number]), terms))
            .join(between),
  );
}
