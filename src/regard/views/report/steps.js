// The steps on the page, under their headings: taken over from the file, or built anew when other
// steps are shown.

import { isHead } from "./attention.js";
import { find, h, main, typeset } from "./elements.js";
import { carried, content, layer, runs, shown, state } from "./shown.js";
import { fillTable, formOf, makeGrid, viewOf } from "./tables.js";
import { addPicture, pooledHead } from "./large.js";
import { buildSummary, dropSummary, fillSummary } from "./summary.js";

function sectionsOf() {
  const own = layer();
  const listed = new Map(
    own.sections.flatMap(({ title, steps }) => steps.map((name) => [name, title])),
  );
  const sections = new Map(own.sections.map(({ title }) => [title, []]));
  const aside = [];
  let title = own.sections[0]?.title ?? "";
  for (const name of runs.now.steps.keys()) {
    if (own.beside?.[name]) continue;
    const unlisted = ["width", "scale", "visible"].includes(name) && !listed.has(name);
    if (own.aside.includes(name) || unlisted) aside.push(name);
    else {
      title = listed.get(name) ?? title;
      sections.get(title).push(name);
    }
  }
  return { sections, aside };
}

function sizeOf({ step, rows, columns }) {
  const axes = step.axes.filter((axis) => !isHead(axis));
  if (!axes.length) return "one number";
  return axes.length === 2 ? `${rows} × ${columns}` : String(Math.max(rows, columns));
}

// The sentences of the file, where the step is as the file has it.
function wordsOf(name) {
  const words = layer().words[`${state.batch}/${state.head}`]?.[name] ?? [];
  const id = runs.now.ids.find((one) => carried.declarations[one].name === name);
  if (!words.length || !runs.plain.ids.includes(id)) return [];
  return [h("p.words", words.map((one) => content.sentences[one]).join(" "))];
}

function sectionFor(name) {
  const view = viewOf(name);
  const formula = view.given ? "given" : view.step.formula;
  view.section = h(
    view.small ? "section.step" : "section.step.wide",
    { "data-step": name },
    h(
      "h3",
      h("span.name", name),
      " ",
      h("span.formula", typeset(formula)),
      " ",
      h("span.shape", sizeOf(view)),
    ),
  );
  if (view.small) {
    fillTable(view);
    view.section.append(h("div.sheet", view.table));
  } else addPicture(view);
  view.section.append(...wordsOf(name));
  shown.set(name, view);
  return view.section;
}

// A step with its gradient beside it.
function groupFor(name) {
  const { beside = {} } = layer();
  const own = Object.keys(beside).filter((one) => beside[one] === name && runs.now.steps.has(one));
  return own.length ? h("div.pair", [name, ...own].map(sectionFor)) : sectionFor(name);
}

export function build() {
  for (const view of shown.values()) view.picture?.stop();
  shown.clear();
  for (const old of main.querySelectorAll(".part:not(.figures, .checks)")) old.remove();
  if (!carried.isExact(state.layer, state.batch, state.head)) {
    main.append(pooledHead());
    dropSummary();
    return;
  }
  const { sections, aside } = sectionsOf();
  for (const [title, names] of sections)
    if (names.length) main.append(partOf("section.part", h("h2", title), lanesOf(names)));
  const others = aside.map((name) => h("div.lane", groupFor(name)));
  if (others.length)
    main.append(partOf("details.part.aside", h("summary", "The other steps"), others));
  buildSummary();
}

const partOf = (kind, title, lanes) => h(kind, title, h("div.steps", lanes));

// Steps in lanes: those of one lane are shown below each other, lanes side by side.
function lanesOf(names) {
  const lanes = new Map();
  for (const name of names) {
    const lane = layer().lanes[name] ?? name;
    lanes.set(lane, [...(lanes.get(lane) ?? []), groupFor(name)]);
  }
  return [...lanes.values()].map((sections) => h("div.lane", sections));
}

// Make the tables that are in the file interactive.
export function adopt() {
  for (const section of main.querySelectorAll(".step")) {
    const view = viewOf(section.dataset.step);
    view.section = section;
    view.table = find("table", section);
    if (view.small) {
      view.table.dataset.form = formOf(view);
      makeGrid(view);
      fillTable(view);
    } else {
      for (const old of section.querySelectorAll(".sheet, .left, .words")) old.remove();
      view.table = null;
      addPicture(view);
      section.append(...wordsOf(view.name));
    }
    shown.set(view.name, view);
  }
  fillSummary(true);
}
