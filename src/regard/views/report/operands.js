// The numbers that made the open one, each a button: in a line with signs, or one term below another.

import { formatNumber } from "./numbers.js";
import { cellName, cut, pieces, shownTerms } from "./derivation.js";
import { bdi, button, colHead, h, nameOf, rowHead, table, typeset } from "./elements.js";
import { doing, state } from "./shown.js";
import { placeOf } from "./stations.js";

const MOST_ROWS = 48; // before the smaller ones are put together

// A name with its labels cut, to go with a number.
export const shortName = ({ symbol, labels }, length) =>
  nameOf(
    symbol,
    labels.map((label) => cut(label, length)),
  );

// Which outline each operand has: the first factors solid, the second ones dashed.
export function sidesOf({ operands, terms }) {
  const sides = operands.map((_, k) => (k ? "second" : "first"));
  for (const term of terms)
    for (const [k, number] of term.operands.entries()) sides[number] = k ? "second" : "first";
  return sides;
}

// `side`: its outline; `named`: whether its name goes before its number.
export function operandButton(operand, side, named) {
  const { step, index, symbol, labels, value } = operand;
  const open = (event) =>
    doing.open({ step, index }, { focus: event.detail ? "heading" : "operand" });
  const point = (on) => () => placeOf(operand)?.cell?.classList.toggle("pointed", on);
  return button(
    [named && h("small", shortName(operand, 24), " = "), formatNumber(value)],
    open,
    {
      class: `operand ${side}`,
      "aria-label": `${cellName(symbol, labels)} = ${formatNumber(value)}`,
      onfocus: point(true),
      onmouseenter: point(true),
      onblur: point(false),
      onmouseleave: point(false),
    },
  );
}

// A sign and the operand after it stay in one line.
const joined = (sign, operand) => h("span.after", sign, operand);

export function equation(found) {
  const sides = sidesOf(found);
  const one = (k) => operandButton(found.operands[k], sides[k], true);
  const parts = pieces(found); // texts, with an operand between each two
  const last = parts.length - 1;
  const made = parts.map((part, k) => {
    if (k % 2) return k === 1 ? one(part) : joined(parts[k - 1].trim(), one(part));
    return k === 0 || k === last ? part : "";
  });
  return h("div.sum", made);
}

// The terms of a sum or a largest number; where they are many, only the larger ones.
export function termTable(found) {
  const { step, operands, terms, value } = found;
  const sides = sidesOf(found);
  const symbols = terms[0].operands.map((k) => operands[k].symbol);
  const pair = symbols.length > 1;
  const sign = (text) => h("td.sign", text);
  // A product has a sign between its factors; another term has its operands side by side.
  const between = step.operation.term ? "" : "×";
  const cells = (row, equals, last) => [
    row[0],
    row.slice(1).map((cell) => [between ? sign(equals ? between : "") : null, cell]),
    pair && [sign(equals), last],
  ];
  const { kept, rest } = shownTerms(found, state.all ? Infinity : MOST_ROWS);
  const rows = kept.map((term) => {
    const factors = term.operands.map((k) => h("td", operandButton(operands[k], sides[k], false)));
    const product = h("td", formatNumber(term.value));
    return [rowHead(bdi(cut(term.label, 40))), cells(factors, "=", product)];
  });
  const columns = symbols.length * (between ? 2 : 1) + (between ? 0 : 1) + 1;
  const wide = (words) => h("th", { scope: "row", colspan: pair ? columns : 1 }, words);
  if (rest) {
    const showAll = () => {
      state.all = true;
      doing.show("heading");
    };
    rows.push([wide(button(rest.label, showAll)), h("td", formatNumber(rest.value))]);
  }
  const whole = between ? symbols.join("·") : "term";
  const head = [h("td"), cells(symbols.map((one) => colHead(typeset(one))), "", colHead(typeset(whole)))];
  const end = [wide(step.operation.total), h("td", formatNumber(value))];
  const kind = symbols.length > 2 ? "div.terms.many" : "div.terms";
  return h(kind, table("terms", head, rows, [end]));
}
