/** A group of rollouts of one prompt, side by side. */
import { h } from "page/dom.js";

/** @returns {{title: string, element: HTMLElement, close: () => void}} */
export function groupPage(source, id) {
  return { title: `Group ${id}`, element: h("section"), close: () => {} };
}
