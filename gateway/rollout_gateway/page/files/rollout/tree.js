/** The tree of segments: why each was opened, what it trains, and drift at its index with the tokens of both sides. */
import { count, decimal, fill, h } from "page/dom.js";
import {
  driftsOf, idsOf, samplesOf, shownSegment, trainedTokens, verifiedMark, whyNoTokens, whyNotTrained,
} from "page/rollout/segments.js";
import { TokenTexts, visible } from "page/tokens/texts.js";

/** Tokens of both sides that are shown before and after the index of a drift. */
const BEFORE = 4;
const AFTER = 12;

const WHY = {
  __proto__: null,
  main: "the rollout's first segment",
  drift: "the trainer's prompt did not extend the previous segment",
  compaction: "the agent replaced its context by a shorter one",
  subagent: "the agent opened a separate conversation",
  branch: "the agent continued the same prefix a second time",
  gap: "the trainer sent no token ids for an earlier turn",
};
const DRIFT = {
  __proto__: null,
  history_rewritten: "the chat template rendered earlier messages differently",
  retokenised: "sampled tokens came back as other tokens of the same text",
  environment: "only environment tokens differ; the segment goes on with the trainer's tokens",
  truncated: "the prompt was shortened",
  prompt: "the first prompt already differs: other tools, template or tokenizer",
};

/** @param {import("page/rollout/rollout.js").View} view */
export function treePart(view) {
  const element = h("section.tree", { "aria-label": "Segments" });
  const texts = new TokenTexts(view.source, view.uid, () => element.isConnected && draw());
  let drawn = "";
  const draw = () => {
    const list = view.model.segmentList;
    const focused = element.contains(document.activeElement) && document.activeElement.dataset.segment;
    const isOne = list.length === 1 && !driftsOf(view.model, list[0]).length;
    fill(element, list.length === 0 ? h("p.quiet", {}, whyNoTokens(view.model))
      : isOne ? row(view, list[0]) : branches(view, texts, ""));
    selected();
    if (focused) element.querySelector(`[data-segment="${CSS.escape(focused)}"]`)?.focus();
  };
  const update = () => {
    const { drifts, outcome, segmentList } = view.model;
    const segments = segmentList.flatMap((each) => [each.id, each.length, trainedTokens(each)]);
    const state = String([drifts.length, Boolean(outcome), ...segments]);
    if (state === drawn) return;
    drawn = state;
    draw();
  };
  const selected = () => {
    const shown = shownSegment(view)?.id;
    for (const each of element.querySelectorAll(".tree-row")) each.ariaCurrent = String(each.dataset.segment === shown);
  };
  return { element, update, selected };
}

/** The segments that follow another one, each with its drift and what follows it. */
function branches(view, texts, parentId) {
  const { model } = view;
  const isHere = ({ parentId: parent }) => (parentId ? parent === parentId : !model.segments.has(parent));
  const segments = model.segmentList.filter(isHere);
  if (!segments.length) return null;
  const item = (segment) => {
    const drifts = driftsOf(model, segment).map((drift) => driftBlock(view, texts, segment, drift));
    return h("li", {}, row(view, segment), drifts, branches(view, texts, segment.id));
  };
  return h("ul.tree-list", {}, segments.map(item));
}

function row(view, segment) {
  const { id, kind, role, model, reward, verified, length } = segment;
  const refused = whyNotTrained(view.model, segment);
  const trains = samplesOf(view.model, segment).length ? h("span.good", {}, "trains") : "";
  const select = () => view.select({ segment: id, turn: 0, token: null });
  return h("button.tree-row", { data: { segment: id }, title: `${kind}: ${WHY[kind] ?? ""}`, on: { click: select } },
    h("span.tree-name", {},
      h("b", {}, `Segment ${id}`), " ", h("span.tree-kind", { data: { kind } }, kind), " ",
      role && role !== "agent" && `${role} `,
      model && h("span.quiet", {}, `by ${model} `),
      h("span.quiet", {}, originText(segment))),
    h("span.tree-number", {}, `${count(length)} tokens`),
    h("span.tree-number", {}, `${count(trainedTokens(segment))} with mask 1`),
    h("span.tree-number", {}, reward === null ? h("span.quiet", {}, "no reward") : `reward ${decimal(reward)}`),
    h("span", {}, refused ? h("span.warn", {}, `does not train: ${refused}`) : trains),
    verifiedMark(verified));
}

/** How a segment began. For an agent that owns its loop: where and why its call left its other conversations. */
function originText({ parentId, parentTokens, parting }) {
  if (!parting) {
    if (!parentId) return "";
    return parentTokens ? `shares ${count(parentTokens)} tokens with ${parentId}` : `after ${parentId}`;
  }
  const { message, field, expected, found, api, client_agent: agent } = parting;
  const call = `${api ? `a ${api} call` : "a call"}${agent ? ` of ${agent}` : ""}`;
  const quoted = (text) => `“${text}”`;
  if (field !== "history") {
    const texts = expected || found ? `: ${quoted(expected)}, now ${quoted(found)}` : "";
    return `${call} diverged at message ${message} (${field})${texts}`;
  }
  const went = expected ? `, where the conversation continued with ${quoted(expected)}` : "";
  return `${call} had only ${message} messages${went}`;
}

function driftBlock(view, texts, segment, drift) {
  const { index, opened, kind, message, expected_text, reported_text } = drift;
  const parent = opened ? view.model.segments.get(segment.parentId) : null;
  const side = (name, of, text) => h("div.tree-side", {},
    h("span.quiet", {}, name),
    of && index < of.length && tokensAround(view, texts, of, index),
    text && h("code.tree-text", {}, visible(text)));
  const why = DRIFT[kind] ?? (message || "the prompts differ");
  return h("div.tree-drift", {},
    h("p", {}, h("b.bad", {}, `Drift at token ${count(index)}`), `: ${why}`),
    side("expected", parent, expected_text),
    side("reported", segment, reported_text));
}

/** A few tokens before and after an index, with their ids. A click selects the token at the index. */
function tokensAround(view, texts, segment, index) {
  const start = Math.max(0, index - BEFORE);
  const stop = Math.min(segment.length, index + AFTER);
  texts.want(segment.id, start, stop);
  const tokens = idsOf(segment, start, stop).map((id, offset) => {
    const found = texts.at(segment.id, start + offset);
    const text = found && (found.start === start + offset ? visible(found.text) : "…");
    const token = h("span.tree-token", {}, h("span", {}, text ?? ""), h("small", {}, id));
    token.classList.toggle("tree-same", start + offset < index);
    return token;
  });
  const turn = view.model.spanAt(segment.id, index)?.turn ?? 0;
  const select = () => view.select({ segment: segment.id, turn, token: index });
  const title = `Show token ${index} of segment ${segment.id}`;
  return h("button.tree-tokens", { title, on: { click: select } }, tokens);
}
