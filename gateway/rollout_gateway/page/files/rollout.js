/** One rollout: why it ended, messages beside tokens, segments and times, live while it runs. */
import { h } from "page/dom.js";
import { messagesPart } from "page/messages.js";
import { RolloutModel } from "page/model.js";
import { timelinePart } from "page/timeline.js";
import { tokensPart } from "page/tokens.js";
import { treePart } from "page/tree.js";

/**
 * What the parts of the page share. Each part is a function `(view) => {element, update(), selected()}`: `update` is called
 * after the model has changed, at most once per frame, and `selected` after the selection has.
 *
 * @typedef {{source: Object, uid: string, model: RolloutModel, selection: Selection, select: (selection: Selection) => void}} View
 * @typedef {{segment: string, turn: number, token: number|null}} Selection - turn 0: none; token: index in the segment
 */

/**
 * @param {Object} source - where rollouts come from
 * @param {string} uid
 * @param {URLSearchParams} parameters - `segment`, `turn` and `token` of the link
 * @returns {{title: string, element: HTMLElement, close: () => void}}
 */
export function rolloutPage(source, uid, parameters) {
  return { title: `Rollout ${uid}`, element: h("section"), close: () => {} };
}
