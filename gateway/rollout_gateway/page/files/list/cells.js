/** Columns of tables of rollouts: what the list and a group say of one rollout. */
import { count, decimal, duration } from "page/dom.js";
import { linkTo, linkToGroup } from "page/rollout/selection.js";

/** What a finished rollout is called, by its end. */
export const ENDS = { __proto__: null, stop: "completed", failure: "failed", cancellation: "cancelled" };
// The classes whose samples train if the request names none (docs/failures.md).
const TRAIN_BY_DEFAULT = ["policy", "deadline"];
/** @type {Cell} */
export const EMPTY = { text: "" };

/** @typedef {import("page/list/live.js").Cell} Cell */

/** Columns by name; their cells are made of a rollout. */
const COLUMNS = {
  state: { label: "State", show: stateCell },
  uid: { label: "UID", show: uidCell },
  id: { label: "Rollout id", show: ({ spec }) => textCell(spec.rollout_id) },
  agent: { label: "Agent", show: ({ spec }) => textCell(spec.agent ?? "") },
  group: { label: "Group", show: groupCell },
  turns: { label: "Turns", show: ({ metrics }) => ({ text: count(metrics.turns) }) },
  tokens: { label: "Tokens", title: "Generated tokens", show: tokensCell },
  reward: { label: "Reward", show: rewardCell },
  scores: { label: "Scores", show: ({ outcome }) => textCell(scoresOf(outcome)) },
  end: { label: "Ended", title: "Reason, or class and message of the failure", show: endCell },
  age: { label: "Age", title: "Time since the rollout was accepted", show: ageCell },
  duration: { label: "Duration", title: "From the acceptance to the end", show: durationCell },
};

/** @param {...string} names @returns {import("page/list/live.js").Column[]} columns of rollouts */
export function columnsOf(...names) {
  return names.map((name) => ({ name, ...COLUMNS[name] }));
}

/** Whether the samples of a finished rollout train. @param {Object} rollout */
export function isUsable({ outcome, spec }) {
  const failureClass = outcome.end === "cancellation" ? "cancelled" : outcome.failure_class;
  return outcome.end === "stop" || (spec.train_on ?? TRAIN_BY_DEFAULT).includes(failureClass);
}

/** Time since the rollout was accepted, or the server started. @returns {Cell} */
export function ageCell({ create_time }) {
  if (!create_time) return EMPTY;
  const seconds = Math.max(0, (Date.now() - Date.parse(create_time)) / 1000);
  const [unit, length] = [["d", 86_400], ["h", 3600], ["min", 60]].find((each) => seconds >= each[1]) ?? ["s", 1];
  return { text: `${Math.floor(seconds / length)} ${unit}`, title: new Date(create_time).toLocaleString() };
}

export function scoresOf(outcome) {
  return Object.entries(outcome?.scores ?? {}).map(([name, value]) => `${name} ${decimal(value)}`).join(", ");
}

/** A text with the whole of it as its title. */
function textCell(value) {
  const text = String(value ?? "");
  return { text, title: text };
}

function stateCell({ state, outcome }) {
  const text = state === "finished" ? ENDS[outcome?.end] ?? state : state;
  return { text, kind: `live-${text}` };
}

/** A uid without the id of its server. Uids of rows of an evaluation have none. */
function uidCell({ uid }) {
  return { text: uid.replace(/^[0-9a-f]{10}-/, ""), title: uid, href: linkTo(uid) };
}

function groupCell({ spec: { group_id: id } }) {
  return id ? { ...textCell(id), href: linkToGroup(id) } : EMPTY;
}

function tokensCell({ metrics }) {
  return { text: count(metrics.generated_tokens), title: `${count(metrics.prompt_tokens)} prompt tokens` };
}

function rewardCell({ outcome }) {
  const reward = outcome?.reward ?? null;
  if (reward !== null) return { text: decimal(reward), title: String(reward) };
  if (outcome?.end !== "stop") return EMPTY;
  return { text: "none", title: "The rollout completed without a reward.", kind: "warn" };
}

/** How it ended: the reason, or the class and the message of a failure. */
function endCell({ outcome }) {
  if (!outcome) return EMPTY;
  if (outcome.end === "failure") return textCell(`${outcome.failure_class}: ${outcome.message}`);
  const reason = outcome.truncated ? `${outcome.reason}, truncated` : outcome.reason;
  return { ...textCell(reason), kind: outcome.end === "stop" ? "quiet" : "" };
}

/** Time from the acceptance to the end, or until now. */
function durationCell({ create_time, finish_time, metrics }) {
  const end = finish_time ? Date.parse(finish_time) : Date.now();
  const parts = { queued: metrics.queued_ms, completions: metrics.completion_ms, tools: metrics.tool_ms };
  const title = Object.entries(parts).map(([name, ms]) => `${name} ${duration(ms)}`).join(", ");
  // Results of evaluations have no times but this one.
  const ms = create_time ? end - Date.parse(create_time) : metrics.total_ms;
  return { text: duration(Math.max(0, ms)), title };
}
