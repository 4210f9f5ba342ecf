// Matrices too large for digits, drawn one dot per number. Must not know attention or the page.

const LONGEST_SIDE = 1024; // along one side; longer sides are pooled, the largest number in each dot
const SLICE = 7; // milliseconds of work between two frames, of all pictures together
const UNFINISHED = 700; // milliseconds until a picture that takes long is shown unfinished

// The colours that the style sheet says, as [r, g, b].
function palette() {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  document.body.append(canvas);
  const pen = /** @type {CanvasRenderingContext2D} */ (
    canvas.getContext("2d", { willReadFrequently: true })
  );
  const colour = (name) => {
    canvas.style.color = `var(--${name})`;
    pen.fillStyle = getComputedStyle(canvas).color;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const names = ["sheet", "more", "less", "flow", "hatch", "alarm"];
  const found = Object.fromEntries(names.map((name) => [name, colour(name)]));
  canvas.remove();
  return found;
}

// How many dots a matrix has, and how many numbers go into one.
export function dotsOf(rows, columns) {
  const [tall, broad] = [Math.ceil(rows / LONGEST_SIDE), Math.ceil(columns / LONGEST_SIDE)];
  return { tall, broad, rows: Math.ceil(rows / tall), columns: Math.ceil(columns / broad) };
}

let working = 0; // pictures that are not finished

// Draw a matrix whose row i is `row(i)` = {values, visible or null}, a few rows per frame. Answers
// with `stop`, which gives it up.
/**
 * @param {any} canvas
 * @param {{rows: number, columns: number, log?: boolean, flow?: boolean, row: Function}} how
 */
export function drawMatrix(canvas, { rows, columns, row, log = false, flow = false }) {
  const dots = dotsOf(rows, columns);
  const numbers = new Float64Array(dots.rows * dots.columns).fill(NaN);
  const state = new Uint8Array(numbers.length).fill(1); // 1 hidden, 0 a number, 2 not finite
  let next = 0;
  let sized = false;
  let shownAt = performance.now();
  const work = () => {
    const begin = performance.now();
    while (next < rows && performance.now() < begin + SLICE / working) {
      pool(numbers, state, dots, row(next), next);
      next++;
    }
    if (next < rows) frame = requestAnimationFrame(work);
    else working--;
    if (next < rows && begin < shownAt + UNFINISHED) return;
    if (!sized) [canvas.width, canvas.height] = [dots.columns, dots.rows];
    sized = true;
    canvas.getContext("2d").putImageData(imageOf(dots, numbers, state, log, flow, next), 0, 0);
    shownAt = performance.now();
  };
  let frame = 0;
  working++;
  work();
  const stop = () => {
    cancelAnimationFrame(frame);
    if (next < rows) working--;
    next = rows;
  };
  return { stop };
}

function pool(numbers, state, dots, { values, visible }, row) {
  const start = Math.floor(row / dots.tall) * dots.columns;
  for (let column = 0; column < values.length; column++) {
    if (visible !== null && visible[column] === 0) continue;
    const at = start + Math.floor(column / dots.broad);
    const value = values[column];
    if (!Number.isFinite(value)) state[at] = 2;
    else if (state[at] !== 2) {
      if (state[at] === 1 || Math.abs(value) > Math.abs(numbers[at])) numbers[at] = value;
      state[at] = 0;
    }
  }
}

// From 0 at a thousandth of the largest number, and below it, to 1 at the largest.
const logarithmic = (share) => Math.max(0, 1 + Math.log10(share) / 3);

function imageOf(dots, numbers, state, log, flow, done) {
  const colours = palette();
  let largest = 0;
  for (let k = 0; k < numbers.length; k++) {
    if (state[k] === 0) largest = Math.max(largest, Math.abs(numbers[k]));
  }
  const image = new ImageData(dots.columns, dots.rows);
  for (let k = 0; k < numbers.length; k++) {
    if (k >= Math.ceil(done / dots.tall) * dots.columns) break; // not computed yet
    const share = state[k] === 0 && largest ? Math.abs(numbers[k]) / largest : 0;
    const [colour, depth] =
      state[k] === 1
        ? [colours.hatch, 0.5]
        : state[k] === 2
          ? [colours.alarm, 1]
          : [numbers[k] < 0 ? colours.less : flow ? colours.flow : colours.more, log ? logarithmic(share) : share];
    for (let c = 0; c < 3; c++)
      image.data[4 * k + c] = colours.sheet[c] + (colour[c] - colours.sheet[c]) * depth;
    image.data[4 * k + 3] = 255;
  }
  return image;
}
