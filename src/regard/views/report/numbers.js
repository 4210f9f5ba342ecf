// Numbers: how one is written, read and checked. Must not know attention or the page.
//
// The same digits as `format_number` in regard/explanation/notation.py.

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
  const text = toEven(size, digits, "toFixed");
  const short = withoutZeros(text);
  // Zeros at the end stay where more of up to eight decimals would show another number.
  const whole = digits >= 8 || short === withoutZeros(toEven(size, 8, "toFixed"));
  return sign + (whole ? short : text);
}

// Whether the printed number, read back, is another one in its first 15 digits.
export function isRounded(value, digits) {
  if (!Number.isFinite(value)) return false;
  const size = Math.abs(value);
  const printed = Number(formatNumber(size, digits));
  return printed !== size && printed !== Number(toEven(size, 14, "toExponential"));
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

// The shortest text that is read back as the same number.
export const exactly = (value) => (Object.is(value, -0) ? "-0" : String(value));

// A typed text as a number, or null if it is none.
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
