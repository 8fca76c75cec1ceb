/** The list of rollouts. */
import { h } from "page/dom.js";

/**
 * @param {Object} source - where rollouts come from
 * @param {URLSearchParams} parameters - filters of the link
 * @returns {{title: string, element: HTMLElement, close: () => void}}
 */
export function listPage(source, parameters) {
  return { title: "Rollouts", element: h("section"), close: () => {} };
}
