// A few numbers as a curve, drawn as SVG. Must not know what they are numbers of.

import { svg } from "./elements.js";
import { formatNumber } from "./numbers.js";

const [WIDTH, HEIGHT] = [340, 150];
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 10, 12, 26];
const MOST_POINTS = 400; // points
const LEAST_STEPS = 10; // steps along the axis

// The losses before the first step and after each; what is not finite has no point.
export function curveOf(losses) {
  const steps = Math.max(LEAST_STEPS, losses.length - 1);
  const finite = losses.filter(Number.isFinite);
  const most = Math.max(...finite, 0) || 1;
  const x = (k) => LEFT + ((WIDTH - LEFT - RIGHT) * k) / steps;
  const y = (loss) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (loss / most);
  const every = Math.ceil(losses.length / MOST_POINTS);
  const points = losses
    .map((loss, k) => [k, loss])
    .filter(([k, loss]) => Number.isFinite(loss) && (k % every === 0 || k === losses.length - 1))
    .map(([k, loss]) => [x(k), y(loss)].map((n) => n.toFixed(1)));
  const text = (words, x, y, anchor) => svg("text", { x, y, "text-anchor": anchor }, words);
  const line = (kind, from, to) =>
    svg("line", { class: kind, x1: from[0], y1: from[1], x2: to[0], y2: to[1] });
  const short = (loss) => formatNumber(Number(loss.toPrecision(3)), 4);
  const last = points.at(-1);
  const words = `The loss over ${losses.length - 1} steps: from ${short(losses[0])} to ${short(losses.at(-1))}`;
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words },
    line("axis", [LEFT, y(0)], [WIDTH - RIGHT, y(0)]),
    line("grid", [LEFT, y(most)], [WIDTH - RIGHT, y(most)]),
    text(short(most), LEFT - 8, y(most) + 4, "end"),
    text("0", LEFT - 8, y(0) + 4, "end"),
    text("loss", LEFT - 8, (y(0) + y(most)) / 2 + 4, "end"),
    text(`${steps} steps`, WIDTH - RIGHT, HEIGHT - 8, "end"),
    svg("polyline", { points: points.map((point) => point.join()).join(" ") }),
    ...(last ? [svg("circle", { cx: last[0], cy: last[1], r: 3.5 })] : []),
  );
}
