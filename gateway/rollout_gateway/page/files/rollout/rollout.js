/** One rollout: why it ended, messages beside tokens, segments and times, live while it runs. */
import { isTransient, pause } from "page/api.js";
import { fill, h, openDialog } from "page/dom.js";
import { errorLine, isForElsewhere, poll } from "page/list/live.js";
import { exportMenu } from "page/rollout/export.js";
import { messagesPart } from "page/rollout/messages.js";
import { RolloutModel } from "page/rollout/model.js";
import { completed, linkTo, NOTHING, selectionOf } from "page/rollout/selection.js";
import { summaryPart } from "page/rollout/summary.js";
import { timelinePart } from "page/rollout/timeline.js";
import { tokensPart } from "page/tokens/tokens.js";
import { treePart } from "page/rollout/tree.js";

// Beyond so many messages, the page is drawn less often.
const MANY = 1000;
const PAUSE_MS = 250;

/**
 * What the parts of the page share. Each part is a function `(view) => {element, update(), selected()}`: `update` is
 * called after the model has changed, at most once per frame, and `selected` after the selection has.
 *
 * @typedef {{source: Object, uid: string, model: RolloutModel, selection: Selection,
 *   select: (selection: Selection) => void, connection: string}} View - `connection`: "connecting", "live",
 *   "reconnecting", "lost" or "finished"
 * @typedef {{segment: string, turn: number, token: number|null}} Selection - turn 0: none; token: index in the segment
 */

/**
 * @param {Object} source - where rollouts come from
 * @param {string} uid
 * @param {URLSearchParams} parameters - `segment`, `turn` and `token` of the link
 * @param {AbortSignal} signal - the page is closed
 * @returns {{title: string, element: HTMLElement}}
 */
export function rolloutPage(source, uid, parameters, signal) {
  const { element } = new RolloutPage(source, uid, selectionOf(parameters), signal);
  return { title: `Rollout ${uid}`, element };
}

class RolloutPage {
  constructor(source, uid, selection, signal) {
    this._signal = signal;
    this._problem = errorLine();
    const loading = h("p.quiet", { role: "status" }, "Loading the rollout");
    this.element = h("article.rollout", {}, this._problem.element, loading);
    const select = (wanted) => this._select(wanted);
    this.view = { source, uid, model: null, selection, select, connection: "connecting" };
    this._cancel = h("button", { on: { click: () => askToCancel(this.view) } }, "Cancel the rollout");
    this._parts = [];
    this._isFrameAsked = false;
    // What the link names may arrive later than the page: it is scrolled to once it is there.
    this._isSought = selection.turn > 0 || selection.token !== null;
    addEventListener("keydown", (event) => this._onKey(event), { signal });
    this._start();
  }

  async _start() {
    const { source, uid } = this.view;
    try {
      this._show(new RolloutModel(await this._read("messages")));
      if (!source.isSaved) this._poll();
      await this._follow();
    } catch (error) {
      if (this._signal.aborted) return;
      this._setConnection("lost");
      if (!this.view.model) fill(this.element);
      this.element.prepend(this._problem.element);
      this._problem.show(error);
    }
  }

  /** Read the rollout, as soon as the server is there. */
  async _read(view) {
    for (;;) {
      try {
        return await this.view.source.rollout(this.view.uid, view);
      } catch (error) {
        if (this._signal.aborted || !isTransient(error)) throw error;
        this._problem.show(error);
        await pause();
      }
    }
  }

  /** Follow the events. If they are not stored any more, show the outcome alone. */
  async _follow() {
    try {
      await this._addEvents(0);
      if (this.view.model.sequence) return;
    } catch (error) {
      if (error.code !== "OUT_OF_RANGE" && error.status !== 404) throw error;
    }
    if (this._signal.aborted) return;
    const rollout = await this._read("full");
    this._show(RolloutModel.ofOutcome(rollout));
    if (rollout.state !== "finished") await this._addEvents(rollout.last_sequence);
    this._setConnection("finished");
  }

  async _addEvents(after) {
    const { source, uid } = this.view;
    const onConnection = (connected) => this._setConnection(connected ? "live" : "reconnecting");
    for await (const event of source.events(uid, after, this._signal, onConnection)) {
      this.view.model.add(event);
      this._changed();
    }
    if (this.view.model.outcome) this._setConnection("finished");
  }

  /** Ask for what no event tells: the place in the queue, the resources used so far, the delivery of the outcome. */
  _poll() {
    const { source, uid } = this.view;
    const settled = new AbortController();
    const step = async () => {
      const { state, metrics, delivery, finish_time } = await source.rollout(uid, "basic");
      Object.assign(this.view.model.rollout, { state, metrics, delivery, finish_time });
      this._changed();
    };
    // That the server is away is said by the stream of events.
    const done = (error) => (error?.status === 404 || isSettled(this.view.model)) && settled.abort();
    poll(step, done, AbortSignal.any([this._signal, settled.signal]));
  }

  _setConnection(connection) {
    this.view.connection = connection;
    this._changed();
  }

  _changed() {
    if (this._isFrameAsked) return;
    this._isFrameAsked = true;
    const draw = () => {
      this._isFrameAsked = false;
      if (!this._signal.aborted) this._update();
    };
    setTimeout(() => requestAnimationFrame(draw), this.view.model?.items.length > MANY ? PAUSE_MS : 0);
  }

  _show(model) {
    const { view } = this;
    view.model = model;
    this._parts = [summaryPart, timelinePart, treePart, messagesPart, tokensPart].map((part) => part(view));
    const [summary, timeline, tree, messages, tokens] = this._parts;
    summary.actions.append(this._cancel, exportMenu(view));
    const hint = h("span.rollout-hint", {}, "j and k move between turns, Escape selects none");
    const columns = h("div.rollout-columns", {},
      column("Messages", messages.element, hint), column("Tokens", tokens.element));
    fill(this.element, summary.element, tabs({ Timeline: timeline.element, Segments: tree.element }), columns);
    this._update();
  }

  _update() {
    if (!this._parts.length) return;
    const { source, model } = this.view;
    this._cancel.hidden = Boolean(source.readOnly || model.outcome || model.rollout.state === "finished");
    for (const part of this._parts) part.update();
    if (this._isSought) this._seek();
  }

  _seek() {
    const { model, selection } = this.view;
    const wanted = completed(model, selection);
    const turn = model.turns.get(wanted.turn);
    const isThere = wanted.token === null ? turn && (turn.answered || turn.ended || model.outcome)
      : model.spanAt(wanted.segment, wanted.token);
    if (!isThere) return;
    this._isSought = false;
    this.element.querySelector(".rollout-columns").scrollIntoView();
    this._select(wanted);
  }

  _select(wanted) {
    this.view.selection = completed(this.view.model, wanted);
    // Not a new entry: the Back button leaves the page.
    history.replaceState(history.state, "", linkTo(this.view.uid, this.view.selection));
    for (const part of this._parts) part.selected();
  }

  _onKey(event) {
    if (!this.view.model || isForElsewhere(event)) return;
    const step = { j: 1, k: -1 }[event.key];
    if (step) this._moveTurn(step);
    else if (event.key === "Escape" && this.view.selection.turn) this._select(NOTHING);
    else return;
    event.preventDefault();
  }

  _moveTurn(step) {
    const turns = [...this.view.model.turns.keys()].sort((a, b) => a - b);
    const at = turns.indexOf(this.view.selection.turn);
    const turn = at < 0 ? turns.at(step > 0 ? 0 : -1) : turns[at + step];
    if (turn) this._select({ ...NOTHING, turn });
  }
}

function isSettled({ outcome, rollout }) {
  return outcome && rollout.state === "finished" && rollout.delivery?.state !== "pending";
}

function column(name, element, hint = null) {
  const head = h("header.rollout-head", {}, h("h2", {}, name), hint);
  return h("section.rollout-column", { "aria-label": name, tabIndex: 0 }, head, element);
}

/** Tabs as in the ARIA Authoring Practices: arrow keys move, the panel of the chosen tab is shown. */
function tabs(panels) {
  const names = Object.keys(panels);
  const buttons = names.map((name, index) => {
    const properties = { id: `tab-${index}`, role: "tab", "aria-controls": `panel-${index}` };
    return h("button", { ...properties, on: { click: () => choose(index) } }, name);
  });
  const shown = names.map((name, index) => {
    const properties = { id: `panel-${index}`, role: "tabpanel", "aria-labelledby": `tab-${index}` };
    return h("div.rollout-panel", { ...properties, tabIndex: 0 }, panels[name]);
  });
  const choose = (chosen) => {
    buttons.forEach((button, index) => {
      button.ariaSelected = String(index === chosen);
      button.tabIndex = index === chosen ? 0 : -1;
      shown[index].hidden = index !== chosen;
    });
  };
  const keydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = (buttons.indexOf(event.target) + step + buttons.length) % buttons.length;
    choose(next);
    buttons[next].focus();
  };
  choose(0);
  return h("section.rollout-tabs", {}, h("div", { role: "tablist", "aria-label": "Parts of the rollout", on: { keydown } }, buttons), shown);
}

function askToCancel({ source, uid }) {
  const reason = h("input", { name: "reason", maxLength: 200, autocomplete: "off", value: "cancelled from the page" });
  const problem = errorLine();
  const submit = async (event) => {
    event.preventDefault();
    const error = await source.cancel(uid, reason.value).then(() => null, (refusal) => refusal);
    if (error) problem.show(error);
    else dialog.close();
  };
  const dialog = openDialog("Cancel this rollout", h("form", { on: { submit } },
    h("h2", {}, "Cancel this rollout?"),
    h("p", {}, "It ends with what it has so far. Its samples do not train, unless its request says so."),
    h("label", {}, "Reason ", reason),
    problem.element,
    h("div.rollout-buttons", {},
      h("button", {}, "Cancel the rollout"),
      h("button", { type: "button", on: { click: () => dialog.close() } }, "Keep it running"))));
}
