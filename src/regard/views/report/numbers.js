// Numbers: how one is written, read and checked. Must not know attention or the page.
//
// The same digits as Python's `arithmetic.format_number`, and the same answer to whether printed
// numbers, taken at their word, give the printed result: that is decided with whole numbers of any
// size, never with floats.

export function formatNumber(value, digits = 8) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return Object.is(value, -0) ? "−0" : "0";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (Number.isInteger(value) && size < 1e15) return sign + size;
  if (size < 10 ** -Math.min(4, digits) || size >= 1e9) {
    const [mantissa, exponent] = toEven(size, digits, "toExponential").split("e");
    const power = exponent.slice(1).padStart(2, "0");
    return `${sign}${withoutZeros(mantissa)}e${exponent[0]}${power}`;
  }
  return sign + withoutZeros(toEven(size, digits, "toFixed"));
}

// As a table shows it: zeros at the end stay where they are not the whole truth.
export function rounded(value, digits) {
  const text = formatNumber(value, digits);
  if (text.includes("e") || !digits || text === formatNumber(value, Math.max(digits, 8)))
    return text;
  const [whole, fraction = ""] = text.split(".");
  return `${whole}.${fraction.padEnd(digits, "0")}`;
}

// JavaScript rounds exact halves up, Python to even; 100 digits are enough to see a half, and three
// to see that there is none.
function toEven(size, digits, method) {
  const rounded = size[method](digits);
  if (
    !size[method](digits + 3)
      .split("e")[0]
      .endsWith("500")
  )
    return rounded;
  const [exact, power = ""] = size[method](100).split("e");
  const [whole, rest] = exact.split(".");
  if (!/^50*$/.test(rest.slice(digits))) return rounded;
  const last = digits ? rest[digits - 1] : whole.at(-1);
  if (Number(last) % 2) return rounded;
  const kept = digits ? `${whole}.${rest.slice(0, digits)}` : whole;
  return power ? `${kept}e${power}` : kept;
}

function withoutZeros(text) {
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

// A number as NumPy source that gives exactly this float64 back: what Python's repr writes.
export function numpyLiteral(value) {
  if (Number.isNaN(value)) return "np.nan";
  if (!Number.isFinite(value)) return value > 0 ? "np.inf" : "-np.inf";
  const sign = value < 0 || Object.is(value, -0) ? "-" : "";
  const size = Math.abs(value);
  if (size === 0) return `${sign}0.0`;
  const [mantissa, exponent] = size.toExponential().split("e");
  const power = Number(exponent);
  if (power < -4 || power >= 16) {
    return `${sign}${mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  }
  const digits = mantissa.replace(".", "");
  if (power < 0) return `${sign}0.${"0".repeat(-power - 1)}${digits}`;
  const whole = digits.slice(0, power + 1).padEnd(power + 1, "0");
  return `${sign}${whole}.${digits.slice(power + 1) || "0"}`;
}

// What somebody typed, or null if it is no number.
export function parseNumber(text) {
  const plain = text
    .trim()
    .replace(/^[−–]/, "-")
    .replace(/,(?=\d+$)/, ".");
  if (/^nan$/i.test(plain)) return NaN;
  const infinite = /^([+-]?)(∞|inf|infinity)$/i.exec(plain);
  if (infinite) return infinite[1] === "-" ? -Infinity : Infinity;
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+−-]?\d+)?$/i.test(plain)
    ? Number(plain.replace("−", "-"))
    : null;
}

// --- arrays in the file ---------------------------------------------------------------------

export function bytesOf(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  return bytes;
}

// One array of the file as float64: {dtype, at, count} says where its little-endian bytes are.
export function floatsOf(bytes, { dtype, at, count }) {
  const view = new DataView(bytes.buffer, bytes.byteOffset + at);
  const floats = new Float64Array(count);
  for (let k = 0; k < count; k++) {
    if (dtype === "f8") floats[k] = view.getFloat64(8 * k, true);
    else if (dtype === "f4") floats[k] = view.getFloat32(4 * k, true);
    else if (dtype === "f2") floats[k] = fromHalf(view.getUint16(2 * k, true));
    else if (dtype === "u2") floats[k] = view.getUint16(2 * k, true);
    else floats[k] = (view.getUint8(k >> 3) >> (k & 7)) & 1; // bits, the first one lowest
  }
  return floats;
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// --- decimal arithmetic of any length: {n, e} is n · 10^e -----------------------------------

const PLACES = 60; // of what is not exact: exp, ln, quotients
const ONE = 10n ** BigInt(PLACES);
const LN10 = 2302585092994045684017991454684364207601101488628772976033328n;

export function decimal(text) {
  const [mantissa, exponent = "0"] = text.replaceAll("−", "-").split("e");
  const [whole, fraction = ""] = mantissa.split(".");
  return { n: BigInt(whole + fraction), e: Number(exponent) - fraction.length };
}

// Whether the printed operands, taken at their word, give the printed result.
export function gives(op, printed, value, digits) {
  const result = formatNumber(value, digits);
  const exact = exactly(op, printed.map(decimal), digits);
  if (exact === null) return true;
  const shown = decimal(result);
  const power = result.includes("e") ? adjusted(shown) : 0;
  const apart = add(exact, negated(shown));
  return compare({ n: 2n * abs(apart.n), e: apart.e }, { n: 1n, e: power - digits }) <= 0;
}

function exactly(op, numbers, digits) {
  const [first, second] = numbers;
  switch (op) {
    case "add":
      return numbers.reduce(add, { n: 0n, e: 0 });
    case "subtract":
      return add(first, negated(second));
    case "multiply":
      return times(first, second);
    case "divide":
      return second.n === 0n ? null : over(first, second);
    case "exp":
      return exponential(first);
    case "log":
      return first.n > 0n ? logarithm(first) : null;
    case "cap":
      return times(second, tanh(over(first, second)));
    case "inverse_root": {
      if (first.n <= 0n) return null;
      return over({ n: 1n, e: 0 }, decimal(formatNumber(Math.sqrt(toFloat(first)), digits)));
    }
  }
  return null;
}

const abs = (n) => (n < 0n ? -n : n);
const negated = ({ n, e }) => ({ n: -n, e });
const times = (a, b) => ({ n: a.n * b.n, e: a.e + b.e });
const toFloat = ({ n, e }) => Number(`${n}e${e}`);
const adjusted = ({ n, e }) => (n === 0n ? e : abs(n).toString().length - 1 + e);

function add(a, b) {
  const e = Math.min(a.e, b.e);
  return { n: a.n * 10n ** BigInt(a.e - e) + b.n * 10n ** BigInt(b.e - e), e };
}

function compare(a, b) {
  const { n } = add(a, negated(b));
  return n < 0n ? -1 : n > 0n ? 1 : 0;
}

// a / b to PLACES significant digits or more.
function over(a, b) {
  const more = Math.max(0, PLACES + b.n.toString().length - a.n.toString().length);
  return { n: (a.n * 10n ** BigInt(more)) / b.n, e: a.e - b.e - more };
}

// A decimal in units of 10^−PLACES, what is smaller cut off.
function fixed({ n, e }) {
  const power = e + PLACES;
  return power >= 0 ? n * 10n ** BigInt(power) : n / 10n ** BigInt(-power);
}

function exponential(x) {
  if (toFloat(x) < -1e4) return { n: 0n, e: 0 }; // far below the least float64
  const units = fixed(x);
  const tens = units / LN10;
  return { n: smallExponential(units - tens * LN10), e: Number(tens) - PLACES };
}

// exp of |x| < ln 10 in units of 10^−PLACES, by its series.
function smallExponential(x) {
  let sum = ONE;
  let term = ONE;
  for (let k = 1n; term !== 0n; k++) {
    term = (term * x) / (k * ONE);
    sum += term;
  }
  return sum;
}

function logarithm(x) {
  const tens = adjusted(x);
  const rest = fixed({ n: x.n, e: x.e - tens }); // from 1 to 10
  let y = fixed(decimal(Math.log(Number(rest) / Number(ONE)).toFixed(20)));
  for (let round = 0; round < 3; round++) {
    const grown = smallExponential(y);
    y += (2n * ONE * (rest - grown)) / (rest + grown);
  }
  return { n: y + BigInt(tens) * LN10, e: -PLACES };
}

function tanh(x) {
  const size = Math.abs(toFloat(x));
  if (size < 1e-10)
    return add(x, times({ n: -1n, e: 0 }, over(times(x, times(x, x)), { n: 3n, e: 0 })));
  const shrunk = exponential({ n: -2n * abs(x.n), e: x.e }); // exp(−2·|x|), at most 1
  const one = { n: 1n, e: 0 };
  const ratio = over(add(one, negated(shrunk)), add(one, shrunk));
  return x.n < 0n ? negated(ratio) : ratio;
}
