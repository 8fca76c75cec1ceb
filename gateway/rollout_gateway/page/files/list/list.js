/** The list of rollouts: counts and rates of the server, filters, and one page of rollouts, kept up to date. */
import { ageCell, columnsOf } from "page/list/cells.js";
import { count, h } from "page/dom.js";
import { errorLine, figures, isForElsewhere, LiveTable, poll, setText } from "page/list/live.js";
import { RolloutPage } from "page/list/pages.js";

const STATES = ["queued", "running", "finished"];
/** The filters by their names in the REST API. */
const LABELS = { state: "State", agent: "Agent", group_id: "Group", failure_class: "Failure class", text: "Search" };
const FAILURE_CLASSES = ["policy", "environment", "tool", "engine", "trainer", "server", "deadline", "cancelled"];
const LONGEST_TEXT = 256;
const TYPING_MS = 400;
const RATE_MS = 30_000;
const ANNOUNCE_MS = 30_000;
const START = `rollout start --prompt "What is 5 plus 3?" \\
  --completions http://localhost:8000/v1 --dialect vllm --model MODEL`;

const COLUMNS = columnsOf(
  "state", "uid", "id", "agent", "group", "turns", "tokens", "reward", "end", "age", "duration",
);

/**
 * @param {Object} source - where rollouts come from
 * @param {URLSearchParams} parameters - filters of the link
 * @param {AbortSignal} signal - the page is closed
 * @returns {{title: string, element: HTMLElement}}
 */
export function listPage(source, parameters, signal) {
  const list = new List(source, parameters, signal);
  const load = !source.isSaved && serverFigures(source, signal);
  return { title: "Rollouts", element: h("section.list", {}, h("h1.live-hidden", {}, "Rollouts"), load, list.element) };
}

class List {
  constructor(source, parameters, signal) {
    this.source = source;
    this.signal = signal;
    // Tokens of the pages up to this one. The browser keeps them with the link, for the way back from a rollout.
    this.tokens = history.state?.tokens ?? [""];
    this.filters = new Filters(source, parameters, () => this._toPage([""]));
    this.error = errorLine();
    this.table = new LiveTable("Rollouts, newest first", COLUMNS, (rollout) => rollout.uid);
    this.table.element.hidden = true;
    this.empty = h("div.list-empty");
    this.search = searchLine({ stop: () => (this.page.isStopped = true), resume: () => this._continue() });
    const newer = () => this._toPage(this.tokens.slice(0, -1));
    this.pager = pager({ newer, older: () => this._toPage([...this.tokens, this.page.next]) });
    const parts = [this.filters, this.error, this.table, { element: this.empty }, this.search, this.pager];
    this.element = h("div", {}, parts.map((part) => part.element));
    this.table.listenToKeys(signal);
    addEventListener("keydown", (event) => this._onKey(event), { signal });
    signal.addEventListener("abort", () => this._leavePage());
    this._readPage();
  }

  _onKey(event) {
    if (event.key !== "/" || isForElsewhere(event)) return;
    event.preventDefault();
    this.filters.focus();
  }

  _toPage(tokens) {
    this.tokens = tokens;
    history.replaceState({ tokens }, "");
    scrollTo(0, 0);
    this._readPage();
  }

  _readPage() {
    this._leavePage();
    this.page = new RolloutPage(this.source, this.filters.values, this.tokens.at(-1));
    this._follow();
  }

  _leavePage() {
    this.following?.abort();
    if (this.page) this.page.isStopped = true;
  }

  _continue() {
    this.page.isStopped = false;
    this._follow();
  }

  /** Read the page, and keep it up to date until there is another one. */
  _follow() {
    this.following?.abort();
    this.following = new AbortController();
    const { page } = this;
    const show = () => page === this.page && !this.signal.aborted && this._show(true);
    const step = () => (page.isRead || page.isStopped ? page.refresh() : page.read(show));
    // Until the first response, the table keeps the rows of the page before.
    if (page.requests) show();
    poll(step, (error) => this._done(error), this.following.signal);
  }

  _done(error) {
    // Refused: the token is of another server. Empty: the server has dropped the rollouts of the page.
    const isGone = [400, 422].includes(error?.status) || (this.page.isRead && !this.page.rows.length);
    if (isGone && this.tokens.length > 1) return this._toPage([""]);
    this.error.show(error);
    this._show(false);
  }

  _show(isReading) {
    const { page } = this;
    this.table.show(page.rollouts);
    this.table.element.hidden = !page.rows.length;
    this.search.show(page, isReading);
    this.pager.show(page, this.tokens.length, isReading);
    const emptyBy = page.rows.length || !page.isRead ? "" : this.filters.isSet ? "filters" : "nothing";
    if (this.empty.dataset.by === emptyBy) return;
    this.empty.dataset.by = emptyBy;
    this.empty.replaceChildren(...emptyText(emptyBy, this.source, () => this.filters.clear()));
  }
}

/** What to do about an empty list. */
function emptyText(emptyBy, { readOnly }, clear) {
  const said = (text) => h("p", {}, text);
  if (emptyBy === "filters") return [said("No rollout matches these filters."), button("Clear the filters", clear)];
  if (emptyBy === "nothing" && readOnly) return [said("There are no rollouts.")];
  if (emptyBy === "nothing") return [said("There are no rollouts yet. Start one:"), h("pre", {}, START)];
  return [];
}

/** The filters as a form. The fragment of the URL has those that are set, so that links can be shared. */
class Filters {
  constructor(source, parameters, changed) {
    this.changed = changed;
    this.lastTyped = null;
    this.search = h("input", { type: "search", maxLength: LONGEST_TEXT, placeholder: "uid or text  ( / )" });
    const agent = choice([""], "any agent");
    const fields = {
      state: choice(["", ...STATES], "any state"),
      agent,
      group_id: h("input", { maxLength: LONGEST_TEXT, placeholder: "group id" }),
      failure_class: choice(["", ...FAILURE_CLASSES], "any class"),
      text: this.search,
    };
    const labelled = Object.entries(LABELS).map(([name, label]) => {
      setField(fields[name], name, parameters.get(name) ?? "");
      return h(`label.list-${name}`, {}, label, fields[name]);
    });
    this.clearing = button("Clear", () => this.clear());
    const properties = { role: "search", "aria-label": "Filters", on: this._listeners() };
    this.element = h("form.list-filters", properties, labelled, this.clearing);
    this.clearing.disabled = !this.isSet;
    source.agents().then(({ agents }) => addOptions(agent, agents.map(({ name }) => name)), () => {});
  }

  /** @returns {Object} the filters that are set */
  get values() {
    const all = [...new FormData(this.element)].map(([name, value]) => [name, value.trim()]);
    return Object.fromEntries(all.filter(([, value]) => value));
  }

  get isSet() {
    return Object.keys(this.values).length > 0;
  }

  focus() {
    this.search.focus();
    this.search.select();
  }

  clear() {
    for (const field of this.element.elements) field.value = "";
    this._apply(null);
    this.focus();
  }

  _listeners() {
    let typing = 0;
    const apply = (target) => {
      clearTimeout(typing);
      this._apply(target);
    };
    const input = ({ target }) => {
      clearTimeout(typing);
      typing = setTimeout(apply, TYPING_MS, target);
    };
    return { submit: (event) => event.preventDefault(), change: ({ target }) => apply(target), input };
  }

  /** Write the filters into the URL. The back button goes back filter by filter, not letter by letter. */
  _apply(field) {
    const query = new URLSearchParams(this.values).toString();
    const fragment = query ? `#/?${query}` : "#/";
    // What was typed last may come after another page was opened.
    if (fragment === (location.hash || "#/") || !this.element.isConnected) return;
    history[field && field === this.lastTyped ? "replaceState" : "pushState"](null, "", fragment);
    this.lastTyped = field?.localName === "input" ? field : null;
    this.clearing.disabled = !this.isSet;
    this.changed();
  }
}

function choice(values, any) {
  const select = h("select");
  addOptions(select, values, any);
  return select;
}

function addOptions(select, values, any = "") {
  const known = new Set([...select.options].map((option) => option.value));
  select.append(...values.filter((each) => !known.has(each)).map((value) => h("option", { value }, value || any)));
}

/** Set a field. A link may have a value that is not among the options. */
function setField(field, name, value) {
  if (field.localName === "select") addOptions(field, [value]);
  Object.assign(field, { name, value });
}

function button(text, onClick, properties = {}) {
  return h("button", { type: "button", ...properties, on: { click: onClick } }, text);
}

/** How a search that takes several requests goes on, and buttons to stop it and to continue it. */
function searchLine({ stop, resume }) {
  const text = h("span", {});
  const stopping = button("Stop", stop, { hidden: true });
  const continuing = button("Continue", resume, { hidden: true });
  const show = (page, isReading) => {
    const isStopped = page.isStopped && !page.isRead;
    const isSearching = isReading && !isStopped && page.requests > 0;
    const searching = `Searching older rollouts; found ${page.rows.length} so far.`;
    setText(text, isSearching ? searching : isStopped ? `Stopped before the end; found ${page.rows.length}.` : "");
    stopping.hidden = !isSearching;
    continuing.hidden = !isStopped;
  };
  return { element: h("p.list-search.quiet", {}, text, " ", stopping, continuing), show };
}

function pager({ newer, older }) {
  const text = h("span.quiet", { role: "status" });
  const back = button("← Newer", newer, { disabled: true });
  const on = button("Older →", older, { disabled: true });
  const show = (page, number, isReading) => {
    const found = page.rows.length;
    const told = page.requests ? `Page ${number}: ${found} ${found === 1 ? "rollout" : "rollouts"}` : "";
    if (!isReading) setText(text, told);
    back.disabled = number === 1;
    on.disabled = !(page.isFull && page.next);
  };
  return { element: h("nav.list-pager", { "aria-label": "Pages" }, back, text, on), show };
}

/** Counts of the server, and rates over the last half minute. */
function serverFigures(source, signal) {
  const shown = figures("Server", ["running", "queued", "finished", "failed", "rollouts/min", "turns/s", "tokens/s"]);
  const spoken = h("p.live-hidden", { role: "status" });
  const polls = [];
  let announced = -Infinity;
  const step = async () => {
    const server = await source.server();
    showCounts(shown, server);
    showRates(shown, polls, server);
    if (performance.now() - announced < ANNOUNCE_MS) return;
    announced = performance.now();
    const names = ["running", "queued", "finished", "failed"];
    setText(spoken, names.map((name) => `${server[name]} ${name}`).join(", "));
  };
  // The list reports that the server is away.
  poll(step, () => {}, signal);
  return h("div", {}, shown.element, spoken);
}

function showCounts({ show }, server) {
  const { text, title } = ageCell({ create_time: server.start_time });
  show("running", count(server.running), `of ${count(server.max_running)}`);
  show("queued", count(server.queued), `of ${count(server.max_queued)}`);
  show("finished", count(server.finished), `in ${text}`, "", `Since the server started at ${title}`);
  const share = server.finished ? `${rounded((100 * server.failed) / server.finished)} %` : "";
  show("failed", count(server.failed), share, server.failed ? "bad" : "");
}

function showRates({ show }, polls, server) {
  const now = performance.now();
  // Counters that went back are those of a new process.
  if (polls.length && server.finished < polls.at(-1).server.finished) polls.length = 0;
  polls.push({ now, server });
  while (now - polls[0].now > RATE_MS) polls.shift();
  if (polls.length < 2) return;
  const seconds = (now - polls[0].now) / 1000;
  const rate = (name) => (server[name] - polls[0].server[name]) / seconds;
  show("rollouts/min", rounded(rate("finished") * 60));
  show("turns/s", rounded(rate("turns")));
  show("tokens/s", rounded(rate("generated_tokens")));
}

/** A number that changes all the time: with as few digits as can be read. */
function rounded(value) {
  return count(value < 10 ? Number(value.toFixed(1)) : Math.round(value));
}
