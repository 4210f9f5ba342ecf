// Where the tables of the picture are, in pixels: the row of a number left of it, its column above
// it. Must not know numbers or the page.

const GAP = 16; // between tables side by side
const GATE = 92; // for what lies between scores and weights
const TITLE = 24;
const HEADS = 17; // for the names of columns
const BETWEEN = 34; // between groups
const WIDEST = 68; // of a cell
const FLAT = 19; // a lower cell has no number
const TABLE = 240; // pixels of what is drawn, if its cells are not square

// A station as json_data.py wrote it.
const asStation = ([name, step, column, row, turned, left, above, source, inside, copy]) =>
  ({ name, step, column, row, turned, left, above, source, inside, copy });

export const groupsOf = (picture, kind) => picture[kind].map((group) => group.map(asStation));

// Where the tables of a group begin across; a table is so many cells `wide` and `high`, and the names
// of its rows need a `gutter` of so many pixels.
function across(group, u) {
  const slots = Math.max(...group.map((one) => one.column)) + 1;
  const left = new Map();
  let edge = -GAP; // of the slot before
  for (let slot = 0; slot < slots; slot++) {
    const own = group.filter((one) => one.column === slot);
    const width = own.length ? Math.max(...own.map((one) => one.wide * u)) : GATE;
    let start = edge + GAP;
    for (const one of own) {
      const row = group.filter((other) => other.row === one.row && other.column < slot);
      const free = Math.max(-GAP, ...row.map((other) => left.get(other.name) + other.wide * u));
      start = Math.max(start, free + one.gutter + GAP - (width - one.wide * u));
    }
    edge = start + width;
    for (const one of own) left.set(one.name, edge - one.wide * u);
  }
  return { left, width: edge };
}

// How far the tables of a group are below its results; those above have negative numbers.
function down(group, h) {
  const named = new Map(group.map((one) => [one.name, one]));
  const tops = new Map(group.filter((one) => one.row === 0).map((one) => [one.name, 0]));
  const place = (one) => {
    const [side, up] = [named.get(one.left), named.get(one.above)];
    if (side && !tops.has(side.name)) tops.set(side.name, tops.get(one.name));
    if (up) tops.set(up.name, tops.get(one.name) - head(one) - up.high * h);
    for (const next of [side, up]) if (next) place(next);
  };
  for (const one of group) if (one.row === 0) place(one);
  return tops;
}

const head = (one) => TITLE + (one.heads ? HEADS : 0);

// Every group at some size of a cell, side by side or one below the other.
function arrange(groups, u, h, beside, between = BETWEEN) {
  const places = new Map();
  const made = groups.map((group) => ({ group, ...across(group, u), tops: down(group, h) }));
  for (const one of made) {
    one.above = Math.max(...one.group.map((own) => head(own) - one.tops.get(own.name)));
    one.below = Math.max(...one.group.filter((own) => !own.row).map((own) => own.high * h));
  }
  const highest = Math.max(...made.map((one) => one.above));
  let [x, y, width, bottom] = [0, 0, 0, 0];
  for (const { group, left, tops, above, below, width: own } of made) {
    const top = y + (beside ? highest : above);
    for (const one of group) {
      const [w, tall] = [one.wide * u, one.high * h];
      places.set(one.name, { x: x + left.get(one.name), y: top + tops.get(one.name), w, h: tall });
    }
    width = Math.max(width, x + own);
    bottom ||= top + below; // of the first group
    if (beside) x += own + BETWEEN + GAP;
    else y = top + below + between;
  }
  const height = Math.max(...[...places.values()].map((one) => one.y + one.h));
  return { u, h, places, width, height, bottom };
}

// The largest number of pixels that still fits, by halving.
function largest(most, fits) {
  let [low, high] = [0.001, most];
  if (fits(high)) return high;
  while (high - low > 0.01 * high) {
    const middle = (low + high) / 2;
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low > 8 ? Math.floor(low) : low;
}

// The picture as large as there is room for: of more than one group the first. Groups are side by side
// if cells keep the `least` pixels that a number needs, else so many pixels `between` one and the next,
// in a narrow picture always. `zoom` enlarges cells, not what is between them.
export function fit(groups, { width, height, least, zoom = 1, between = 0, tallest = 40, minimum = 0 }) {
  const widest = (side) => largest(WIDEST, (u) => arrange(groups, u, 9, side).width <= width);
  const joined = groups.length > 1 && between > 0 && widest(true) >= least;
  const u = Math.max(widest(joined), minimum);
  const most = Math.max(...groups.flat().map((one) => one.high));
  const small = !groups.flat().some((one) => one.big);
  const square = small ? tallest : Math.min(tallest, Math.max(u, TABLE / most));
  const tall = largest(square, (h) => arrange(groups, u, h, joined, between).bottom <= height);
  const h = small && u >= 20 ? Math.max(tall, FLAT + 1) : tall;
  return arrange(groups, u * zoom, h * zoom, joined, between || BETWEEN);
}
