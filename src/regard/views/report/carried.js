// What the file carries: arrays, labels and declarations; and from these, with what a reader has
// switched and edited, a run of the steps. Must not know the page.

import { bytesOf, floatsOf } from "./numbers.js";
import { Run } from "./attention.js";
import { tablesOf } from "./visibility.js";

const BY_HAND = "own"; // the part of an edit that a reader's own mask has
const countOf = ({ sizes }) => (sizes.L ?? 1) * sizes.S;

const listOf = (text, separator) => (text ? text.split(separator) : []);

// A declared step, as `_declaration` in json_data.py wrote it.
function stepOf([name, symbol, formula, op, axes, made = "", running = "", over = "", of = "", phase, latex]) {
  const operands = listOf(made, " ").map((ref) => {
    const [step, index] = ref.split(":");
    return { step, index: listOf(index, ",") };
  });
  const words = { name, symbol, formula, latex: latex || symbol };
  return { ...words, op, axes: listOf(axes, " "), operands, running, over, of, phase: phase || "forward" };
}

export class Carried {
  constructor(content, base64) {
    this.content = content;
    this.declarations = content.declarations.map(stepOf);
    this.layers = content.layers;
    this.bytes = bytesOf(base64);
    this.decoded = new Map();
    this.named = new Map();
  }

  // The names along an axis of a layer; positions where it has none.
  labels(layer, axis) {
    const key = `${layer}/${axis}`;
    if (!this.named.has(key)) {
      const own = this.layers[layer];
      const given = this.content.labelSets[own.labels[axis]];
      this.named.set(key, given ?? Array.from({ length: own.sizes[axis] }, (_, k) => String(k)));
    }
    return this.named.get(key);
  }

  // One array as float64.
  decode(entry) {
    if (entry.ones) return new Float64Array(entry.count).fill(1);
    const key = `${entry.dtype}${entry.at}/${entry.count}${entry.fill ? "f" : ""}`;
    if (!this.decoded.has(key)) {
      const floats = floatsOf(this.bytes, entry.fill ? { ...entry, count: 1 } : entry);
      this.decoded.set(key, entry.fill ? new Float64Array(entry.count).fill(floats[0]) : floats);
    }
    return this.decoded.get(key);
  }

  // By which key the numbers of one batch element and head are known, or null if they are left out.
  partKey(layer, kind, name, batch, head) {
    const parts = this.layers[layer][kind][name] ?? {};
    return [`${batch}/${head ?? "-"}`, `-/${head ?? "-"}`].find((key) => key in parts) ?? null;
  }

  // Whether a head came with all its numbers.
  isExact(layer, batch, head) {
    const { given, sizes } = this.layers[layer];
    const { H = 1, G = H } = sizes;
    const has = (name, ...heads) =>
      heads.some((own) => this.partKey(layer, "given", name, batch, own) !== null);
    const rows = has("queries", head, null) || has("embeddings", null);
    return rows && (!("keys" in given) || has("keys", Math.floor(head / (H / G)), null));
  }

  // The array that an edit changes: a part of a given step, or the cells of a table among the
  // rules, whose part is its number, or a mask by hand. Undefined if there is none.
  editable(layer, name, part) {
    const own = /^\d+$/.test(layer) ? this.layers[layer] : null;
    if (name === "mask" && part === BY_HAND) return own && { ones: true, count: countOf(own) };
    if (name === "mask") return tablesOf(own?.rules)[part]?.cells;
    const parts = own && Object.hasOwn(own.given, name) ? own.given[name] : {};
    return Object.hasOwn(parts, part) ? parts[part] : undefined;
  }

  // An array with what was edited.
  edited(entry, changes) {
    const data = this.decode(entry);
    if (!changes) return data;
    const copy = data.slice();
    for (const [flat, value] of changes) copy[flat] = value;
    return copy;
  }

  // The numbers of a given step, with what was edited.
  given(layer, batch, name, head, { switches, edits }) {
    if (name === "scale" && switches.has("scale")) return Float64Array.of(1);
    const key = this.partKey(layer, "given", name, batch, head);
    if (key === null) return null;
    const changes = edits.get(`${layer}|${name}|${key}`);
    const data = this.edited(this.layers[layer].given[name][key], changes);
    if (name !== "bias" || !switches.has("mask")) return data;
    return data.map((value) => (value === -Infinity ? 0 : value));
  }

  // A run of one batch element; `known` lets it take the numbers that were computed beforehand.
  run({ layer, batch }, { switches = new Set(), edits = new Map(), known = false } = {}) {
    const own = this.layers[layer];
    const rules = this.rules(layer, batch, { switches, edits });
    const bits = [...switches].reduce(
      (sum, name) => sum + (this.content.bits[name] ?? 0),
      rules ? this.content.masked : 0,
    );
    const ids = own.steps.flatMap(([id, deciding, value]) => ((bits & deciding) === value ? [id] : []));
    const copies = new Map();
    const given = (name, head) => {
      const key = `${name}/${head}`;
      if (!copies.has(key))
        copies.set(key, this.given(layer, batch, name, head, { switches, edits }));
      return copies.get(key);
    };
    const computed = (name, head) => {
      const key = known ? this.partKey(layer, "known", name, batch, head) : null;
      return key === null ? null : this.decode(own.known[name][key]);
    };
    const steps = ids.map((id) => this.declarations[id]);
    const positions = own.positions[batch] ?? own.positions[0] ?? 0;
    const { letters, operations } = this.content;
    const batches = unravel(batch, own.lead);
    const { S, L = 1 } = own.sizes;
    const table = { name: "mask by hand", cells: { shape: [L, S] } };
    const key = `${layer}|mask|${BY_HAND}`;
    const byHand = (i, j) => ({ table, place: { key, flat: i * S + j }, value: 0 });
    const declared = { steps, sizes: own.sizes, letters, operations, rules, positions, ids };
    return new Run({ ...declared, batch: batches, byHand }, given, computed);
  }

  // What hides keys: the rules of the call, and −∞ wherever the bias has one.
  rules(layer, batch, changed) {
    if (changed.switches.has("mask")) return null;
    const rules = this.filled(this.layers[layer].rules, layer, changed.edits);
    const own = rules?.kind === "all" ? rules.parts : rules ? [rules] : [];
    const parts = [...own, ...this.added(layer, batch, changed)];
    if (parts.length === own.length) return rules;
    return parts.length > 1 ? { kind: "all", name: "all of", parts } : parts[0];
  }

  // What hides keys beside the rules of the call: a switch, a mask by hand, −∞ in the bias.
  added(layer, batch, changed) {
    const { given, sizes } = this.layers[layer];
    const { reach } = this.content;
    const switched = [{ kind: "causal", name: "causal" }, { kind: "window", name: "window", left: reach, right: reach }];
    /** @type {any[]} */
    const found = switched.filter(({ kind }) => changed.switches.has(kind));
    const key = `${layer}|mask|${BY_HAND}`;
    if (changed.edits.has(key)) {
      const data = this.edited({ ones: true, count: countOf(this.layers[layer]) }, changed.edits.get(key));
      const cells = { data, shape: [sizes.L ?? 1, sizes.S] };
      const words = { seen: "visible", unseen: "hidden by hand" };
      found.push({ kind: "cells", name: "mask by hand", key, cells, ...words });
    }
    const hides = Object.keys(given.bias ?? {}).some((part) => {
      const [, own] = part.split("/");
      const head = own === "-" ? null : Number(own);
      return this.given(layer, batch, "bias", head, changed)?.includes(-Infinity);
    });
    return hides ? [...found, { kind: "bias", name: "bias −inf" }] : found;
  }

  // A rule with its arrays; every table has its number.
  filled(rule, layer, edits, count = { tables: 0 }) {
    if (rule === null) return null;
    const made = { ...rule };
    for (const name of ["lengths", "query", "key"]) {
      if (name in rule) made[name] = { data: this.decode(rule[name]), shape: rule[name].shape };
    }
    if (rule.kind === "cells") {
      made.key = `${layer}|mask|${count.tables++}`;
      made.cells = { data: this.edited(rule.cells, edits.get(made.key)), shape: rule.cells.shape };
    }
    if (rule.part) made.part = this.filled(rule.part, layer, edits, count);
    if (rule.parts) made.parts = rule.parts.map((part) => this.filled(part, layer, edits, count));
    return made;
  }
}

function unravel(flat, shape) {
  const index = [];
  for (let k = shape.length - 1; k >= 0; k--) {
    index.unshift(flat % shape[k]);
    flat = Math.floor(flat / shape[k]);
  }
  return index;
}
