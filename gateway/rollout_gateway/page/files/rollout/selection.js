/**
 * What is selected of a rollout, and the links to it.
 * @typedef {import("page/rollout/rollout.js").Selection} Selection
 */
import { h } from "page/dom.js";

/** @type {Selection} */
export const NOTHING = { segment: "", turn: 0, token: null };

/** @param {URLSearchParams} parameters @returns {Selection} of a link */
export function selectionOf(parameters) {
  const number = (name) => (/^\d{1,9}$/.test(parameters.get(name) ?? "") ? Number(parameters.get(name)) : null);
  return { segment: parameters.get("segment") ?? "", turn: number("turn") ?? 0, token: number("token") };
}

/** Fill in what a selection leaves out: the turn of a token, the segment of a turn. */
export function completed(model, { segment, turn, token }) {
  const place = segment || model.turns.get(turn)?.segment || (token === null ? "" : (model.segmentList[0]?.id ?? ""));
  return { segment: place, turn: turn || (token === null ? 0 : (model.spanAt(place, token)?.turn ?? 0)), token };
}

/** @returns {string} the link to a rollout, or to a turn or token of it */
export function linkTo(uid, { segment, turn, token } = NOTHING) {
  const query = new URLSearchParams();
  if (segment) query.set("segment", segment);
  if (turn) query.set("turn", turn);
  if (token !== null && token !== undefined) query.set("token", token);
  return `#/rollouts/${encodeURIComponent(uid)}${query.size ? "?" : ""}${query}`;
}

export function linkToGroup(id) {
  return `#/groups/${encodeURIComponent(id)}`;
}

/**
 * A link that selects something of the rollout that is shown.
 * @param {import("page/rollout/rollout.js").View} view
 * @param {Partial<Selection>} selection
 */
export function selectionLink(view, selection, ...children) {
  const wanted = { ...NOTHING, ...selection };
  const click = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    view.select(wanted);
  };
  return h("a", { href: linkTo(view.uid, wanted), on: { click } }, ...children);
}
