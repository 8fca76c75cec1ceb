/** Downloads of a rollout: samples, events, JSON, and a page that needs no server. */
import { download, h } from "page/dom.js";
import { errorLine } from "page/list/live.js";

const SLOT = '"ROLLOUTS-DATA"';

/** @param {import("page/rollout/rollout.js").View} view @returns {HTMLElement} */
export function exportMenu(view) {
  const entries = [
    ["Samples (JSON lines)", "-samples.jsonl", "application/jsonl", async () => lines((await whole(view)).outcome?.samples ?? [])],
    ["Events (JSON lines)", "-events.jsonl", "application/jsonl", async () => lines(await eventsOf(view))],
    ["Rollout (JSON)", ".json", "application/json", async () => JSON.stringify(await whole(view), null, 1)],
  ];
  // A saved page is one already.
  if (!view.source.isEmbedded) entries.push(["Page (one HTML file)", ".html", "text/html", () => documentOf(view)]);
  const problem = errorLine();
  const items = entries.map(([label, ending, type, textOf]) => {
    const save = async () => download(`rollout-${view.uid}${ending}`, await textOf(), type);
    const click = async () => {
      const error = await save().then(() => null, (reason) => reason);
      problem.show(error);
      menu.open = Boolean(error);
    };
    return h("button", { on: { click } }, label);
  });
  const keydown = (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    // For the page, Escape selects nothing.
    event.stopPropagation();
    menu.open = false;
    menu.firstChild.focus();
  };
  const menu = h("details.rollout-export", { on: { keydown } }, h("summary", {}, "Export"),
    h("div", {}, items, problem.element));
  return menu;
}

function lines(values) {
  return values.map((value) => `${JSON.stringify(value)}\n`).join("");
}

function whole({ source, uid }) {
  return source.rollout(uid, "full");
}

/** The events so far. A rollout whose events are not stored any more has none. */
async function eventsOf({ source, uid, model }) {
  const found = [];
  const done = new AbortController();
  const last = model.sequence;
  if (!last) return found;
  for await (const event of source.events(uid, 0, done.signal)) {
    found.push(event);
    if (event.sequence >= last) break;
  }
  done.abort();
  return found;
}

async function textsOf({ source, uid, model }) {
  const found = {};
  for (const { id, length } of model.segmentList) {
    try {
      found[id] = await source.texts(uid, id, 0, length);
    } catch {
      // Without a tokenizer, the file shows the ids.
    }
  }
  return found;
}

/** The page as one file with its data: see `standalone.html`. */
async function documentOf(view) {
  const response = await fetch("page/standalone.html");
  if (!response.ok) throw new Error(`The page for saved rollouts is not there: ${response.status}`);
  const [before, after] = (await response.text()).split(SLOT);
  const data = { rollouts: [{ rollout: await whole(view), events: await eventsOf(view), texts: await textsOf(view) }] };
  // No text of a model may end the script element that holds it.
  return before + JSON.stringify(data).replaceAll("<", "\\u003c") + after;
}
