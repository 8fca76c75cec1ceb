/** What changes while one looks at it: polls, and tables and figures that are updated in place. */
import { h, printable, terms } from "page/dom.js";

const PAUSE_MS = 2000;
const LONGEST_PAUSE_MS = 30_000;
const SHOWN_CHARACTERS = 300;
/** Titles of elements are cut to so many characters. */
export const TITLE_CHARACTERS = 2000;

/**
 * Call `step` now and then every 2 seconds while the tab is visible. If steps are slow, the pauses are longer, so that
 * a page that is left open costs the server little. The first step, which may read more, does not count.
 * @param {() => Promise<void>} step
 * @param {(error: Error|null) => void} done - called after each step
 * @param {AbortSignal} signal - ends it
 */
export function poll(step, done, signal) {
  let timer = 0;
  let isRunning = false;
  let pause = 0;
  async function run() {
    clearTimeout(timer);
    if (signal.aborted || isRunning || document.hidden) return;
    isRunning = true;
    const begun = performance.now();
    const error = await step().then(() => null, (reason) => reason);
    isRunning = false;
    if (signal.aborted) return;
    done(error);
    pause = Math.max(PAUSE_MS, pause && Math.min(LONGEST_PAUSE_MS, 4 * (performance.now() - begun)));
    timer = setTimeout(run, pause);
  }
  document.addEventListener("visibilitychange", run, { signal });
  run();
}

/**
 * A line for the error of the last step, announced once.
 * @returns {{element: HTMLElement, show: (error: Error|null) => void}}
 */
export function errorLine() {
  const element = h("p.error.live-error", { role: "alert" });
  // fetch() reports a server that cannot be reached as a TypeError, with a text for developers.
  const away = "The server cannot be reached.";
  const textOf = (error) => (error instanceof TypeError ? away : error.message);
  return { element, show: (error) => setText(element, error ? textOf(error) : "") };
}

/**
 * Named numbers in a row.
 * @param {string} label - for screen readers
 * @param {string[]} names
 * @returns {{element: HTMLElement, show: Function}} `show(name, value, more, kind, title)`: `more` is beside the value
 */
export function figures(label, names) {
  const values = new Map(names.map((name) => [name, { value: h("span", {}, "–"), more: h("span.quiet") }]));
  const rows = [...values].map(([name, { value, more }]) => [name, [value, " ", more]]);
  const show = (name, value, more = "", kind = "", title = "") => {
    const parts = values.get(name);
    setText(parts.value, value);
    setText(parts.more, more);
    parts.value.className = kind;
    parts.value.title = title;
  };
  return { element: h("dl.live-figures", { role: "group", "aria-label": label }, terms(rows)), show };
}

/** Set the text of an element. An equal text keeps its node, and with it a selection. */
export function setText(element, text) {
  const shown = printable(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/**
 * A table of items whose rows keep their elements from one `show` to the next.
 *
 * @typedef {{text: string, title?: string, href?: string, kind?: string}} Cell - `kind` is a class of the cell
 * @typedef {{name: string, label: string, title?: string, show: (item: Object) => Cell}} Column - its cells have the
 *   class `live-NAME`
 */
export class LiveTable {
  /** @param {string} caption - for screen readers @param {Column[]} columns @param {(item: Object) => string} keyOf */
  constructor(caption, columns, keyOf) {
    this.columns = columns;
    this.keyOf = keyOf;
    /** @type {Map<string, HTMLTableRowElement>} */
    this.rows = new Map();
    this.body = h("tbody");
    const heading = ({ name, label, title }) => h(`th.live-${name}`, { scope: "col", title }, label);
    const head = h("thead", {}, h("tr", {}, columns.map(heading)));
    this.element = h("table.live", {}, h("caption.live-hidden", {}, caption), head, this.body);
  }

  /** Show items, in this order. @param {Object[]} items */
  show(items) {
    const keys = new Set(items.map(this.keyOf));
    const focused = this._focusedIndex();
    for (const [key, row] of this.rows) {
      if (keys.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
    items.forEach((item, index) => {
      const row = this._row(this.keyOf(item));
      // A row that stays where it is must not be moved: moving it would drop the focus and the selection in it.
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
      this.columns.forEach((column, at) => showCell(row.cells[at], column, column.show(item)));
    });
    if (focused >= 0 && this._focusedIndex() < 0) this._focus(focused);
  }

  /**
   * Move with j and k through the rows, and with the arrow keys while the focus is in the table.
   * @param {AbortSignal} signal - ends it
   */
  listenToKeys(signal) {
    addEventListener("keydown", (event) => {
      if (isForElsewhere(event)) return;
      const index = this._focusedIndex();
      const arrows = index < 0 ? {} : { ArrowDown: 1, ArrowUp: -1 };
      const step = { j: 1, k: -1, ...arrows }[event.key];
      if (!step) return;
      event.preventDefault();
      this._focus(index < 0 ? 0 : index + step);
    }, { signal });
  }

  _row(key) {
    if (!this.rows.has(key)) {
      this.rows.set(key, h("tr", {}, this.columns.map(({ name }) => h(`td.live-${name}`))));
    }
    return this.rows.get(key);
  }

  _focusedIndex() {
    return [...this.body.children].findIndex((row) => row.contains(document.activeElement));
  }

  _focus(index) {
    const rows = this.body.children;
    rows[Math.max(0, Math.min(index, rows.length - 1))]?.querySelector("a")?.focus();
  }
}

/** Whether a key is typed into a field, or is a shortcut of the browser. @param {KeyboardEvent} event */
export function isForElsewhere(event) {
  const isTyped = Boolean(event.target.closest?.("input, select, textarea, dialog"));
  return isTyped || event.ctrlKey || event.metaKey || event.altKey;
}

function showCell(cell, column, { text, title = "", href = "", kind = "" }) {
  const isLink = cell.firstChild?.localName === "a";
  if (!cell.firstChild || isLink !== Boolean(href)) cell.replaceChildren(h(href ? "a" : "span"));
  const inner = cell.firstChild;
  setText(inner, text.slice(0, SHOWN_CHARACTERS));
  if (href && inner.getAttribute("href") !== href) inner.href = href;
  const shown = printable(title.slice(0, TITLE_CHARACTERS));
  if (cell.title !== shown) cell.title = shown;
  const names = `live-${column.name} ${kind}`.trim();
  if (cell.className !== names) cell.className = names;
}
