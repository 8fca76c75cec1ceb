/** Downloads of a rollout: samples, events, JSON, and a page that needs no server. */
import { download, h } from "page/dom.js";

// The largest range of tokens of one request.
const TEXTS = 4096;
const SLOT = '"ROLLOUTS-DATA"';

/** @param {import("page/rollout/rollout.js").View} view @returns {HTMLElement} */
export function exportMenu(view) {
  const name = `rollout-${view.uid}`;
  const entries = {
    "Samples (JSON lines)": async () =>
      download(`${name}-samples.jsonl`, lines((await whole(view)).outcome?.samples ?? []), "application/jsonl"),
    "Events (JSON lines)": async () =>
      download(`${name}-events.jsonl`, lines(await eventsOf(view)), "application/jsonl"),
    "Rollout (JSON)": async () =>
      download(`${name}.json`, JSON.stringify(await whole(view), null, 1), "application/json"),
    "Page (one HTML file)": async () => download(`${name}.html`, await documentOf(view), "text/html"),
  };
  if (view.source.isEmbedded) delete entries["Page (one HTML file)"]; // This is one already.
  const problem = h("p.error", { role: "alert" });
  const items = Object.entries(entries).map(([label, act]) => {
    const click = async () => {
      try {
        await act();
        problem.textContent = "";
        menu.open = false;
      } catch (error) {
        problem.textContent = error.message;
      }
    };
    return h("button", { on: { click } }, label);
  });
  const menu = h("details.rollout-export", {}, h("summary", {}, "Export"), h("div", {}, items, problem));
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
    found[id] = [];
    try {
      for (let start = 0; start < length; start += TEXTS) {
        found[id].push(...(await source.texts(uid, id, start, Math.min(length, start + TEXTS))).texts);
      }
    } catch {
      delete found[id]; // Without a tokenizer, the file shows the ids.
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
