// The words twice, and between them bands as wide as the weights: who looks at whom.

import { cut } from "./derivation.js";
import { bdi, fill, h, svg, widthOf } from "./elements.js";
import { content, labels, layer, runs, shown, state } from "./shown.js";

const SERIF = "Georgia, serif";
const CEILING = 36; // of the bands, in pixels
let floor = 142;
const MOST_WORDS = 64; // words
const LONGEST = 14; // characters
const CROWDED = 0.75; // of the room that words have at best

// Where the words have room: { left, width, below }, or null if they need a band of their own.
let beside = null;

const named = (axis) => content.labelSets[layer().labels[axis]] ?? null;
const asking = () => ("L" in layer().sizes ? named("L") && labels("L") : layer().alone ? [layer().alone] : null);

export const hasWords = () => named("S") && Math.max(layer().sizes.L ?? 1, layer().sizes.S) <= MOST_WORDS;

// Whether the words fit above the tables on the left, where the picture is low.
export function wordsFit(placed, left, groups) {
  beside = null;
  floor = 142;
  if (!hasWords()) return true;
  const views = groups.flat().map((one) => placed.places.get(one.name));
  const high = views.filter((one) => one.y < floor + 66);
  const edge = Math.min(...high.map((one) => one.x), placed.width);
  const need = widthsOf(19).reduce((sum, width) => sum + width, 0);
  if (edge - 24 < CROWDED * need + 110) {
    floor = 96;
    return false;
  }
  beside = { left, width: Math.min(edge - 24 - 110, need * 1.4) };
  return true;
}

const widthsOf = (size) => {
  const widths = (words) => words.map((word) => widthOf(cut(word, LONGEST), size, SERIF) + 16);
  const sum = (all) => all.reduce((a, b) => a + b, 0);
  const [above, below] = [asking() ?? [], labels("S")].map(widths);
  return sum(above) > sum(below) ? above : below;
};

export function drawWords(box, kind) {
  fill(box);
  const [above, below] = [asking(), named("S") && labels("S")];
  if (!hasWords() || !shown.has("weights") || state.zoom > 1) return;
  const left = beside?.left ?? (kind === "wide" ? 28 : 14);
  const need = widthsOf(19).reduce((sum, one) => sum + one, 0);
  const most = Math.min(box.parentNode.clientWidth - 2 * left - 90, 900);
  const width = beside?.width ?? Math.min(most, 1.8 * need);
  const size = Math.max(9, Math.min(19, (19 * width) / need));
  const [from, to] = [middles(above ?? [""], left, width, size), middles(below, left, width, size)];
  const line = (words, places, y, role) =>
    words.map((word, k) => {
      const one = h("span.word", { title: word }, bdi(cut(word, LONGEST)));
      one.style.cssText = `left:${places[k]}px;top:${y}px;font-size:${size}px`;
      one.lit = { [role]: k };
      return one;
    });
  const every = Math.ceil((need * size) / 19 / width);
  const kept = (words) => words.filter((_, k) => k % every === 0);
  const role = (words, y) => {
    const one = h("span.role", words);
    one.style.cssText = `left:${left + width + 14}px;top:${y}px`;
    return one;
  };
  const drawn = state.walk === null || shown.get("weights").section.classList.contains("later") === false;
  box.append(
    ...(above ? kept(line(above, from, 8, "q")) : []),
    ...kept(line(below, to, floor + 4, "k")),
    role("who looks", 13),
    role("who is looked at", floor + 9),
    drawn ? bandsOf(from, to, left + width) : "",
  );
}

// The middle of each word; a longer one has more room.
function middles(words, left, width, size) {
  const widths = words.map((word) => widthOf(cut(word, LONGEST), size, SERIF) + 16);
  const sum = widths.reduce((a, b) => a + b, 0);
  const scale = width / sum;
  let at = left;
  return widths.map((own) => {
    const middle = at + (own * scale) / 2;
    at += own * scale;
    return middle;
  });
}

function bandsOf(from, to, width) {
  const step = runs.now.steps.get("weights");
  const weights = from.map((_, i) => runs.now.row("weights", step.axes.includes("H") ? state.head : 0, i));
  const apart = [from, to].flatMap((places) => places.slice(1).map((x, k) => x - places[k]));
  const parts = weights.map((row) => {
    const sum = row.reduce((total, one) => total + Math.abs(one), 0);
    return Array.from(row, (one) => (sum > 0 && Number.isFinite(sum) ? Math.abs(one) / sum : 0));
  });
  const sums = to.map((_, j) => parts.reduce((sum, row) => sum + row[j], 0));
  // What arrives at the first and the last word stays within the picture.
  const edges = to.map((x, j) => (2 * Math.min(x - 4, width + 30 - x)) / (sums[j] || 1));
  const unit = Math.min(38, 0.75 * Math.min(...apart, width), ...edges);
  const shares = parts.map((row) => row.map((part) => part * unit));
  const arriving = sums.map((sum) => sum * unit);
  const next = to.map((x, j) => x - arriving[j] / 2);
  const middle = (CEILING + floor) / 2;
  const paths = shares.flatMap((row, i) => {
    let x = from[i] - row.reduce((a, b) => a + b, 0) / 2;
    return row.map((wide, j) => {
      const [a, b] = [x, next[j]];
      x += wide;
      next[j] += wide;
      if (wide < 0.15) return null;
      const edge = (u, v, up, down) => `${u.toFixed(1)} ${up}C${u.toFixed(1)} ${middle} ${v.toFixed(1)} ${middle} ${v.toFixed(1)} ${down}`;
      const d = `M${edge(a, b, CEILING, floor)}L${edge(b + wide, a + wide, floor, CEILING)}Z`;
      const path = svg("path", { d });
      path.pair = [i, j];
      return path;
    });
  });
  const drawn = svg("svg", { "aria-hidden": "true", width: width + 40, height: floor + 4 }, ...paths.filter(Boolean));
  light(drawn);
  return drawn;
}

// The bands of the word that is pointed at are strong, the others faint.
function light(drawn) {
  const { q = null, k = null } = state.lit ?? {};
  const any = q !== null || k !== null;
  for (const path of drawn.children) {
    const own = path.pair[0] === q || path.pair[1] === k;
    path.setAttribute("class", any ? (own ? "lit" : "dim") : "");
  }
}

// Point at a word: its bands, and its row or column in every table.
export function lightUp(box, lit) {
  state.lit = lit;
  const drawn = box.querySelector("svg");
  if (drawn) light(drawn);
  for (const view of shown.values()) {
    const sides = { rowheader: view.down, columnheader: view.right };
    for (const [role, side] of Object.entries(sides)) {
      const k = side.axis === "L" ? lit?.q : side.axis === "S" ? lit?.k : undefined;
      const names = view.section.querySelectorAll(`[role=${role}]:not(.corner)`);
      for (const [at, one] of names.entries()) one.classList.toggle("lit", at === k);
    }
  }
  for (const word of box.querySelectorAll(".word"))
    word.classList.toggle("lit", Boolean(lit) && Object.entries(word.lit).every(([role, k]) => lit[role] === k));
}
