/**
 * Building elements and writing values. Text from models and tools is untrusted: it only ever becomes text nodes, with
 * control characters written out.
 */

/**
 * Create an element.
 * @param {string} tag - such as "td" or "button.quiet" (classes follow dots)
 * @param {Object} [properties] - DOM properties; names with a hyphen and `role` are attributes; `on` maps events to
 *   handlers, `data` are the element's data
 * @param {...(Node|string|number|boolean|null|undefined|Array)} children - null, undefined and false are left out
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  element.classList.add(...classes);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "on") Object.entries(value).forEach(([event, handler]) => element.addEventListener(event, handler));
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key.includes("-") || key === "role") element.setAttribute(key, value);
    else element[key] = key === "title" ? printable(value) : value;
  }
  element.append(...nodesOf(children));
  return element;
}

/** Create an element of SVG. Its properties are attributes. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...nodesOf(children));
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...nodesOf(children));
  return element;
}

function nodesOf(children) {
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return shown.map((child) => (child instanceof Node ? child : printable(child)));
}

/**
 * The rows of a definition list. Those without a value are left out.
 * @param {Array} rows - of [term, value, class of the row]
 */
export function terms(rows) {
  const filled = rows.filter((row) => row && row[1] !== null && row[1] !== undefined && row[1] !== "");
  return filled.map(([term, value, className = ""]) => h("div", { className }, h("dt", {}, term), h("dd", {}, value)));
}

/** Show a form in a dialog, which is removed when it closes. @returns {HTMLDialogElement} */
export function openDialog(label, form) {
  const dialog = h("dialog", { "aria-label": label, on: { close: () => dialog.remove() } }, form);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

const CONTROL = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Write out the characters that would hide or reverse other text. */
export function printable(text) {
  return String(text).replace(CONTROL, codeOf);
}

/** @param {string} character @returns {string} such as "⟨U+202E⟩" */
export function codeOf(character) {
  return `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** @template T @param {T[]} items @param {(item: T) => number} valueOf @returns {number} */
export function sum(items, valueOf) {
  return items.reduce((total, item) => total + valueOf(item), 0);
}

const WHOLE = new Intl.NumberFormat("en");

/** @param {number} value @returns {string} such as "12,345" */
export function count(value) {
  return WHOLE.format(value);
}

/** @param {number} value @returns {string} with 4 significant digits, or all of its whole part */
export function decimal(value) {
  return Math.abs(value) >= 1000 ? count(Math.round(value)) : String(Number(value.toPrecision(4)));
}

/** @param {number} ms - milliseconds @returns {string} such as "85 ms", "2.4 s", "3 min 20 s" */
export function duration(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** @param {string|null} time - RFC 3339 @returns {HTMLElement|null} the local time of day; hovering shows the date */
export function clock(time) {
  if (!time) return null;
  const date = new Date(time);
  return h("time", { dateTime: time, title: date.toLocaleString() }, date.toLocaleTimeString());
}

/** Copy text to the clipboard and confirm it on the button for a moment. */
export async function copy(text, button) {
  // Browsers offer the clipboard only to pages that came over HTTPS or from this machine.
  const isCopied = await navigator.clipboard?.writeText(text).then(() => true, () => false) || copyBySelection(text);
  // A second copy soon after the first one finds its confirmation there.
  const label = (button.dataset.label ??= button.textContent);
  button.textContent = isCopied ? "copied" : "not allowed";
  setTimeout(() => (button.textContent = label), 1000);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = h("textarea", { value: text, readOnly: true });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

/** Offer text as a file for download. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Scroll a part of the page, and the part only, so that an element of it can be seen. */
export function reveal(element, scroller) {
  const [inner, outer] = [element.getBoundingClientRect(), scroller.getBoundingClientRect()];
  const [top, bottom] = [Math.max(outer.top, 0) + 40, Math.min(outer.bottom, innerHeight)];
  if (inner.top < top || Math.min(inner.bottom, inner.top + 80) > bottom) scroller.scrollTop += inner.top - top - 20;
}
