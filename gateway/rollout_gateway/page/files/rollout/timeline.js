/** When what happened: a lane each for the queue, the engine, tools, further models and the delivery of the outcome. */
import { count, decimal, duration, fill, h, printable, svg } from "page/dom.js";

const ROW = 18;
const TICKS = 8;
// The least width of a bar in percent, so that a short one can be seen.
const LEAST = 0.3;
// Many bars are drawn less often.
const MANY = 500;
const PAUSE_MS = 1000;
// The largest part of the axis beyond the rollout itself: a delivery may take hours.
const DELIVERY = 0.25;
const NO_TIMES = "There are no times: the events are not stored any more.";
const HINT = "Point at a bar for its numbers. The arrow keys move between bars, Enter selects the turn.";

/**
 * @typedef {{lane: string, start: number, stop: number, isOpen: boolean, isBad: boolean, text: string, turn: number,
 *   row: number, segment: string}} Bar - times in milliseconds since 1970; `isOpen`: not ended yet
 */

/** @param {import("page/rollout/rollout.js").View} view */
export function timelinePart(view) {
  const names = svg("svg", { class: "timeline-names", "aria-hidden": "true" });
  const label = "Timeline; arrow keys move between the bars, Enter selects the turn";
  const [ruler, boxes] = [svg("g", {}), svg("g", {})];
  const chart = svg("svg", { role: "group", "aria-label": label }, ruler, boxes);
  const told = h("p.timeline-told");
  const on = { click: choose, keydown, pointerover: tell, focusin: tell };
  const element = h("div.timeline", { on }, names, chart, told);
  let bars = [];
  let drawn = "";
  let drawnAt = 0;
  let bar;

  function update() {
    const { model } = view;
    const isRunning = !model.outcome || model.rollout.delivery?.state === "pending";
    const { delivery, metrics } = model.rollout;
    const state = JSON.stringify([model.sequence, delivery, metrics?.queued_ms, isRunning && Date.now()]);
    if (state === drawn || (bars.length > MANY && isRunning && Date.now() - drawnAt < PAUSE_MS)) return;
    [drawn, drawnAt] = [state, Date.now()];
    bars = barsOf(model);
    const restarts = model.items.filter((item) => item.event === "resumed").map((item) => Date.parse(item.time));
    draw({ names, chart, ruler, boxes }, bars, restarts);
    if (!bar) fill(told, model.isWhole ? HINT : NO_TIMES);
    selected();
  }

  function selected() {
    for (const each of boxes.children) {
      const isChosen = view.selection.turn > 0 && barAt(each).turn === view.selection.turn;
      each.ariaCurrent = isChosen ? "true" : null;
    }
  }

  function barAt(node) {
    return bars[node?.closest?.(".timeline-bar")?.dataset.index];
  }

  function tell(event) {
    bar = barAt(event.target) ?? bar;
    if (bar) fill(told, bar.text);
  }

  function choose(event) {
    const bar = barAt(event.target);
    if (bar?.turn) view.select({ segment: bar.segment, turn: bar.turn, token: null });
  }

  function keydown(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const index = bars.indexOf(barAt(event.target));
    if (index < 0 || (!step && event.key !== "Enter")) return;
    event.preventDefault();
    if (step) boxes.children[index + step]?.focus();
    else choose(event);
  }

  return { element, update, selected };
}

/** @param {import("page/rollout/model.js").RolloutModel} model @returns {Bar[]} by their starts */
function barsOf(model) {
  const { accepted, finished, rollout } = model;
  if (!accepted) return [];
  const end = finished ? Date.parse(finished) : Math.max(Date.now(), Date.parse(accepted.time));
  const bars = [queueBar(model, end), ...model.items.filter((item) => item.event === "model_called").map(modelBar)];
  for (const turn of model.turns.values()) {
    if (turn.asked) bars.push(turnBar(turn, end, model.outcome), ...turn.tools.map((tool) => toolBar(turn, tool, end)));
  }
  if (rollout.delivery && finished) bars.push(deliveryBar(rollout.delivery, end, end - Date.parse(accepted.time)));
  return stacked(bars.filter(Boolean).sort((a, b) => a.start - b.start));
}

const BAR = { isOpen: false, isBad: false, turn: 0, segment: "" };

function queueBar({ accepted, rollout, outcome, turns }, end) {
  const start = Date.parse(accepted.time);
  const queued = (outcome?.metrics ?? rollout.metrics)?.queued_ms ?? 0;
  const isOpen = rollout.state === "queued" && !turns.size;
  if (!isOpen && queued < 1) return null;
  const stop = isOpen ? end : start + queued;
  return { ...BAR, lane: "queue", start, stop, isOpen, text: `in the queue for ${duration(stop - start)}` };
}

function turnBar(turn, end, outcome) {
  const start = Date.parse(turn.asked);
  const stop = Date.parse(turn.answered ?? turn.ended ?? "") || end;
  const isOpen = !turn.answered && !turn.ended;
  const perSecond = Math.round((turn.generatedTokens / turn.elapsedMs) * 1000);
  const speed = turn.elapsedMs > 0 ? `, ${decimal(perSecond)} tokens/s` : "";
  const result = turn.answered
    ? `: ${count(turn.generatedTokens)} tokens after ${count(turn.promptTokens)}${speed}, ${turn.finishReason}`
    : `: ${turn.givenUp ? "given up" : "no completion"}`;
  const requests = turn.attempts > 1 ? `, ${turn.attempts} requests` : "";
  const text = `turn ${turn.turn}, engine ${duration(stop - start)}${requests}${result}`;
  const isBad = turn.attempts > 1 || turn.givenUp || (isOpen && outcome?.end === "failure");
  return { lane: "engine", start, stop, isOpen, isBad, text, turn: turn.turn, segment: turn.segment };
}

function toolBar({ turn, segment }, tool, end) {
  const start = Date.parse(tool.started);
  const stop = Date.parse(tool.returned ?? "") || end;
  const state = tool.failed ? ", failed" : tool.returned ? "" : ", has not returned";
  const text = `turn ${turn}, tool ${tool.name} ${tool.callId}: ${duration(stop - start)}${state}`;
  return { lane: "tools", start, stop, isOpen: !tool.returned, isBad: tool.failed, text, turn, segment };
}

function modelBar({ time, elapsed_ms, model, generated_tokens, attempts }) {
  const stop = Date.parse(time);
  const start = stop - elapsed_ms;
  const text = `model ${model}: ${duration(elapsed_ms)}, ${count(generated_tokens)} tokens, ${attempts} requests`;
  return { ...BAR, lane: "models", start, stop, isBad: attempts > 1, text };
}

function deliveryBar({ state, attempts, error, end_time, next_attempt_time }, start, whole) {
  const isOpen = state === "pending";
  const stop = isOpen ? Math.max(Date.now(), start) : Math.max(Date.parse(end_time ?? "") || start, start);
  const next = isOpen && next_attempt_time ? `, next at ${new Date(next_attempt_time).toLocaleTimeString()}` : "";
  const reason = error ? `; ${error}` : "";
  const text = `delivery ${state}: ${attempts} attempts in ${duration(stop - start)}${next}${reason}`;
  const drawnStop = Math.min(stop, start + Math.max(whole, 1) * DELIVERY);
  const isBad = state === "refused" || state === "expired";
  return { ...BAR, lane: "delivery", start, stop: drawnStop, isOpen, isBad, text };
}

/** Give each bar the first row of its lane that is free at its start. */
function stacked(bars) {
  const free = {};
  const least = ((latest(bars) - bars[0]?.start) * LEAST) / 100;
  for (const bar of bars) {
    const ends = (free[bar.lane] ??= []);
    const at = ends.findIndex((end) => end <= bar.start);
    bar.row = at < 0 ? ends.length : at;
    ends[bar.row] = Math.max(bar.stop, bar.start + least);
  }
  return bars;
}

function latest(bars) {
  return bars.reduce((time, bar) => Math.max(time, bar.stop), 0);
}

function draw({ names, chart, ruler, boxes }, bars, marks) {
  const start = bars[0]?.start ?? 0;
  const stop = Math.max(latest(bars), start + 1);
  const percent = (time) => `${(((time - start) / (stop - start)) * 100).toFixed(3)}%`;
  const tops = {};
  let height = ROW;
  for (const lane of ["queue", "engine", "tools", "models", "delivery"]) {
    const rows = bars.reduce((most, bar) => (bar.lane === lane ? Math.max(most, bar.row + 1) : most), 0);
    if (rows) [tops[lane], height] = [height, height + rows * ROW + 4];
  }
  for (const each of [names, chart]) each.setAttribute("height", height);
  fill(names, Object.entries(tops).map(([lane, top]) => svg("text", { x: 0, y: top + 12 }, lane)));
  const line = (time, properties = {}) =>
    svg("line", { ...properties, x1: percent(time), x2: percent(time), y1: ROW - 4, y2: height });
  const tick = (ms) => [line(start + ms), svg("text", { x: percent(start + ms), y: 10 }, duration(ms))];
  fill(ruler,
    bars.length > 0 && ticksOf(stop - start).map(tick),
    marks.map((time) => line(time, { class: "timeline-mark" })));
  // Bars change in place: an element that is replaced loses the focus.
  while (boxes.children.length > bars.length) boxes.lastChild.remove();
  bars.forEach((bar, index) => {
    const made = boxes.children[index] ?? boxes.appendChild(barElement(index));
    showBar(made, bar, percent, tops[bar.lane] + bar.row * ROW, stop - start);
  });
}

function barElement(index) {
  const properties = { class: "timeline-bar", role: "button", tabindex: index ? -1 : 0, "data-index": index };
  return svg("g", properties, svg("rect", { height: ROW - 4 }));
}

function showBar(element, bar, percent, top, total) {
  element.setAttribute("aria-label", printable(bar.text));
  element.dataset.lane = bar.lane;
  element.toggleAttribute("data-open", bar.isOpen);
  element.toggleAttribute("data-bad", bar.isBad);
  const width = `${Math.max(((bar.stop - bar.start) / total) * 100, LEAST).toFixed(3)}%`;
  const place = { x: percent(bar.start), y: top, width };
  for (const [name, value] of Object.entries(place)) element.firstChild.setAttribute(name, value);
}

/** @returns {number[]} round times from 0 to at most `total`, in milliseconds */
function ticksOf(total) {
  const rough = total / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
  // The last label would not fit.
  return Array.from({ length: TICKS + 1 }, (_, index) => index * step).filter((ms) => ms < total * 0.96);
}
