/** What a rollout is and why it ended, first of all: reward, warnings, samples, resources. */
import { clock, copy, count, decimal, duration, fill, h, sum, terms } from "page/dom.js";
import { ENDS, scoresOf } from "page/list/cells.js";
import { setText } from "page/list/live.js";
import { verifiedMark } from "page/rollout/segments.js";
import { linkToGroup, selectionLink } from "page/rollout/selection.js";

const STOPPED = {
  __proto__: null,
  stop: "The agent's loop completed.",
  max_turns: "It reached its turn limit.",
  max_tokens: "It reached its limit of generated tokens.",
  max_bytes: "Its messages reached their size limit.",
};
// Who has to act, as docs/failures.md says.
const ADVICE = {
  __proto__: null,
  policy: "The model went beyond a limit. Nobody has to act, or whoever sets the limits.",
  deadline: "Nobody has to act, or whoever sets the time limit of the request.",
  environment: "For the agent's author: its code raised, or messages or parameters are not possible.",
  tool: "For the tool's author: a tool could not be run at all.",
  engine: "For the engine's operator: the inference engine could not complete the turn.",
  trainer: "For the trainer's operator: the trainer could not complete the turn.",
  server: "For the server's operator: see the server's log.",
};

/**
 * @param {import("page/rollout/rollout.js").View} view
 * @returns {Object} a part; `actions` is the place for its buttons
 */
export function summaryPart(view) {
  const state = h("span.rollout-state", { role: "status" });
  const actions = h("div.rollout-actions");
  const end = h("section.rollout-end", { "aria-label": "Result" });
  const resources = h("dl.rollout-metrics", { "aria-label": "Resources" });
  const [agent, policy] = [h("span"), h("span")];
  const title = h("h1", {}, view.model.rollout.spec.rollout_id || view.uid);
  const head = h("div.rollout-title", {}, title, state, actions);
  const element = h("header.rollout-summary", {}, head, identity(view, agent, policy), end, resources);
  let shownOutcome;
  const update = () => {
    const { outcome } = view.model;
    showState(state, view);
    fill(agent, agentName(view.model));
    fill(policy, policies(view.model) || "–");
    fill(resources, terms(resourcesOf(view.model)));
    if (!outcome || outcome === shownOutcome) return;
    shownOutcome = outcome;
    end.dataset.end = outcome.end;
    fill(end, h("div.rollout-why", {}, whyOf(view, outcome)), resultsOf(view, outcome), warningsOf(view, outcome));
  };
  return { element, actions, update, selected() {} };
}

const CONNECTIONS = {
  live: "live", reconnecting: "reconnecting …", connecting: "loading …", lost: "not followed any more",
};

function showState(element, { connection, model }) {
  const { rollout, outcome, turns } = model;
  const stateSeen = rollout.state === "queued" && turns.size ? "running" : rollout.state;
  const word = outcome ? ENDS[outcome.end] : stateSeen;
  // Screen readers announce each change.
  setText(element, [word, CONNECTIONS[connection]].filter(Boolean).join(" · "));
  element.dataset.state = connection === "reconnecting" ? "reconnecting" : word;
}

function identity(view, agent, policy) {
  const { spec, caller, create_time } = view.model.rollout;
  const click = () => copy(view.uid, copyUid);
  const copyUid = h("button.rollout-copy", { "aria-label": "Copy the uid", on: { click } }, "copy");
  const labels = Object.entries(spec.labels ?? {}).map((label) => h("span.rollout-label", {}, label.join("=")));
  const group = spec.group_id && h("a", { href: linkToGroup(spec.group_id) }, spec.group_id);
  return h("dl.rollout-identity", {}, terms([
    ["uid", [h("code", {}, view.uid), " ", copyUid]],
    ["agent", agent],
    ["caller", caller],
    ["group", group && [group, spec.group_index === undefined ? "" : ` no. ${spec.group_index}`]],
    ["started", clock(create_time)],
    ["policy", policy],
    ["labels", labels.length ? labels : null],
  ]));
}

function agentName({ rollout, accepted }) {
  return [rollout.spec.agent, accepted?.agent_version].filter(Boolean).join(", version ");
}

function policies({ segmentList }) {
  const spans = segmentList.flatMap((segment) => segment.spans).sort((a, b) => a.turn - b.turn);
  const all = [...new Set(spans.map((span) => span.policyVersion).filter(Boolean))];
  return all.length > 2 ? `${all[0]} … ${all.at(-1)}` : all.join(", ");
}

function resourcesOf({ rollout, outcome, turns }) {
  const used = outcome?.metrics ?? rollout.metrics ?? {};
  const seen = [...turns.values()];
  const generated = sum(seen, (turn) => turn.generatedTokens);
  const returned = seen.flatMap(({ tools }) => tools).filter((tool) => tool.returned).length;
  // While it runs, what was followed is newer than what was asked for.
  const calls = Math.max(used.tool_calls ?? 0, returned);
  const requests = used.completion_attempts ?? 0;
  return [
    ["turns", count(Math.max(used.turns ?? 0, seen.filter((turn) => turn.answered).length))],
    requests > (used.turns ?? 0) && ["requests", count(requests)],
    ["tool calls", `${count(calls)}${used.tool_failures ? ` (${used.tool_failures} failed)` : ""}`],
    ["generated", `${count(Math.max(used.generated_tokens ?? 0, generated))} tokens`],
    ["longest context", `${count(used.max_context_tokens ?? 0)} tokens`],
    ["queued", duration(used.queued_ms ?? 0)],
    ["completions", duration(used.completion_ms ?? 0)],
    ["tools", duration(used.tool_ms ?? 0)],
    ["total", outcome ? duration(used.total_ms) : "–"],
  ];
}

function whyOf(view, outcome) {
  if (outcome.end === "failure") return failureOf(view, outcome);
  if (outcome.end === "cancellation") {
    return [h("h2.warn", {}, "Cancelled"), h("p", {}, outcome.reason || "The caller gave no reason.")];
  }
  const cut = outcome.truncated && h("p.warn", {}, "The last completion was cut by its length limit.");
  const text = STOPPED[outcome.reason] ?? "The agent or the trainer gave this reason.";
  return [h("h2.good", {}, `Completed: ${outcome.reason}`), h("p", {}, text), cut];
}

function failureOf(view, { failure_class, category, message, turn, http_status }) {
  const where = turn ? ["in ", selectionLink(view, { turn }, `turn ${turn}`)] : "before the first turn";
  const status = http_status ? `, HTTP ${http_status}` : "";
  return [
    h("h2.bad", {}, `Failed: ${failure_class}`),
    h("p", {}, `${category} `, where, status),
    h("pre.rollout-message", {}, message),
    h("p.quiet", {}, ADVICE[failure_class] ?? ADVICE.server),
  ];
}

function resultsOf(view, outcome) {
  const turns = (outcome.turn_rewards ?? []).flatMap(({ turn, value, segment_id }) => [
    selectionLink(view, { turn, segment: segment_id }, `turn ${turn}`),
    ` ${decimal(value)} `,
  ]);
  return h("dl.rollout-results", {}, terms([
    ["reward", outcome.reward === null ? "none" : h("strong", {}, decimal(outcome.reward))],
    ["scores", scoresOf(outcome)],
    ["turn rewards", turns.length ? turns : null],
    ["samples", trainableText(outcome)],
    ["tokens", verified(view.model)],
  ]));
}

function trainableText({ samples }) {
  if (!samples?.length) return "none";
  const left = samples.filter((sample) => sample.trainable === false);
  const reasons = [...new Set(left.map((sample) => sample.untrainable_reason).filter(Boolean))].join(", ");
  return `${samples.length - left.length} of ${samples.length} trainable${reasons && ` (${reasons})`}`;
}

function verified({ segmentList, turns }) {
  if (!turns.size && !segmentList.length) return "none";
  if (!segmentList.length) return h("span.quiet", {}, "the trainer sent no token ids");
  return verifiedMark(segmentList.every((segment) => segment.verified));
}

function warningsOf(view, { warnings }) {
  if (!warnings?.length) return null;
  const items = warnings.map(({ code, message, turn, index }) => {
    const segment = view.model.turns.get(turn)?.segment ?? "";
    const link = (token, text) => [" ", selectionLink(view, { turn, segment, token }, text)];
    const hasToken = index !== null && index !== undefined;
    return h("li", {}, h("strong.warn", {}, code), ` ${message}`,
      turn > 0 && link(null, `turn ${turn}`), hasToken && link(index, `token ${count(index)}`));
  });
  return h("ul.rollout-warnings", { "aria-label": "Warnings" }, items);
}
