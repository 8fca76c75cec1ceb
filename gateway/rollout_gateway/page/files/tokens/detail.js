/** All that is known of the token under the pointer or of the selected tokens. */
import { count, decimal, h, sum, terms } from "page/dom.js";
import { idsOf, promptLength, samplesOf } from "page/rollout/segments.js";
import { KINDS, kindOf, visible } from "page/tokens/texts.js";

const MAX_IDS = 12;

/**
 * @param {{view: import("page/rollout/rollout.js").View, segment: import("page/rollout/model.js").Segment,
 *   texts: import("page/tokens/texts.js").TokenTexts, drifts: {index: number, left: string?}[]}} strip
 * @param {{start: number, stop: number}|null} range - of one text, or several tokens
 * @returns {HTMLElement}
 */
export function tokenDetail({ view, segment, texts, drifts }, range) {
  if (!range) {
    return h("p.quiet", {}, "Point at a token, or select one. Arrow keys move by token, Page Up and Page Down ",
      "by turn, [ and ] by span; Shift extends; c copies ids, Shift+C the ids of the span.");
  }
  const found = texts.at(segment.id, range.start);
  const isOne = range.stop === range.start + 1 || (found?.start === range.start && found.stop === range.stop);
  const rows = isOne ? tokenRows(view, segment, range, found, drifts) : rangeRows(segment, range, texts);
  return h("dl.tokens-facts", {}, terms(rows));
}

function tokenRows(view, segment, { start, stop }, found, drifts) {
  const span = view.model.spanAt(segment.id, start);
  const kind = kindOf(span);
  const response = start - promptLength(segment);
  const isModel = span.author === "model";
  const step = span.policyStep === null ? "" : `step ${span.policyStep}`;
  const policy = [span.policyVersion, step].filter(Boolean).join(", ");
  const letter = h(`b.tokens-key.tokens-${KINDS[kind].name}`, {}, kind);
  const drift = drifts.find((each) => each.index === start);
  return [
    ["text", found ? h("code", {}, edged(visible(found.text)) || "∅") : "not available"],
    [stop - start > 1 ? "ids" : "id", h("code", {}, shortened(idsOf(segment, start, stop)))],
    ["index", `${count(start)}; ${response < 0 ? "in the prompt" : `${count(response)} in the response`}`],
    ["author", `${isModel ? "model" : KINDS[kind].name}, turn ${span.turn}`],
    isModel && ["logprob", logprobText(span, start, stop)],
    isModel && ["policy", policy || "unknown"],
    ["mask", [letter, maskText(view, segment, span, kind, start)], "tokens-wide"],
    drift && ["drift", h("span.bad", {}, driftText(drift)), "tokens-wide"],
  ];
}

function maskText(view, segment, span, kind, index) {
  const reason = kind === "A" && view.model.turns.get(span.turn)?.masked;
  const sample = samplesOf(view.model, segment).findLast((each) => each.part === 0 || each.prompt_ids.length <= index);
  const refused = kind === "M" && sample?.trainable === false;
  const but = refused ? `; but its sample does not train: ${sample.untrainable_reason}` : "";
  return `${kind === "M" ? 1 : 0}: ${KINDS[kind].why}${reason ? `: ${reason}` : ""}${but}`;
}

function driftText({ left }) {
  if (left) return `the next prompt differs from here on: segment ${left} goes on with the trainer's tokens`;
  return "the trainer's prompt differs from the expected one from here on";
}

function logprobText(span, start, stop) {
  if (!span.logprobs) return "none: the trainer sent no logprobs";
  const values = span.logprobs.slice(start - span.start, stop - span.start);
  return values.map((value) => `${value.toFixed(4)} (p = ${decimal(100 * Math.exp(value))} %)`).join(", ");
}

function rangeRows(segment, { start, stop }, texts) {
  const spans = segment.spans.filter((span) => span.start < stop && span.start + span.ids.length > start);
  const overlap = (span) => Math.min(stop, span.start + span.ids.length) - Math.max(start, span.start);
  const sampled = spans.filter((span) => span.author === "model");
  const logprobs = (span) => span.logprobs?.slice(Math.max(0, start - span.start), stop - span.start) ?? [];
  const known = sampled.flatMap(logprobs);
  const tokens = (list) => count(sum(list, overlap));
  const trained = spans.filter((span) => kindOf(span) === "M");
  const total = sum(known, (logprob) => logprob).toFixed(4);
  const none = sampled.length ? "none: the trainer sent no logprobs" : "no model tokens";
  return [
    ["tokens", `${count(stop - start)}, index ${count(start)} to ${count(stop - 1)}`],
    ["mask", `${tokens(trained)} with mask 1, ${tokens(sampled)} by the model`],
    ["logprob", known.length ? `sum ${total} of ${count(known.length)} model tokens` : none, "tokens-wide"],
    ["text", h("code", {}, rangeText(segment, start, stop, texts)), "tokens-wide"],
    ["ids", h("code", {}, shortened(idsOf(segment, start, stop))), "tokens-wide"],
  ];
}

function rangeText(segment, start, stop, texts) {
  let text = "";
  for (let index = start; index < stop && text.length < 120; ) {
    const found = texts.at(segment.id, index);
    text += found ? visible(found.text) : "?";
    index = found?.stop ?? index + 1;
  }
  return text.length < 120 ? text : `${text.slice(0, 120)}…`;
}

/** Show the spaces at both ends of a text. */
function edged(text) {
  return text.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

function shortened(ids) {
  return ids.length > MAX_IDS ? `${ids.slice(0, MAX_IDS).join(" ")} … ${count(ids.length)} ids` : ids.join(" ");
}
