/**
 * What is known of one rollout: a fold over its events, or its outcome alone if the events are not available.
 *
 * @typedef {{author: string, reason: string|null, turn: number, start: number, ids: number[],
 *   logprobs: number[]|null, policyVersion: string, policyStep: number|null}} Span - `author` "model" or "other";
 *   `reason` null: mask 1; `start`: index of the first token in its segment
 * @typedef {{id: string, kind: string, parentId: string, parentTokens: number, role: string, trainable: boolean|null,
 *   verified: boolean, model: string, reward: number|null, parting: Object|null, spans: Span[],
 *   length: number}} Segment
 * @typedef {{message: Object, kind: string, segment: string, turn: number, tool: Object|null}} ModelMessage - `kind`
 *   "request", "completion", "tool" or "appended"; `turn`: of a completion, the turn that generated it, of others, the
 *   turn whose prompt they are first part of; 0: no turn has seen it yet
 * @typedef {{turn: number, segment: string, asked: string|null, answered: string|null, elapsedMs: number,
 *   attempts: number, finishReason: string, promptTokens: number, generatedTokens: number, tools: Object[],
 *   reward: number|null, masked: string, givenUp: boolean, ended: string|null}} Turn - `ended`: when it was given up
 */

/** Events that are shown between the messages. */
const BETWEEN = new Set([
  "drift_found", "forked", "given_up", "resumed", "note", "observed", "model_called", "capture_settled",
]);

export class RolloutModel {
  /** @param {Object} rollout - JSON of GET /v1/rollouts/UID with view "messages" or "full" */
  constructor(rollout) {
    this.rollout = rollout;
    /** @type {Map<string, Segment>} */
    this.segments = new Map();
    /** @type {ModelMessage[]} */
    this.messages = [];
    /** @type {Map<number, Turn>} */
    this.turns = new Map();
    this.drifts = [];
    /** Messages, and the events between them that are neither part of a message nor of a turn, in their order. */
    this.items = [];
    this.outcome = null;
    this.sequence = 0;
    /** Whether the events from the first on are added. */
    this.isWhole = true;
    this._waiting = new Map();
    this._opened = new Map();
    this._forks = new Map();
    for (const message of rollout.spec.messages ?? []) this._append(message, "request", "0");
  }

  /** Build the model of a finished rollout from its outcome alone: there are no times, no calls and no drift. */
  static ofOutcome(rollout) {
    const model = new RolloutModel(rollout);
    model.isWhole = false;
    if (rollout.outcome) model._finish(rollout.outcome);
    return model;
  }

  /** Segments in the order of their ids. @returns {Segment[]} */
  get segmentList() {
    return [...this.segments.values()];
  }

  /** The kind and the role of a conversation: of its segment, or else of the event that opened it. */
  conversation(id) {
    const { origin, kind = origin?.kind, role = "agent" } = this.segments.get(id) ?? this._forks.get(id) ?? {};
    return { kind, role };
  }

  /** Whether a conversation is beside the one before it, and does not go on with it. */
  isAside(id) {
    const { kind, role } = this.conversation(id);
    return ["subagent", "branch"].includes(kind) || role !== "agent";
  }

  /** Add the next event. Events that were added before are ignored. */
  add(event) {
    if (event.sequence && event.sequence <= this.sequence) return;
    this.sequence = event.sequence || this.sequence;
    if (BETWEEN.has(event.event) && !isStart(event)) this.items.push(event);
    this[`_on_${event.event}`]?.(event);
  }

  /** The span of a segment that has a token. @returns {Span|undefined} */
  spanAt(segmentId, index) {
    const has = ({ start, ids }) => index >= start && index < start + ids.length;
    return this.segments.get(segmentId)?.spans.find(has);
  }

  /** The span with the tokens of a message. @param {ModelMessage} message @returns {Span|undefined} */
  spanOf(message) {
    const author = message.kind === "completion" ? "model" : "other";
    const isOf = (span) => span.turn === message.turn && span.author === author;
    return this.segments.get(message.segment)?.spans.find(isOf);
  }

  /** The messages whose tokens are in a span: one completion, or all messages that a prompt added. */
  messagesOf(segmentId, span) {
    const isOf = (each) => (each.kind === "completion") === (span.author === "model");
    return this.messages.filter((each) => each.segment === segmentId && each.turn === span.turn && isOf(each));
  }

  _turn(number) {
    if (!this.turns.has(number)) {
      this.turns.set(number, {
        turn: number, segment: "", asked: null, answered: null, elapsedMs: 0, attempts: 0, finishReason: "",
        promptTokens: 0, generatedTokens: 0, tools: [], reward: null, masked: "", givenUp: false, ended: null,
      });
    }
    return this.turns.get(number);
  }

  _push(entry) {
    this.messages.push(entry);
    this.items.push(entry);
  }

  _append(message, kind, conversation, tool = null) {
    const entry = { message, kind, segment: conversation, turn: 0, tool };
    this._push(entry);
    if (!this._waiting.has(conversation)) this._waiting.set(conversation, []);
    this._waiting.get(conversation).push(entry);
  }

  _on_accepted(event) {
    this.accepted = event;
  }

  _on_asked(event) {
    Object.assign(this._turn(event.turn), { segment: event.segment_id, asked: event.time });
  }

  _on_segment_opened(event) {
    this._opened.set(event.turn, event);
  }

  _on_answered(event) {
    const opened = this._opened.get(event.turn);
    const id = opened?.segment_id ?? event.segment_id;
    const turn = this._turn(event.turn);
    // A drift goes on in a new segment with the messages that wait for the old one.
    const conversations = new Set([turn.segment, event.segment_id, id]);
    Object.assign(turn, {
      segment: id, answered: event.time, elapsedMs: event.elapsed_ms, attempts: event.attempts,
      finishReason: event.finish_reason, promptTokens: event.prompt_tokens, generatedTokens: event.generated_tokens,
    });
    const seen = { segment: id, turn: event.turn };
    for (const conversation of conversations) {
      for (const entry of this._waiting.get(conversation) ?? []) Object.assign(entry, seen);
      this._waiting.delete(conversation);
    }
    if (event.message) this._push({ message: event.message, kind: "completion", tool: null, ...seen });
    if (event.spans) this._extend(id, event, opened);
  }

  _extend(id, event, opened) {
    if (!this.segments.has(id)) {
      const origin = opened?.origin ?? { kind: "main", parent_id: "", parent_tokens: 0 };
      const fork = this._forks.get(id) ?? this._forks.get(origin.parent_id);
      if (fork) this._forks.set(id, fork);
      const { role = "agent", trainable, model } = fork ?? {};
      this.segments.set(id, segmentOf({ id, origin, role, trainable, model, verified: true, spans: [] }));
    }
    const segment = this.segments.get(id);
    for (const span of event.spans) addSpan(segment, span);
    segment.verified &&= event.verified;
  }

  _on_appended(event) {
    for (const message of event.messages ?? []) this._append(message, "appended", event.segment_id);
  }

  _on_tool_started(event) {
    const { call_id: callId, name, index, time: started } = event;
    const tool = { callId, name, index, started, returned: null, elapsedMs: 0, failed: false };
    this._turn(event.turn).tools.push(tool);
  }

  _on_tool_returned(event) {
    const tools = this._turn(event.turn).tools;
    const tool = tools.find((each) => each.index === event.index && !each.returned);
    if (tool) Object.assign(tool, { returned: event.time, elapsedMs: event.elapsed_ms, failed: event.failed });
    if (event.message) this._append(event.message, "tool", event.segment_id, tool ?? event);
  }

  _on_drift_found(event) {
    this.drifts.push(event);
  }

  _on_forked(event) {
    this._forks.set(event.segment_id, event);
    if (isStart(event)) this._dropWaiting(event.segment_id);
    for (const message of event.messages ?? []) this._append(message, "appended", event.segment_id);
  }

  /** An agent that owns its loop begins its conversation itself: with the messages of the request, or others. */
  _dropWaiting(conversation) {
    const dropped = new Set(this._waiting.get(conversation));
    const isKept = (each) => !dropped.has(each);
    [this.messages, this.items] = [this.messages.filter(isKept), this.items.filter(isKept)];
    this._waiting.delete(conversation);
  }

  _on_given_up(event) {
    Object.assign(this._turn(event.turn), { givenUp: true, ended: event.time });
  }

  _on_masked(event) {
    this._turn(event.turn).masked = event.reason || "masked";
    for (const { spans } of this.segments.values()) {
      for (const span of spans) if (span.turn === event.turn && span.author === "model") span.reason ??= "author";
    }
  }

  _on_rewarded(event) {
    const turn = this._turn(event.turn);
    turn.reward = (turn.reward ?? 0) + event.value;
  }

  _on_finished(event) {
    this.finished = event.time;
    this._finish(event.outcome);
  }

  _finish(outcome) {
    this.outcome = outcome;
    // The spans of the events have the masks of that moment. Those of the outcome are final.
    if (outcome.segments?.length) {
      this.segments = new Map(outcome.segments.map((segment) => [segment.id, segmentOf(segment)]));
    }
    for (const each of outcome.turn_rewards ?? []) this._turn(each.turn).reward = each.value;
    if (!this.isWhole) this._readMessages(outcome.messages ?? []);
  }

  /** Count the tokens of a turn from its spans. */
  _readTurn(id, { turn: number, author, start, ids }) {
    if (author !== "model") return;
    const turn = this._turn(number);
    // A completion that was resumed has several spans.
    if (!turn.generatedTokens) Object.assign(turn, { segment: id, promptTokens: start });
    turn.generatedTokens += ids.length;
  }

  /** Give the messages of an outcome to the turns that generated them, if it is certain which these are. */
  _readMessages(messages) {
    const main = this.segmentList.filter(({ id }) => !this.isAside(id));
    const isCompacted = main.some(({ kind }) => kind === "compaction");
    const owners = new Map();
    for (const { id, spans } of main) {
      for (const span of spans) if (span.author === "model") owners.set(span.turn, id);
    }
    for (const { id, spans } of this.segmentList) for (const span of spans) this._readTurn(id, span);
    // A compaction replaces the messages of the request, too.
    const requested = isCompacted ? 0 : this.messages.length;
    this.messages = messages.map((message, index) => {
      const later = { __proto__: null, assistant: "completion", tool: "tool" }[message.role] ?? "appended";
      return { message, kind: index < requested ? "request" : later, segment: "0", turn: 0, tool: null };
    });
    const turns = [...owners.keys()].sort((a, b) => a - b);
    const completions = this.messages.filter(({ kind }) => kind === "completion").length;
    if (!isCompacted && completions === turns.length) this._assignTurns(turns, owners);
    this.items = [...this.messages];
    this._waiting.clear();
  }

  _assignTurns(turns, owners) {
    for (const entry of this.messages) {
      if (turns.length) Object.assign(entry, { turn: turns[0], segment: owners.get(turns[0]) });
      if (entry.kind === "completion") turns.shift();
    }
  }
}

/** Whether an event only says that an agent that owns its loop has begun. */
function isStart({ event, origin, what }) {
  return event === "forked" ? origin.kind === "main" : event === "observed" && what === "start";
}

function segmentOf({ id, origin, role, trainable, verified, model, reward, spans }) {
  const segment = {
    id, kind: origin.kind, parentId: origin.parent_id, parentTokens: origin.parent_tokens,
    parting: origin.parting ?? null, role, trainable: trainable ?? null, verified, model: model ?? "",
    reward: reward ?? null, spans: [], length: 0,
  };
  for (const span of spans) addSpan(segment, span);
  return segment;
}

function addSpan(segment, json) {
  const { author, turn, token_ids: ids, policy_version: policyVersion } = json;
  const { mask_reason: reason = null, logprobs = null, policy_step: policyStep = null } = json;
  segment.spans.push({ author, reason, turn, start: segment.length, ids, logprobs, policyVersion, policyStep });
  segment.length += ids.length;
}
