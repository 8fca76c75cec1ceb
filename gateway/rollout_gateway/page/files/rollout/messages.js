/** The messages of a rollout as the model saw them, and what happened between them, in order. */
import { count, decimal, duration, fill, h, printable, reveal } from "page/dom.js";
import { blockOf, contentOf, jsonBlock } from "page/rollout/content.js";
import { selectionLink } from "page/rollout/selection.js";

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
  const entries = new WeakMap();
  let shown = 0;
  let highlighted = [];

  function update() {
    const { items } = view.model;
    const isFollowing =
      view.connection === "live" &&
      view.model.rollout.state !== "finished" &&
      !view.selection.turn &&
      isAtEnd(element.parentElement);
    const added = items.slice(shown).map((item) => (item.event ? remarkOf(view, item) : card(item)));
    shown = items.length;
    list.append(...added);
    for (const mark of marks) mark();
    waiting.textContent = waitingFor(view.model);
    if (added.length && isFollowing) element.parentElement.scrollTop = element.parentElement.scrollHeight;
  }

  function card(entry) {
    const { element: made, refresh } = cardOf(view, entry);
    made.tabIndex = cards.size ? -1 : 0;
    cards.set(entry, made);
    entries.set(made, entry);
    if (refresh) marks.push(refresh);
    return made;
  }

  function click(event) {
    const made = event.target.closest(".messages-card");
    if (!made || event.target.closest("button, a, summary") || String(getSelection())) return;
    selectMessage(view, entries.get(made));
  }

  function keydown(event) {
    const made = event.target;
    if (!made.matches(".messages-card")) return;
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (event.key === "Enter") selectMessage(view, entries.get(made));
    else if (next) move(made, next);
    else return;
    event.preventDefault();
  }

  function move(from, direction) {
    let to = from[direction];
    while (to && !to.matches(".messages-card")) to = to[direction];
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  function selected() {
    for (const each of highlighted) each.removeAttribute("aria-current");
    highlighted = selectedMessages(view)
      .map((entry) => cards.get(entry))
      .filter(Boolean);
    for (const each of highlighted) each.setAttribute("aria-current", "true");
    if (highlighted.length) reveal(highlighted[0], element.parentElement);
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
  const words = [...asked.map(({ turn }) => `turn ${turn}`), ...running.map(({ name }) => printable(name))];
  return words.length
    ? `waiting for ${words.slice(0, 8).join(", ")}${words.length > 8 ? ` and ${words.length - 8} more` : ""} …`
    : "";
}

/** Select the tokens of a message; without token ids, its turn. */
function selectMessage(view, entry) {
  if (entry.turn)
    view.select({ segment: entry.segment, turn: entry.turn, token: view.model.spanOf(entry)?.start ?? null });
}

function selectedMessages({ model, selection: { segment, turn, token } }) {
  if (!turn) return [];
  const span = token === null ? null : model.spanAt(segment, token);
  if (span) return model.messagesOf(segment, span);
  return model.messages.filter((entry) => entry.turn === turn && entry.segment === segment);
}

function cardOf(view, entry) {
  const { message, kind, tool } = entry;
  const head = h("header.messages-head");
  const element = h("article.messages-card", { data: { kind, role: message.role } }, head);
  const conversation = segmentLabel(view.model, entry.segment);
  element.classList.toggle("messages-aside", isAside(view.model, entry.segment));
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const states = calls.map(() => h("span.quiet"));
  element.append(
    ...reasoningOf(message),
    ...contentOf(message.content),
    ...calls.map((call, index) => callOf(call, states[index])),
  );
  if (kind !== "completion") {
    const name = message.name ? mark("", printable(String(message.name))) : null;
    const marks = message.role === "tool" ? toolMarks(tool, message) : [name];
    fill(head, role(message.role), conversation, marks);
    return {
      element: labelled(element, message.role === "tool" ? `result of ${toolName(tool, message)}` : message.role),
    };
  }
  let before = "";
  const refresh = () => {
    const turn = view.model.turns.get(entry.turn);
    const now = JSON.stringify([turn, view.model.outcome !== null]);
    if (now === before) return;
    before = now;
    // Nothing is known of a turn whose events and tokens were not saved.
    fill(head, role(message.role), conversation, turn && turnMarks(turn));
    turn?.tools.forEach((each) => states[each.index] && fill(states[each.index], callState(each)));
  };
  return { element: labelled(element, `${message.role}, turn ${entry.turn}`), refresh };
}

function labelled(element, label) {
  element.setAttribute("aria-label", label);
  return element;
}

function role(name) {
  return h("strong.messages-role", {}, printable(name));
}

function mark(kind, ...children) {
  return h(`span.messages-mark${kind && `.${kind}`}`, {}, ...children);
}

function turnMarks({ turn, answered, generatedTokens, finishReason, reward, masked, attempts, elapsedMs }) {
  return [
    mark("", `turn ${turn}`),
    mark("", `${count(generatedTokens)} tokens`),
    answered ? mark("", duration(elapsedMs)) : null,
    attempts > 1 ? mark("warn", `${attempts} requests`) : null,
    finishReason === "length" ? mark("warn", "cut by its length limit") : null,
    finishReason && !["length", "stop", "tool_calls"].includes(finishReason) ? mark("", printable(finishReason)) : null,
    reward === null ? null : mark("good", `reward ${decimal(reward)}`),
    masked ? mark("bad", `masked: ${printable(masked)}`) : null,
  ];
}

function toolName(tool, message) {
  return printable(String(tool?.name ?? message.name ?? "a tool"));
}

// What the server appends to a result that is too long for the conversation.
const CUT = /\n?\[Cut: the last ([\d,]+) of ([\d,]+) characters are missing\]$/;

function toolMarks(tool, message) {
  const last = typeof message.content === "string" ? message.content : message.content?.at?.(-1)?.text;
  const [, missing, all] = CUT.exec(last ?? "") ?? [];
  return [
    mark("", h("b", {}, toolName(tool, message)), printable(` ${message.tool_call_id ?? ""}`)),
    tool?.elapsedMs === undefined ? null : mark("", duration(tool.elapsedMs)),
    tool?.failed ? mark("bad", "failed") : null,
    missing ? mark("warn", `cut: ${missing} of ${all} characters are missing`) : null,
  ];
}

function callState(tool) {
  if (!tool.returned) return "running";
  return [duration(tool.elapsedMs), tool.failed ? h("span.bad", {}, " failed") : null];
}

function reasoningOf(message) {
  const text = message.reasoning_content ?? message.reasoning;
  return text ? [h("div.messages-reasoning", { "aria-label": "Reasoning" }, blockOf(String(text)))] : [];
}

function callOf(call, state) {
  const { name, arguments: given } = call?.function ?? {};
  const text = typeof given === "string" ? given : JSON.stringify(given ?? null);
  const head = h(
    "div.messages-head",
    {},
    mark("", "call ", h("b", {}, printable(String(name))), printable(` ${call?.id ?? ""}`)),
    state,
  );
  return h("div.messages-call", {}, head, jsonBlock(text));
}

/** Whether a conversation is beside the one before it, and does not go on with it. */
function isAside(model, id) {
  const { origin, kind = origin?.kind, role: part = "agent" } = model.conversation(id);
  return ["subagent", "branch"].includes(kind) || part !== "agent";
}

/** "segment 1 · critic" for conversations beside the main one, and for what comes after a drift. */
function segmentLabel(model, id) {
  if (id === "0" || id === "") return null;
  const { role: part = "agent", origin, kind } = model.conversation(id);
  return mark(
    "messages-segment",
    [`segment ${id}`, part === "agent" ? null : printable(part), kind ?? origin?.kind].filter(Boolean).join(" · "),
  );
}

const REMARKS = {
  note: ({ code, text }) => [`note `, h("b", {}, printable(code)), ` ${printable(text)}`],
  resumed: ({ times }) => `resumed after a restart of the server${times > 1 ? ` (${times} times)` : ""}`,
  given_up: ({ turn }) => `turn ${turn} was given up: its completion is in no sample`,
  observed: ({ what, value }) => [
    `${what} `,
    h("code", {}, value === undefined ? "" : printable(JSON.stringify(value))),
  ],
  forked: ({ segment_id, of_segment_id, origin, role: part, trainable, model }) =>
    `conversation ${segment_id} opened from ${of_segment_id}: ${origin.kind}, ${printable(part)}` +
    `${trainable === false ? ", does not train" : ""}${model ? `, by the model ${printable(model)}` : ""}`,
  capture_settled: ({ report }) =>
    `calls of the agent: ${Object.entries(report)
      .filter(([, value]) => value)
      .map(([name, value]) => `${decimal(value)} ${name}`)
      .join(", ")}`,
};

function remarkOf(view, event) {
  if (event.event === "model_called") return judgeOf(event);
  if (event.event === "drift_found") return driftOf(view, event);
  return h("div.messages-remark", {}, REMARKS[event.event](event));
}

function judgeOf({ model, message, finish_reason, generated_tokens, attempts, elapsed_ms }) {
  const head = h(
    "header.messages-head",
    {},
    role(`model ${model}`),
    mark("", `${count(generated_tokens)} tokens`),
    mark("", duration(elapsed_ms)),
    attempts > 1 ? mark("warn", `${attempts} requests`) : null,
    finish_reason === "length" ? mark("warn", "cut") : null,
    mark("", "in no sample"),
  );
  return h("article.messages-judge", {}, head, ...reasoningOf(message), ...contentOf(message.content));
}

function driftOf(view, { turn, kind, index, expected_text, reported_text }) {
  const place = selectionLink(view, { turn, token: index }, `token ${count(index)}`);
  const texts =
    expected_text || reported_text
      ? h(
          "div.messages-drift",
          {},
          h("span", {}, "expected "),
          blockOf(expected_text),
          h("span", {}, "reported "),
          blockOf(reported_text),
        )
      : null;
  return h("div.messages-remark", {}, h("b.warn", {}, "drift "), `${kind} in turn ${turn} at `, place, texts);
}

/** The tools that the agent offers, once they are loaded. Saved rollouts may not know them. */
function toolsOffered(view) {
  const place = h("div");
  const { agent } = view.model.rollout.spec;
  const show = ({ agents }) => {
    const tools = agents.find((each) => (agent ? each.name === agent : each.default))?.tools ?? [];
    if (!tools.length) return;
    const items = tools.map(({ function: { name, description, parameters } }) =>
      h(
        "li",
        {},
        h("b.mono", {}, printable(name)),
        " ",
        printable(description ?? ""),
        jsonBlock(JSON.stringify(parameters ?? {})),
      ),
    );
    fill(
      place,
      h(
        "details.messages-tools",
        {},
        h("summary", {}, `Tools that the agent offers (${tools.length})`),
        h("ul", {}, items),
      ),
    );
  };
  Promise.resolve(view.source.agents?.()).then(
    (found) => found && show(found),
    () => {},
  );
  return place;
}
