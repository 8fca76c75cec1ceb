import { h } from "page/dom.js";

/** @param {import("page/rollout.js").View} view */
export function timelinePart(view) {
  return { element: h("section"), update() {}, selected() {} };
}
