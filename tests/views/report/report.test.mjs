// The parts of the page that know no page: `node --test tests/views/report/`. What they compute is compared with
// Python, cell by cell, in test_report_script.py.

import assert from "node:assert/strict";
import { test } from "node:test";

const folder = process.env.REGARD_SCRIPTS ?? new URL("../../../src/regard/views/report", import.meta.url);
const take = (name) => import(`${folder}/${name}.js`);
const { floatsOf, formatNumber } = await take("numbers");
const { Run, indexMap } = await take("attention");
const { cellName, cut } = await take("derivation");
const { hiddenBy, judge, leaves, turnsOf } = await take("visibility");
const { moments, spread } = await take("figures");
const { dotsOf } = await take("pictures");
const { readNudge, readRate, trouble } = await take("descent");

test("an index map is read as Python reads it", () => {
  const sizes = { H: 6, G: 2, D: 4, E: 5 };
  assert.equal(indexMap("h//(H//G)")({ h: 5 }, sizes), 1);
  assert.equal(indexMap("h*D+d")({ h: 2, d: 3 }, sizes), 11);
  assert.equal(indexMap("c%E")({ c: 13 }, sizes), 3);
  assert.equal(indexMap("c//E")({ c: 13 }, sizes), 2);
});

test("half floats and bits come back", () => {
  const bytes = new Uint8Array([0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00, 0x00, 0x7c, 0b101, 0, 0, 0]);
  const half = floatsOf(bytes, { dtype: "f2", at: 0, count: 4 });
  assert.deepEqual([...half], [1, -2, 2 ** -24, Infinity]);
  assert.deepEqual([...floatsOf(bytes, { dtype: "bit", at: 8, count: 3 })], [1, 0, 1]);
});

test("an exact half is rounded to even", () => {
  assert.equal(formatNumber(1 / 512, 8), "0.00195312");
  assert.equal(formatNumber(0.30004505, 4), "0.3000");
});

test("rules combine, and the ones that hide are named", () => {
  const causal = { kind: "causal", name: "causal" };
  const window = { kind: "window", name: "window", left: 0, right: null };
  const both = { kind: "all", name: "all of", parts: [causal, window] };
  const place = { query: 2, key: 3, position: 2, batch: [], head: 0 };
  assert.deepEqual(hiddenBy(judge(both, place)), ["causal"]);
  assert.deepEqual(hiddenBy(judge(both, { ...place, key: 2 })), []);
  assert.equal(leaves(judge(both, place)).length, 2);
  const not = judge({ kind: "not", name: "not causal", part: causal }, place);
  assert.equal(not.visible, true);
});

test("a cell of a given table is turned where that decides, and no other rule is", () => {
  const table = (name, ...data) => ({
    kind: "cells",
    name,
    key: name,
    cells: { data, shape: [1, 4] },
  });
  const [first, second] = [table("first", 1, 0, 0, 1), table("second", 1, 1, 0, 1)];
  const causal = { kind: "causal", name: "causal" };
  const rules = { kind: "all", name: "all of", parts: [first, { ...causal }, second] };
  const at = (key) =>
    turnsOf(rules, { query: 2, key, position: 2, batch: [], head: 0 }).map(({ place, value }) => [
      place.key,
      place.flat,
      value,
    ]);
  assert.deepEqual(at(0), [["first", 0, 0]]); // visible: one table is enough to hide it
  assert.deepEqual(at(1), [["first", 1, 1]]);
  assert.deepEqual(at(2), [["first", 2, 1], ["second", 2, 1]]); // both hide it
  assert.deepEqual(at(3), []); // causal hides it, whatever the tables say
  const not = { kind: "not", name: "not first", part: first };
  const place = { query: 0, key: 1, position: 0, batch: [], head: 0 };
  assert.equal(judge(not, place).visible, true);
  assert.equal(turnsOf(not, place)[0].value, 1);
  assert.deepEqual(turnsOf(null, place), []);
});

test("statistics pass over hidden cells, and cells that are alike have no variance", () => {
  const alike = Float64Array.from({ length: 10 }, () => 0.1);
  assert.deepEqual(moments([{ values: alike, visible: null }]), [0.1, 0, 0.1, 0.1, 10]);
  const rows = [{ values: [1, 99, 3], visible: [1, 0, 1] }];
  assert.deepEqual(moments(rows), [2, 1, 1, 3, 2]);
  assert.deepEqual(moments([{ values: [5], visible: [0] }]), [NaN, NaN, NaN, NaN, 0]);
  assert.deepEqual(spread([0, 1, 0]), [0, 1, 1, 1]);
  assert.deepEqual(spread([0, 0]), [0, 0, 0, -1]);
  assert.equal(spread([0.25, 0.25, 0.25, 0.25])[1], 4);
});

test("text is cut by characters, not by halves of them", () => {
  assert.equal(cut("👍👍👍", 3), "👍👍👍");
  assert.equal(cut("👍👍👍👍", 3), "👍👍…");
  assert.equal(cellName("P", ["a", "b"]), "P[a, b]");
});

test("a row is computed only when it is asked for", () => {
  const letters = { L: "i", S: "j", D: "d" };
  const steps = [
    { name: "queries", symbol: "Q", axes: ["L", "D"], op: "given", operands: [], over: "all" },
    { name: "keys", symbol: "K", axes: ["S", "D"], op: "given", operands: [], over: "all" },
    {
      name: "scores",
      symbol: "A",
      axes: ["L", "S"],
      op: "dot",
      running: "d",
      over: "all",
      operands: [
        { step: "queries", index: ["i", "d"] },
        { step: "keys", index: ["j", "d"] },
      ],
    },
  ];
  const given = () => Float64Array.from([1, 2, 3, 4]);
  const run = new Run({ steps, sizes: { L: 2, S: 2, D: 2 }, letters }, given);
  assert.equal(run.value("scores", [1, 0]), 11);
  assert.deepEqual([...run.block("scores", 0).held], [-1, 1]);
});

test("of a long step only the latest rows stay, and any row can be asked for again", () => {
  const [L, S] = [3000, 2000];
  const index = { queries: ["i", "d"], keys: ["j", "d"] };
  const declare = (name, axes, op, operands = [], running = "") => ({
    name,
    symbol: name,
    axes,
    op,
    running,
    operands,
    over: "all",
  });
  const steps = [
    declare("queries", ["L", "D"], "given"),
    declare("keys", ["S", "D"], "given"),
    declare(
      "scores",
      ["L", "S"],
      "dot",
      Object.entries(index).map(([step, index]) => ({ step, index })),
      "d",
    ),
    declare("row_sums", ["L"], "sum", [{ step: "scores", index: ["i", "j"] }], "j"),
  ];
  const given = (name) => Float64Array.from({ length: name === "queries" ? L : S }, (_, k) => k);
  const run = new Run({ steps, sizes: { L, S, D: 1 }, letters: { L: "i", S: "j", D: "d" } }, given);
  const total = (S * (S - 1)) / 2;
  for (const i of [2999, 5, 69, 133, 5]) assert.equal(run.value("row_sums", [i]), i * total);
  for (const i of [69, 5, 2999]) assert.equal(run.value("scores", [i, 7]), 7 * i);
  assert.equal(run.block("scores", 0).data.length, 64 * S);
});

test("a long side is pooled", () => {
  assert.deepEqual(dotsOf(10, 4096), { tall: 1, broad: 4, rows: 10, columns: 1024 });
});

test("a rate or a change that makes no sense is answered with what would", () => {
  assert.deepEqual(readRate(" 0,5 "), { rate: 0.5 });
  for (const text of ["0", "-0.1", "fast", "", "inf", "nan"])
    assert.match(readRate(text).wrong, /such as 0\.1|as in 0\.1/, text);
  assert.deepEqual(readNudge("-1e-3"), { by: -0.001 });
  for (const text of ["0", "a little", "", "inf", "nan"])
    assert.match(readNudge(text).wrong, /as in 0\.01/, text);
});

test("a loss that diverges or overflows is said with its numbers", () => {
  assert.equal(trouble([1, 0.5, 0.6, 0.4]), "");
  assert.match(trouble([1, 0.5, 0.6, 0.7, 0.8, 0.9, 1]), /diverges: it rose from 0\.5 to 1\./);
  assert.match(trouble([1, 101]), /diverges: it rose from 1 to 101\./);
  assert.match(trouble([0.123456789, 72981.412348]), /from 0\.123457 to 72981\.4\./);
  assert.match(trouble([1, Infinity]), /overflows: after 1 step it is ∞\./);
  assert.match(trouble([1, 2, NaN]), /overflows: after 2 steps it is NaN\./);
  assert.match(trouble([NaN]), /is NaN, so there is no slope/);
});
