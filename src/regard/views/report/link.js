// The link, which holds what a reader chose, switched, edited and opened.

import { exactly, parseNumber } from "./numbers.js";
import { carried, content, fitsNow, layer, refresh, state } from "./shown.js";

export function remember() {
  const query = new URLSearchParams();
  for (const name of ["layer", "batch", "head"]) if (state[name]) query.set(name, state[name]);
  if (state.cell) query.set("cell", `${state.cell.step}:${state.cell.index.join(",")}`);
  if (state.switches.size) query.set("off", [...state.switches].join(","));
  if (state.digits !== content.digits) query.set("digits", String(state.digits));
  const edits = [...state.edits].flatMap(([key, own]) =>
    [...own].map(([flat, value]) => `${key}|${flat}|${exactly(value)}`),
  );
  if (edits.length) query.set("set", edits.join(";"));
  try {
    const hash = query.toString();
    if (location.hash.slice(1) !== hash) history.pushState({ trail: state.trail }, "", `#${hash}`);
  } catch {
    // a page without an address of its own, such as one in a notebook
  }
}

// What a link says; whatever does not fit this page is passed over.
export function recall() {
  const query = new URLSearchParams(location.hash.slice(1));
  const whole = (name, most) => {
    const number = Number(query.get(name) ?? 0);
    return Number.isInteger(number) && number >= 0 && number < most ? number : 0;
  };
  state.layer = whole("layer", content.layers.length);
  state.batch = whole("batch", Math.max(1, layer().positions.length));
  state.head = whole("head", layer().sizes.H ?? 1);
  state.digits = (query.has("digits") && whole("digits", 18)) || content.digits;
  state.switches = new Set(
    (query.get("off") ?? "").split(",").filter((name) => layer().switches.includes(name)),
  );
  state.edits = new Map();
  for (const edit of (query.get("set") ?? "").split(";").filter(Boolean)) {
    const [number, name, part, flat, written = ""] = edit.split("|");
    const entry = carried.editable(number, name, part);
    const [at, value] = [Number(flat), parseNumber(written)];
    const inside = entry && Number.isInteger(at) && at >= 0 && at < entry.count;
    if (!inside || value === null || (name === "mask" && value !== 0 && value !== 1)) continue;
    const key = `${number}|${name}|${part}`;
    state.edits.set(key, (state.edits.get(key) ?? new Map()).set(at, value));
  }
  refresh();
  const [step, places] = (query.get("cell") ?? "").split(":");
  const cell = { step, index: places ? places.split(",").map(Number) : [] };
  const sound =
    cell.index.every((n) => Number.isInteger(n) && n >= 0) &&
    fitsNow(cell) &&
    carried.isExact(state.layer, state.batch, state.head);
  state.cell = sound ? cell : null;
  state.trail = sound ? (history.state?.trail ?? [cell]) : [];
}
