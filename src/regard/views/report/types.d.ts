// What the modules of the page share and JSDoc names: for `tsc -p` in this folder, never shipped.
// No import or export: the names are global.

/** A cell of a step, the head first if the step has one. */
interface Cell {
  step: string;
  index: number[];
}

/** A step on the page: where its numbers are, and what its table or picture looks like. */
interface View {
  name: string;
  step: any;
  own: number | null; // the head
  block: any;
  rows: number;
  columns: number;
  rowLabels: string[];
  columnLabels: string[];
  notes: string[];
  small: boolean;
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
  near?: boolean; // a picture in view
  drawn?: boolean;
  view?: { draw(): void };
}

interface Window {
  regard: object;
}
