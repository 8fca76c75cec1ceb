/** Contents of messages: texts, parts and JSON, folded if they are long. Nothing is ever loaded from a link. */
import { copy, count, fill, h } from "page/dom.js";

const SHORT = 60;
const LINES = 40;
const CHARACTERS = 6000;
// Browsers take seconds to lay out longer texts on one line.
const MOST = 200_000;

/** @param {string|Object[]|null} content - of a message @returns {HTMLElement[]} */
export function contentOf(content) {
  if (content === null || content === undefined || content === "") return [];
  if (typeof content === "string") return [blockOf(content)];
  const isText = (part) => part?.type === "text" && typeof part.text === "string";
  return [content].flat().map((part) => (isText(part) ? blockOf(part.text) : partOf(part)));
}

/** A text; the rest of a long one behind a button. @param {string|null} value @returns {HTMLElement} */
export function blockOf(value) {
  const text = String(value ?? "");
  const lines = text.split("\n");
  const head = lines.slice(0, LINES).join("\n").slice(0, CHARACTERS);
  const block = h("pre.content-text", {}, head);
  if (head.length === text.length) return block;
  const isWhole = text.length <= MOST;
  const height = lines.length > 1 ? `${count(lines.length)} lines, ` : "";
  const label = isWhole ? `Show all ${height}${count(text.length)} characters`
    : `Show ${count(MOST)} of ${count(text.length)} characters`;
  const rest = h("button.content-more", { on: { click: () => copy(text, rest) } }, "Copy the whole text");
  const click = () => {
    fill(block, text.slice(0, MOST));
    more.replaceWith(...(isWhole ? [] : [rest]));
    // The focus was on the button.
    block.tabIndex = -1;
    block.focus({ preventScroll: true });
  };
  const more = h("button.content-more", { on: { click } }, label);
  return h("div", {}, block, more);
}

/** A JSON text, indented if that changes only white space, and as it is otherwise. Copying copies it as it is. */
export function jsonBlock(text) {
  const click = () => copy(text, button);
  const button = h("button.content-copy", { "aria-label": "Copy the JSON", on: { click } }, "copy");
  return h("div.content-json", {}, blockOf(indented(text) ?? text), button);
}

function indented(text) {
  try {
    const value = JSON.parse(text);
    const bare = text.replace(/"(?:[^"\\]|\\.)*"|\s+/g, (found) => (found.startsWith('"') ? found : ""));
    // Large integers, repeated keys and escapes would not survive.
    if (JSON.stringify(value) !== bare) return null;
    return bare.length <= SHORT ? text : JSON.stringify(value, null, 2);
  } catch {
    return null;
  }
}

/** A placeholder for an image, or the JSON of a part of another kind. */
function partOf(part) {
  const source = part?.image_url?.url ?? part?.image_url ?? part?.url;
  if (typeof source !== "string") return jsonBlock(JSON.stringify(part));
  const [, type, encoding] = /^data:([^;,]*)([^,]*),/.exec(source) ?? [];
  const data = source.length - source.indexOf(",") - 1;
  const size = encoding?.includes("base64") ? Math.floor((data * 3) / 4) : data;
  const words = encoding === undefined ? `at ${source.slice(0, 300)} (not loaded)`
    : `${type || "text/plain"}, ${count(size)} bytes`;
  return h("div.content-part", {}, `${part.type ?? "part"}: ${words}`);
}
