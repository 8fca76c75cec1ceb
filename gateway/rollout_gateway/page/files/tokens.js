import { h } from "page/dom.js";

/** @param {import("page/rollout.js").View} view */
export function tokensPart(view) {
  return { element: h("section"), update() {}, selected() {} };
}
