// Which keys are hidden, and by which rule: the same answers, in the same words, as regard/masks.py.
// Must not know numbers or the page.

// What one rule says about one query, which is at `place.position`, and one key, as regard/masks.py
// does; the cells of the tables in `place.turned` are taken for their opposite.
export function judge(rule, place) {
  const { query, key, position: own } = place;
  const say = (visible, detail, parts = []) => ({ rule: rule.name, visible, detail, parts });
  const parts = rule.parts?.map((part) => judge(part, place));
  switch (rule.kind) {
    case "causal":
      return say(key <= own, `key ${key} ${key <= own ? "≤" : ">"} position ${own}`);
    case "window": {
      const first = rule.left === null ? -Infinity : own - rule.left;
      const last = rule.right === null ? Infinity : own + rule.right;
      const inside = first <= key && key <= last;
      const range = `${rule.left === null ? "…" : first} to ${rule.right === null ? "…" : last}`;
      return say(inside, `key ${key} is ${inside ? "inside" : "outside"} ${range}`);
    }
    case "lengths": {
      const length = broadcast(rule.lengths, place.batch);
      const among = key < length;
      return say(among, `key ${key} is ${among ? "among" : "after"} the first ${length}`);
    }
    case "segments": {
      const mine = broadcast(rule.query, [...place.batch, query]);
      const its = broadcast(rule.key, [...place.batch, key]);
      return say(mine === its, `query in segment ${mine}, key in segment ${its}`);
    }
    case "cells": {
      const stated = broadcast(rule.cells, [...place.batch, place.head, query, key]) !== 0;
      const visible = stated !== (place.turned?.includes(rule) ?? false);
      return { ...say(visible, visible ? rule.seen : rule.unseen), table: true };
    }
    case "bias": {
      const { axes } = place.run.steps.get("bias");
      const at = { H: place.head, L: query, S: key };
      const index = axes.map((axis) => at[axis]);
      const visible = place.run.value("bias", index) !== -Infinity;
      return say(visible, visible ? "the bias is not −inf here" : "the bias is −inf here");
    }
    case "all": {
      const every = parts.every((part) => part.visible);
      return say(every, "every rule must agree", parts);
    }
    case "any": {
      const some = parts.some((part) => part.visible);
      return say(some, "one rule is enough", parts);
    }
    case "not": {
      const inner = judge(rule.part, place);
      const found = leaves(inner);
      const words = ({ rule, visible, detail }) =>
        `${rule} ${visible ? "visible" : "hidden"} (${detail})`;
      const detail = found.length > 1 ? found.map(words).join(", ") : found[0].detail;
      return say(!inner.visible, `the opposite of: ${detail}`);
    }
  }
  throw new Error(`no such rule: ${rule.kind}`);
}

// A cell of an array that is broadcast, aligned from the right.
const broadcast = (array, index) => array.data[flatten(array.shape, index)];

function flatten(shape, index) {
  const own = index.slice(index.length - shape.length);
  return shape.reduce((flat, size, k) => flat * size + (size === 1 ? 0 : own[k]), 0);
}

// The tables of yes and no among the rules, in order.
export function tablesOf(rule) {
  if (rule?.kind === "cells") return [rule];
  return rule ? [...(rule.parts ?? []), ...(rule.part ? [rule.part] : [])].flatMap(tablesOf) : [];
}

// The cells of tables that, turned, show a hidden key or hide a visible one: of one table if that is
// enough, of every table if it takes all of them, of none if other rules decide.
export function turnsOf(rules, place) {
  const tables = tablesOf(rules);
  const visible = tables.length > 0 && judge(rules, place).visible;
  const turned = [...tables.map((table) => [table]), tables].find(
    (some) => some.length && judge(rules, { ...place, turned: some }).visible !== visible,
  );
  const index = [...place.batch, place.head, place.query, place.key];
  return (turned ?? []).map((table) => {
    const flat = flatten(table.cells.shape, index);
    return { table, place: { key: table.key, flat }, value: table.cells.data[flat] ? 0 : 1 };
  });
}

export function leaves(verdict) {
  return verdict.parts.length ? verdict.parts.flatMap(leaves) : [verdict];
}

export function hiddenBy(verdict) {
  if (verdict.visible) return [];
  const names = [...new Set(verdict.parts.flatMap(hiddenBy))];
  return names.length ? names : [verdict.rule];
}
