// Beside an open number: nudge it, and see whether the loss moves as its gradient says.

import { formatNumber } from "./numbers.js";
import { cellName, cut } from "./derivation.js";
import { fill, h, rowHead, table } from "./elements.js";
import { gradientOf } from "./attention.js";
import { nudge, readNudge } from "./descent.js";
import { extras, runs } from "./shown.js";

// The loss is a sum of rounded numbers: what it moves by is known to about so much of it.
const ROUNDING = 1e-14;

// What a reader typed, and whether this is open.
let typed = "0.01";
let opened = false;

function panel({ step, labels, index, hidden }) {
  const name = step.of || step.name;
  if (!gradientOf(runs.now, name) || hidden) return [];
  const own = cut(cellName(runs.now.steps.get(name).symbol, labels), 40);
  const found = h("div", { role: "status" });
  const wrong = h("span.wrong", { role: "alert" });
  const show = () => {
    typed = input.value;
    const read = readNudge(typed);
    wrong.textContent = read.wrong ?? "";
    input.setAttribute("aria-invalid", String(!read.by));
    fill(found, read.by ? outcome(nudge(runs.now, name, index, read.by), read.by) : []);
  };
  const input = h("input", {
    type: "text",
    autocomplete: "off",
    id: "nudge",
    value: typed,
    oninput: show,
  });
  show();
  const made = h(
    "details.nudge",
    h("summary", { onclick: () => (opened = !made.open) }, "Check this derivative"),
    h(
      "form",
      { onsubmit: (event) => event.preventDefault() },
      h("label", { for: "nudge" }, `change ${own} by`),
      input,
      wrong,
    ),
    found,
  );
  made.open = opened;
  return made;
}

const signed = (value) => `${value > 0 ? "+" : ""}${formatNumber(value)}`;

function outcome(found, by) {
  const { before, after, slope, moved, line, off, offAtHalf } = found;
  const remark = (words) => h("p.remark", words);
  if (!Number.isFinite(before)) return remark("The loss is not finite, so it has no slope.");
  if (!Number.isFinite(after)) return remark("With this change the loss overflows: take a smaller change.");
  const known = runs.now.steps.has("loss");
  const loss = known ? "loss" : "Σ gradient·result";
  const lines = [
    [`${loss} before`, formatNumber(before)],
    [`${loss} after`, formatNumber(after)],
    ["it moves by", signed(moved)],
    [`the slope says ${formatNumber(slope, 4)} × ${formatNumber(by, 4)}`, signed(line)],
    ["the slope is off by", signed(Number(off.toPrecision(3)))],
    ["and for half the change by", signed(Number(offAtHalf.toPrecision(3)))],
  ];
  const rows = lines.map(([words, number]) => [rowHead(words), h("td", number)]);
  return [
    table("the loss and its slope", [], rows),
    remark(lesson(found, Math.max(Math.abs(before), Math.abs(after)))),
    !known && remark("Only the gradient is given, not the loss; Σ gradient·result has its slopes."),
  ];
}

function lesson({ off, offAtHalf }, size) {
  if (off === 0) return "The slope is exact here.";
  if (Math.abs(off) < ROUNDING * size)
    return "What is left is the rounding of the loss: the slope is exact to 14 digits of it.";
  if (Math.abs(offAtHalf / off - 1 / 4) < 1 / 8)
    return "Half the change leaves about a quarter of the error: the smaller, the better.";
  if (Math.abs(offAtHalf / off - 1 / 8) < 1 / 16)
    return "Half the change leaves about an eighth of the error: the smaller, the better.";
  return "So large a change bends the loss away from its slope: take a smaller one.";
}

extras.push({ panel });
