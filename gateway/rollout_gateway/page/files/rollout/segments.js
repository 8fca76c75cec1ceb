/** What the parts of a rollout share about segments: which one is shown, its drift, and its samples. */

import { h, sum } from "page/dom.js";

/** @typedef {import("page/rollout/model.js").Segment} Segment */

/** The selected segment; without a selection the last main one. @returns {Segment|null} */
export function shownSegment({ model, selection }) {
  const list = model.segmentList;
  return model.segments.get(selection.segment) ?? list.findLast(({ kind }) => kind === "main") ?? list.at(-1) ?? null;
}

/**
 * The drift of a segment: what opened it, and changes of environment tokens within it. Events have both texts; of a
 * rollout without events, warnings have the message.
 * @returns {{index: number, kind: string?, expected_text: string?, reported_text: string?, message: string?,
 *   opened: boolean}[]} `opened`: the drift opened the segment
 */
export function driftsOf(model, segment) {
  const turns = new Set(segment.spans.map((span) => span.turn));
  const opener = segment.kind === "drift" && !segment.parting ? segment.spans[0]?.turn : null;
  const warnings = (model.outcome?.warnings ?? []).filter((each) => each.code === "token_drift" && each.index !== null);
  const known = model.drifts.length ? model.drifts : warnings;
  const found = known.filter((each) => turns.has(each.turn));
  const drifts = found.map((each) => ({ ...each, opened: each.turn === opener }));
  const isUnknown = opener !== null && !drifts.some((each) => each.opened);
  if (isUnknown) drifts.push({ index: segment.parentTokens, opened: true });
  return drifts.sort((a, b) => a.index - b.index);
}

/**
 * Where segments that drift opened leave this one.
 * @returns {{index: number, left: string}[]} `left`: id of the segment that goes on
 */
export function departuresOf(model, segment) {
  const isOne = (each) => each.kind === "drift" && each.parentId === segment.id && !each.parting;
  return model.segmentList.filter(isOne).map((each) => ({ index: each.parentTokens, left: each.id }));
}

/** Why a sample does not train, as the API says it. @returns {string} empty: it trains, or there is none yet */
export function whyNotTrained(model, segment) {
  const refused = samplesOf(model, segment).filter((sample) => sample.trainable === false);
  const reasons = new Set(refused.map((sample) => sample.untrainable_reason || "not trainable"));
  if (!model.outcome && segment.trainable === false) reasons.add("role_not_trainable");
  return [...reasons].join(", ");
}

/** Whether the token ids are the trainer's own. */
export function verifiedMark(isVerified) {
  if (isVerified) return h("span.good", { title: "The trainer reported its prompts: every token is its own." }, "✓ verified");
  return h("span.warn", { title: "The trainer reported no prompts: they are the server's own rendering." }, "not verified");
}

/** Why there is no segment. @returns {string} */
export function whyNoTokens({ outcome }) {
  if (!outcome) return "No tokens yet: no completion with token ids has arrived.";
  return `No tokens: ${outcome.metrics?.turns ? "the trainer sent no token ids" : "there was no completion"}.`;
}

/** The samples of a finished rollout that were made of a segment. */
export function samplesOf(model, segment) {
  return (model.outcome?.samples ?? []).filter((sample) => sample.segment_id === segment?.id);
}

/** The number of tokens before the response: the segment's first prompt. */
export function promptLength(segment) {
  const first = segment.spans.find((span) => span.reason !== "prompt");
  return first ? first.start : segment.length;
}

/** The ids of a range of a segment. */
export function idsOf(segment, start, stop) {
  const part = ({ ids, start: from }) => ids.slice(Math.max(0, start - from), Math.max(0, stop - from));
  return segment.spans.flatMap(part);
}

/** The number of tokens with mask 1. */
export function trainedTokens(segment) {
  const trained = segment.spans.filter((span) => span.author === "model" && span.reason === null);
  return sum(trained, (span) => span.ids.length);
}
