import { h } from "page/dom.js";

/** @param {import("page/rollout.js").View} view */
export function messagesPart(view) {
  return { element: h("section"), update() {}, selected() {} };
}
