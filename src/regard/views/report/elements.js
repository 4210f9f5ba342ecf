// The parts of the page, and the small tools to make more. Text from outside reaches the page through
// textContent alone.

import { cut } from "./derivation.js";

export const find = (selector, root = document) => root.querySelector(selector);
export const main = find("#steps");
export const stage = find("#stage");
export const why = find("#why");
export const tools = find(".tools");
export const gallery = find(".gallery");

// An element: h("p.words", { title: "…" }, children); empty texts, null and false are left out.
export function h(name, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const properties = children[0]?.constructor === Object ? children.shift() : {};
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== "") element.setAttribute(key, value);
  }
  element.append(...present(children));
  return element;
}

const present = (children) => children.flat(Infinity).filter(Boolean);

export const fill = (element, ...children) => element.replaceChildren(...present(children));

const pen = /** @type {any} */ (document.createElement("canvas").getContext("2d"));

// How many pixels a text is wide.
export function widthOf(text, size, family = getComputedStyle(stage).fontFamily) {
  pen.font = `${size}px ${family}`;
  return pen.measureText(text).width;
}

export const bdi = (text) => h("bdi", text);

export const button = (words, onclick, properties = {}) =>
  h("button", { type: "button", onclick, ...properties }, words);

export const colHead = (...words) => h("th", { scope: "col" }, words);
export const rowHead = (...words) => h("th", { scope: "row" }, words);

// A table of these head cells, rows and rows at its end, each a list of cells.
export function table(caption, heads, rows, ends = []) {
  const listed = (all) => all.map((cells) => h("tr", cells));
  return h(
    "table",
    h("caption", caption),
    h("thead", listed([heads])),
    h("tbody", listed(rows)),
    ends.length > 0 && h("tfoot", listed(ends)),
  );
}

// What is too wide or too long for the page can be scrolled, with keys too.
export const scrolled = (words, kind, made) =>
  h(kind, { tabindex: 0, role: "region", "aria-label": words }, made);

// Variables, and what is below one: q of W_q, V of dX_V, K_n of dK_K_n. The d of dX is upright.
const LETTERS =
  /((?:(?<![A-Za-z_])(?!d[α-ω‖])|(?<=\bd))[A-Zb-z](?![A-Za-z])|_(?:[a-z]|[A-Z](?:_[a-z])?[*′]*|‖[A-Z]‖))/;

// A formula with its letters as letters of mathematics.
export const typeset = (formula) =>
  formula.split(LETTERS).map((part, k) => {
    if (k % 2 === 0) return part;
    const [letter, ...below] = part.split("_");
    return letter ? h("var", letter) : below.reduceRight((more, one) => h("sub", one, more), "");
  });

export function nameOf(symbol, labels) {
  const name = cut(labels.join(", "), 120);
  return [h("span.symbol", typeset(symbol)), labels.length > 0 && bdi(`[${name}]`)];
}

// The namespace of SVG, as the parser knows it: no page names an address.
/** @type {any} */
const empty = document.createRange().createContextualFragment("<svg/>").firstElementChild;

export function svg(name, properties, ...children) {
  const element = document.createElementNS(empty.namespaceURI, name);
  for (const [key, value] of Object.entries(properties)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}
