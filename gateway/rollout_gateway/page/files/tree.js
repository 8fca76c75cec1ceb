/** The tree of segments: why each was opened, what it trains, and drift at its index with the tokens of both sides. */
import { count, decimal, fill, h } from "page/dom.js";
import { driftsOf, idsOf, samplesOf, shownSegment, trainedTokens } from "page/segments.js";
import { TokenTexts, visible } from "page/token_texts.js";

/** Tokens of both sides that are shown before and after the index of a drift. */
const BEFORE = 4;
const AFTER = 12;

const WHY = {
  main: "the rollout's first segment",
  drift: "the trainer's prompt did not extend the segment before",
  compaction: "the agent replaced its context by a shorter one",
  subagent: "the agent opened a separate conversation",
  branch: "the agent continued the same prefix a second time",
  gap: "the trainer sent no token ids for an earlier turn",
};
const DRIFT = {
  history_rewritten: "the chat template rendered earlier messages differently",
  retokenised: "sampled tokens came back as other tokens of the same text",
  environment: "only environment tokens differ; the segment goes on with the trainer's tokens",
  truncated: "the prompt was shortened",
  prompt: "the first prompt already differs: other tools, template or tokenizer",
};

/** @param {import("page/rollout.js").View} view */
export function treePart(view) {
  const element = h("section.tree", { "aria-label": "Segments" });
  const texts = new TokenTexts(view.source, view.uid, () => draw());
  let drawn = "";
  const draw = () => {
    const list = view.model.segmentList;
    const focused = element.contains(document.activeElement) && document.activeElement.dataset.segment;
    const isOne = list.length === 1 && !driftsOf(view.model, list[0]).length;
    fill(element, list.length === 0 ? h("p.quiet", {}, "No segment yet: no completion with token ids has arrived.")
      : isOne ? row(view, list[0]) : branches(view, texts, ""));
    selected();
    if (focused) element.querySelector(`[data-segment="${CSS.escape(focused)}"]`)?.focus();
  };
  const update = () => {
    const { drifts, outcome, segmentList } = view.model;
    const state = String([drifts.length, Boolean(outcome), ...segmentList.flatMap((each) => [each.id, each.length, trainedTokens(each)])]);
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
  const isRoot = ({ parentId: parent }) => (parentId ? parent === parentId : !model.segments.has(parent));
  const children = model.segmentList.filter(isRoot);
  if (!children.length) return null;
  return h("ul.tree-list", {}, children.map((segment) => h("li", {},
    row(view, segment),
    driftsOf(model, segment).map((drift) => driftBlock(view, texts, segment, drift)),
    branches(view, texts, segment.id))));
}

function row(view, segment) {
  const { model } = view;
  const samples = samplesOf(model, segment);
  const refused = samples.find((sample) => sample.trainable === false);
  const reason = refused?.untrainable_reason ?? (segment.trainable === false ? "role_not_trainable" : "");
  const name = segment.role && segment.role !== "agent" ? `${segment.role} ` : "";
  const shared = segment.parentId && (segment.parentTokens ? `shares ${count(segment.parentTokens)} tokens with ${segment.parentId}` : `after ${segment.parentId}`);
  const select = () => view.select({ segment: segment.id, turn: 0, token: null });
  return h("button.tree-row", { data: { segment: segment.id }, title: `${segment.kind}: ${WHY[segment.kind] ?? ""}`, on: { click: select } },
    h("span.tree-name", {}, h("b", {}, `Segment ${segment.id}`), " ", h("span.tree-kind", { data: { kind: segment.kind } }, segment.kind), " ",
      visible(name), segment.model ? h("span.quiet", {}, `by ${visible(segment.model)} `) : null,
      h("span.quiet", {}, segment.parting ? partingText(segment.parting) : shared)),
    h("span.tree-number", {}, `${count(segment.length)} tokens`),
    h("span.tree-number", {}, `${count(trainedTokens(segment))} with mask 1`),
    h("span.tree-number", {}, segment.reward === null ? h("span.quiet", {}, "no reward") : `reward ${decimal(segment.reward)}`),
    h("span", {}, reason ? h("span.warn", {}, `does not train: ${reason}`) : samples.length ? h("span.good", {}, "trains") : ""),
    h("span", {}, segment.verified ? h("span.good", {}, "✓ verified") : h("span.warn", { title: "The trainer reported no prompts." }, "not verified")));
}

/** Where and why a call of an agent that owns its loop left its other conversations. */
function partingText({ message, field, expected, found, api, client_agent: agent }) {
  const call = `${api ? `a ${api} call` : "a call"}${agent ? ` of ${visible(agent)}` : ""}`;
  const quoted = (text) => `“${visible(text)}”`;
  if (field === "history") return `${call} had only ${message} messages${expected ? `, where the conversation went on with ${quoted(expected)}` : ""}`;
  return `${call} parted at message ${message} (${field})${expected || found ? `: ${quoted(expected)}, now ${quoted(found)}` : ""}`;
}

function driftBlock(view, texts, segment, drift) {
  const select = (id) => () => view.select({ segment: id, turn: view.model.spanAt(id, drift.index)?.turn ?? 0, token: drift.index });
  const parent = drift.opened ? view.model.segments.get(segment.parentId) : null;
  const side = (name, of, text) => h("div.tree-side", {}, h("span.quiet", {}, name),
    of && drift.index < of.length ? h("button.tree-tokens", { title: `Show token ${drift.index} of segment ${of.id}`, on: { click: select(of.id) } }, tokensAround(texts, of, drift.index)) : null,
    text ? h("code.tree-text", {}, visible(text)) : null);
  return h("div.tree-drift", {},
    h("p", {}, h("b.bad", {}, `Drift at token ${count(drift.index)}`), `: ${DRIFT[drift.kind] ?? (visible(drift.message) || "the prompts differ")}`),
    side("expected", parent, drift.expected), side("reported", segment, drift.reported));
}

/** A few tokens before and after an index, with their ids. */
function tokensAround(texts, segment, index) {
  const start = Math.max(0, index - BEFORE);
  const stop = Math.min(segment.length, index + AFTER);
  texts.want(segment.id, start, stop);
  return idsOf(segment, start, stop).map((id, offset) => {
    const at = start + offset;
    const found = texts.at(segment.id, at);
    const text = found && (found.start === at ? visible(found.text) : "…");
    return h(at < index ? "span.tree-token.tree-same" : "span.tree-token", {}, h("span", {}, text ?? ""), h("small", {}, id));
  });
}
