/** Cells of tables of rollouts: what the list and a group say of one rollout. */
import { count, decimal, duration } from "page/dom.js";

const ENDS = { stop: "completed", failure: "failed", cancellation: "cancelled" };
// The classes whose samples train if the request names none (docs/failures.md).
const TRAIN_BY_DEFAULT = ["policy", "deadline"];
const NOTHING = { text: "" };

/** @typedef {import("page/list/live.js").Cell} Cell */

/** @param {Object} rollout @returns {string} "queued", "running", "completed", "failed" or "cancelled" */
export function stateOf(rollout) {
  return rollout.state === "finished" ? ENDS[rollout.outcome?.end] ?? "finished" : rollout.state;
}

/** Whether the samples of a finished rollout train. @param {Object} rollout */
export function isUsable({ outcome, spec }) {
  const failureClass = outcome.end === "cancellation" ? "cancelled" : outcome.failure_class;
  return outcome.end === "stop" || (spec.train_on ?? TRAIN_BY_DEFAULT).includes(failureClass);
}

/** @returns {Cell} */
export function stateCell(rollout) {
  const state = stateOf(rollout);
  return { text: state, kind: `live-${state}` };
}

/** The part after the last hyphen: the part before it is that of the server. @returns {Cell} */
export function uidCell({ uid }) {
  return { text: uid.slice(uid.lastIndexOf("-") + 1), title: uid, href: `#/rollouts/${encodeURIComponent(uid)}` };
}

/** @returns {Cell} */
export function idCell({ spec }) {
  return textCell(spec.rollout_id);
}

/** @returns {Cell} */
export function groupCell({ spec: { group_id } }) {
  return group_id ? { text: group_id, title: group_id, href: `#/groups/${encodeURIComponent(group_id)}` } : NOTHING;
}

/** @returns {Cell} text with the whole of it as its title */
export function textCell(text) {
  return { text, title: text };
}

/** @returns {Cell} */
export function turnsCell({ metrics }) {
  return { text: count(metrics.turns) };
}

/** @returns {Cell} */
export function tokensCell({ metrics }) {
  return { text: count(metrics.generated_tokens), title: `${count(metrics.prompt_tokens)} prompt tokens` };
}

/** @returns {Cell} */
export function rewardCell({ outcome }) {
  const reward = outcome?.reward ?? null;
  if (reward !== null) return { text: decimal(reward), title: String(reward) };
  if (outcome?.end !== "stop") return NOTHING;
  return { text: "none", title: "The rollout completed without a reward.", kind: "warn" };
}

/** How it ended: the reason, or the class and the message of a failure. @returns {Cell} */
export function endCell({ outcome }) {
  if (!outcome) return NOTHING;
  if (outcome.end === "failure") return textCell(`${outcome.failure_class}: ${outcome.message}`);
  const reason = outcome.truncated ? `${outcome.reason}, truncated` : outcome.reason;
  return { ...textCell(reason), kind: outcome.end === "stop" ? "quiet" : "" };
}

/** Time since the rollout was accepted. @returns {Cell} */
export function ageCell({ create_time }) {
  if (!create_time) return NOTHING;
  const seconds = Math.max(0, (Date.now() - Date.parse(create_time)) / 1000);
  const [unit, length] = [["d", 86_400], ["h", 3600], ["min", 60]].find((each) => seconds >= each[1]) ?? ["s", 1];
  return { text: `${Math.floor(seconds / length)} ${unit}`, title: new Date(create_time).toLocaleString() };
}

/** Time from the acceptance to the end, or until now. @returns {Cell} */
export function durationCell({ create_time, finish_time, metrics }) {
  const end = finish_time ? Date.parse(finish_time) : Date.now();
  const parts = { queued: metrics.queued_ms, completions: metrics.completion_ms, tools: metrics.tool_ms };
  const title = Object.entries(parts).map(([name, ms]) => `${name} ${duration(ms)}`).join(", ");
  // Results of evaluations have no times but this one.
  const ms = create_time ? end - Date.parse(create_time) : metrics.total_ms;
  return { text: duration(Math.max(0, ms)), title };
}
