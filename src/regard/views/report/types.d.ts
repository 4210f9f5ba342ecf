// What the modules of the page share and JSDoc names: for `tsc -p` in this folder, never shipped.
// No import or export: the names are global.

/** A cell of a step, the head first if the step has one. */
interface Cell {
  step: string;
  index: number[];
}

/** A station on the page: where its numbers are, and what it looks like. */
interface View {
  name: string;
  step: any;
  own: number | null; // the head
  block: any;
  rows: number;
  columns: number;
  down: any; // the names of its rows: {size, labels, axis}
  right: any; // and of its columns
  big: boolean;
  given: boolean;
  index: (row: number, column: number) => number[];
  [part: string]: any; // its elements
}

/** What hides one key of one query, as `judge` says it. */
interface Verdict {
  rule: string;
  visible: boolean;
  detail: string;
  [part: string]: any;
}

/** What the page puts on its elements. */
interface Element {
  place?: any; // a cell of a table, or a choice of the gallery
  pair?: number[]; // of a band, the places of its words
}

interface Window {
  regard: object;
}
