// Which keys are hidden, and by which rule: the same answers, in the same words, as regard/masks.py.
// Must not know numbers or the page.

// What one rule says about one query and one key, as regard/masks.py does.
export function judge(rule, place) {
  const { query, key, offset } = place;
  const own = query + offset;
  const say = (visible, detail, parts = []) => ({ rule: rule.name, visible, detail, parts });
  switch (rule.kind) {
    case "causal":
      return say(key <= own, `key ${key} ${key <= own ? "≤" : ">"} position ${own}`);
    case "window": {
      const [first, last] = [
        rule.left === null ? -Infinity : own - rule.left,
        rule.right === null ? Infinity : own + rule.right,
      ];
      const inside = first <= key && key <= last;
      const range = `${rule.left === null ? "…" : first} to ${rule.right === null ? "…" : last}`;
      return say(inside, `key ${key} is ${inside ? "inside" : "outside"} ${range}`);
    }
    case "lengths": {
      const length = broadcast(rule.lengths, place.batch);
      return say(
        key < length,
        `key ${key} is ${key < length ? "among" : "after"} the first ${length}`,
      );
    }
    case "segments": {
      const [mine, its] = [
        broadcast(rule.query, [...place.batch, query]),
        broadcast(rule.key, [...place.batch, key]),
      ];
      return say(mine === its, `query in segment ${mine}, key in segment ${its}`);
    }
    case "cells": {
      const visible = broadcast(rule.cells, [...place.batch, place.head, query, key]) !== 0;
      return say(visible, visible ? rule.seen : rule.unseen);
    }
    case "bias": {
      const { axes } = place.run.steps.get("bias");
      const at = { H: place.head, L: query, S: key };
      const visible =
        place.run.value(
          "bias",
          axes.map((axis) => at[axis]),
        ) !== -Infinity;
      return say(visible, visible ? "the bias is not −inf here" : "the bias is −inf here");
    }
    case "all":
    case "any": {
      const parts = rule.parts.map((part) => judge(part, place));
      const visible =
        rule.kind === "all"
          ? parts.every((part) => part.visible)
          : parts.some((part) => part.visible);
      return say(
        visible,
        rule.kind === "all" ? "every rule must agree" : "one rule is enough",
        parts,
      );
    }
    case "not": {
      const inner = judge(rule.part, place);
      const found = leaves(inner);
      const detail =
        found.length > 1
          ? found
              .map((leaf) => `${leaf.rule} ${leaf.visible ? "visible" : "hidden"} (${leaf.detail})`)
              .join(", ")
          : found[0].detail;
      return say(!inner.visible, `the opposite of: ${detail}`);
    }
  }
  throw new Error(`no such rule: ${rule.kind}`);
}

// A cell of an array that is broadcast, aligned from the right.
function broadcast({ data, shape }, index) {
  const own = index.slice(index.length - shape.length);
  let flat = 0;
  for (const [k, size] of shape.entries()) flat = flat * size + (size === 1 ? 0 : own[k]);
  return data[flat];
}

export function leaves(verdict) {
  return verdict.parts.length ? verdict.parts.flatMap(leaves) : [verdict];
}

export function hiddenBy(verdict) {
  if (verdict.visible) return [];
  const names = [...new Set(verdict.parts.flatMap(hiddenBy))];
  return names.length ? names : [verdict.rule];
}
