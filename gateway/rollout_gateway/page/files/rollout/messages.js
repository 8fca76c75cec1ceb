/** The messages of a rollout as the model saw them, and what happened between them, in order. */
import { count, decimal, duration, fill, h, reveal } from "page/dom.js";
import { blockOf, contentOf, jsonBlock } from "page/rollout/content.js";
import { selectionLink } from "page/rollout/selection.js";

// How many completions and tools are named that a rollout waits for.
const MOST_WAITING = 8;

/** @typedef {import("page/rollout/model.js").ModelMessage} ModelMessage */

/**
 * The part is only appended to, so that long rollouts stay fast; what becomes known later is written into the heads.
 * @param {import("page/rollout/rollout.js").View} view
 */
export function messagesPart(view) {
  const list = h("div.messages-list", { role: "feed", "aria-label": "Messages", on: { click, keydown } });
  const waiting = h("p.messages-remark");
  const element = h("div.messages", {}, toolsOffered(view), list, waiting);
  /** @type {Map<ModelMessage, HTMLElement>} */
  const cards = new Map();
  const marks = [];
  let shown = 0;
  let last;
  let current = new Set();

  function update() {
    const { items } = view.model;
    const isRunning = view.connection === "live" && view.model.rollout.state !== "finished";
    const isFollowing = isRunning && !view.selection.turn && isAtEnd(element.parentElement);
    if (items[shown - 1] !== last) restart();
    const added = items.slice(shown).map((item) => (item.event ? remarkOf(view, item) : card(item)));
    shown = items.length;
    last = items[shown - 1];
    list.append(...added);
    for (const mark of marks) mark();
    markCurrent();
    fill(waiting, waitingFor(view.model));
    if (added.length && isFollowing) element.parentElement.scrollTop = element.parentElement.scrollHeight;
  }

  /** An agent that owns its loop replaces the messages of the request. */
  function restart() {
    fill(list);
    cards.clear();
    [shown, marks.length] = [0, 0];
  }

  function card(entry) {
    const { element: made, refresh } = cardOf(view, entry);
    made.tabIndex = cards.size ? -1 : 0;
    cards.set(entry, made);
    made.entry = entry;
    marks.push(refresh);
    return made;
  }

  function click(event) {
    const made = event.target.closest(".messages-card");
    if (!made || event.target.closest("button, a, summary") || String(getSelection())) return;
    selectMessage(view, made.entry);
  }

  function keydown(event) {
    const made = event.target;
    if (!made.matches(".messages-card")) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter") selectMessage(view, made.entry);
    else if (step) move(made, step);
    else return;
    event.preventDefault();
  }

  function move(from, step) {
    const all = [...list.querySelectorAll(".messages-card")];
    const to = all[all.indexOf(from) + step];
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  /** Mark the selected messages. Those of a turn that is still running arrive after the selection. */
  function markCurrent() {
    const marked = new Set(selectedMessages(view).map((entry) => cards.get(entry)).filter(Boolean));
    for (const each of current) if (!marked.has(each)) each.ariaCurrent = null;
    for (const each of marked) each.ariaCurrent = "true";
    current = marked;
  }

  function selected() {
    markCurrent();
    const [first] = current;
    if (first) reveal(first, element.parentElement);
  }

  return { element, update, selected };
}

function isAtEnd(scroller) {
  return scroller && scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
}

/** What a rollout waits for: completions and tools. @returns {string} */
function waitingFor({ outcome, turns }) {
  if (outcome) return "";
  const asked = [...turns.values()].filter((turn) => turn.asked && !turn.answered && !turn.givenUp);
  const running = [...turns.values()].flatMap((turn) => turn.tools).filter((tool) => !tool.returned);
  const words = [...asked.map(({ turn }) => `turn ${turn}`), ...running.map(({ name }) => name)];
  const more = words.length > MOST_WAITING ? ` and ${words.length - MOST_WAITING} more` : "";
  return words.length ? `waiting for ${words.slice(0, MOST_WAITING).join(", ")}${more} …` : "";
}

/** Select the tokens of a message; without token ids, its turn. */
function selectMessage(view, entry) {
  const { segment, turn } = entry;
  if (turn) view.select({ segment, turn, token: view.model.spanOf(entry)?.start ?? null });
}

function selectedMessages({ model, selection: { segment, turn, token } }) {
  if (!turn) return [];
  const span = token === null ? null : model.spanAt(segment, token);
  if (span) return model.messagesOf(segment, span);
  return model.messages.filter((entry) => entry.turn === turn && entry.segment === segment);
}

/** The card of a message; `refresh` writes into its head what becomes known later. */
function cardOf(view, entry) {
  const { message, kind, tool } = entry;
  const isCompletion = kind === "completion";
  const isResult = message.role === "tool";
  const label = isCompletion && entry.turn ? `${message.role}, turn ${entry.turn}`
    : isResult ? `result of ${toolName(tool, message)}` : message.role;
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const states = calls.map(() => h("span.quiet"));
  const head = h("header.messages-head");
  const element = h("article.messages-card", { data: { kind, role: message.role }, "aria-label": label },
    head, reasoningOf(message), contentOf(message.content), calls.map((call, index) => callOf(call, states[index])));
  const marks = isResult ? toolMarks(tool, message) : message.name && mark("", message.name);
  let before = "";
  const refresh = () => {
    // A drift takes messages into its segment. Nothing is known of a turn whose events and tokens were not saved.
    const { segment } = entry;
    const turn = isCompletion ? view.model.turns.get(entry.turn) : null;
    const now = JSON.stringify([segment, turn, view.model.outcome !== null]);
    if (now === before) return;
    before = now;
    element.classList.toggle("messages-aside", view.model.isAside(segment));
    const made = isCompletion ? turn && turnMarks(turn) : marks;
    fill(head, h("strong", {}, message.role), segmentLabel(view.model, segment), made);
    turn?.tools.forEach((each) => states[each.index] && fill(states[each.index], callState(each)));
  };
  return { element, refresh };
}

function mark(kind, ...children) {
  return h(`span.messages-mark${kind && `.${kind}`}`, {}, ...children);
}

function turnMarks({ turn, answered, generatedTokens, finishReason, reward, masked, attempts, elapsedMs }) {
  const isExpected = ["", "length", "stop", "tool_calls"].includes(finishReason);
  return [
    mark("", `turn ${turn}`),
    mark("", `${count(generatedTokens)} tokens`),
    answered && mark("", duration(elapsedMs)),
    attempts > 1 && mark("warn", `${attempts} requests`),
    finishReason === "length" && mark("warn", "cut by its length limit"),
    !isExpected && mark("", finishReason),
    reward !== null && mark("good", `reward ${decimal(reward)}`),
    masked !== "" && mark("bad", `masked: ${masked}`),
  ];
}

function toolName(tool, message) {
  return String(tool?.name ?? message.name ?? "a tool");
}

// What the server appends to a result that is too long for the conversation.
const CUT = /\n?\[Cut: the last ([\d,]+) of ([\d,]+) characters are missing\]$/;

function toolMarks(tool, message) {
  const last = typeof message.content === "string" ? message.content : message.content?.at?.(-1)?.text;
  const [, missing, all] = CUT.exec(last ?? "") ?? [];
  return [
    mark("", h("b", {}, toolName(tool, message)), ` ${message.tool_call_id ?? ""}`),
    tool?.elapsedMs !== undefined && mark("", duration(tool.elapsedMs)),
    tool?.failed && mark("bad", "failed"),
    missing && mark("warn", `cut: ${missing} of ${all} characters are missing`),
  ];
}

function callState(tool) {
  if (!tool.returned) return "running";
  return [duration(tool.elapsedMs), tool.failed && h("span.bad", {}, " failed")];
}

function reasoningOf(message) {
  const text = message.reasoning_content ?? message.reasoning;
  return text && h("div.messages-reasoning", { "aria-label": "Reasoning" }, blockOf(String(text)));
}

function callOf(call, state) {
  const { name, arguments: given } = call?.function ?? {};
  const text = typeof given === "string" ? given : JSON.stringify(given ?? null);
  const words = mark("", "call ", h("b", {}, name), ` ${call?.id ?? ""}`);
  return h("div.messages-call", {}, h("div.messages-head", {}, words, state), jsonBlock(text));
}

/** "segment 1 · critic" for conversations beside the main one, and for what comes after a drift. */
function segmentLabel(model, id) {
  if (id === "0" || id === "") return null;
  const { kind, role: part } = model.conversation(id);
  const words = [`segment ${id}`, part !== "agent" && part, kind];
  return mark("messages-segment", words.filter(Boolean).join(" · "));
}

const REMARKS = {
  note: ({ code, text }) => ["note ", h("b", {}, code), ` ${text}`],
  resumed: ({ times }) => `resumed after a restart of the server${times > 1 ? ` (${times} times)` : ""}`,
  given_up: ({ turn }) => `turn ${turn} was given up: its completion is in no sample`,
  observed: ({ what, value }) => [`${what} `, h("code", {}, JSON.stringify(value))],
  forked: ({ segment_id, of_segment_id, origin, role: part, trainable, model }) =>
    `conversation ${segment_id} opened from ${of_segment_id}: ${origin.kind}, ${part}` +
    `${trainable === false ? ", does not train" : ""}${model ? `, by the model ${model}` : ""}`,
  capture_settled: ({ report }) => {
    const numbers = Object.entries(report).filter(([, value]) => value);
    return `calls of the agent: ${numbers.map(([name, value]) => `${decimal(value)} ${name}`).join(", ")}`;
  },
};

function remarkOf(view, event) {
  if (event.event === "model_called") return judgeOf(event);
  if (event.event === "drift_found") return driftOf(view, event);
  return h("div.messages-remark", {}, REMARKS[event.event](event));
}

function judgeOf({ model, message, finish_reason, generated_tokens, attempts, elapsed_ms }) {
  const head = h("header.messages-head", {},
    h("strong", {}, `model ${model}`),
    mark("", `${count(generated_tokens)} tokens`),
    mark("", duration(elapsed_ms)),
    attempts > 1 && mark("warn", `${attempts} requests`),
    finish_reason === "length" && mark("warn", "cut"),
    mark("", "in no sample"));
  return h("article.messages-judge", {}, head, reasoningOf(message), contentOf(message.content));
}

function driftOf(view, { turn, kind, index, expected_text, reported_text }) {
  const place = selectionLink(view, { turn, token: index }, `token ${count(index)}`);
  const side = (name, text) => [h("span", {}, name), blockOf(text)];
  const texts = (expected_text || reported_text) &&
    h("div.messages-drift", {}, side("expected ", expected_text), side("reported ", reported_text));
  return h("div.messages-remark", {}, h("b.warn", {}, "drift "), `${kind} in turn ${turn} at `, place, texts);
}

/** The tools that the agent offers, once they are loaded. Saved rollouts may not know them. */
function toolsOffered(view) {
  const place = h("div");
  const { agent } = view.model.rollout.spec;
  const show = ({ agents }) => {
    const tools = agents.find((each) => (agent ? each.name === agent : each.default))?.tools ?? [];
    if (!tools.length) return;
    const item = ({ function: { name, description, parameters } }) =>
      h("li", {}, h("b.mono", {}, name), ` ${description ?? ""}`, jsonBlock(JSON.stringify(parameters ?? {})));
    const summary = h("summary", {}, `Tools that the agent offers (${tools.length})`);
    fill(place, h("details.messages-tools", {}, summary, h("ul", {}, tools.map(item))));
  };
  view.source.agents().then(show, () => {});
  return place;
}
