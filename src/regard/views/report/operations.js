// The operations of the textbook in the page: their values. Their words come with the data, from
// regard/textbook/operations.py. Must not know which steps there are.

const add = (a, b = -0) => a + b;
const larger = (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : Math.max(a, b));
const same = (a) => a;

// `value` makes a cell of its operands, which is `hidden` where a rule hides its key; `fold` joins
// the terms of a sum or a maximum, from `empty` on.
export const OPERATIONS = {
  dot: { fold: add, empty: 0 },
  multiply: { value: (a, b) => a * b },
  softcap: { value: (x, softcap) => softcap * Math.tanh(x / softcap) },
  add: { value: add },
  select: { value: (visible, x) => (visible ? x : -Infinity) },
  max: { fold: larger, empty: -Infinity },
  subtract: { value: (a, b) => a - b, hidden: -Infinity },
  exp: { value: Math.exp, hidden: 0 },
  sum: { fold: add, empty: 0 },
  divide: { value: (a, b) => (b === 0 ? 0 : a / b), hidden: 0 },
  log: { value: Math.log },
  inverse_root: { value: (width) => (width ? 1 / Math.sqrt(width) : 1) },
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
