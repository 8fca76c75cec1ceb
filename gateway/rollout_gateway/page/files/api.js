/** The REST API as a source of rollouts. The key of the API is asked for once and stays in this tab. */

const KEY = "rollout-api-key";
const RECONNECT_MS = 1000;
/** The largest range of tokens whose texts are in one response. */
export const MAX_TEXTS = 4096;

/** A source that reads a running gateway. `askForKey(reason)` resolves to an API key. */
export class ApiSource {
  constructor(askForKey) {
    this._askForKey = askForKey;
    this._asking = null;
  }

  /** @returns {Promise<Object>} version, limits and load of the server */
  async server() {
    const server = await this._json("v1/server");
    /** Whether nothing can be cancelled. */
    this.readOnly = server.features.includes("read_only");
    /** Whether nothing changes any more. */
    this.isSaved = server.features.includes("saved_rollouts");
    return server;
  }

  /** @returns {Promise<{agents: Object[]}>} */
  agents() {
    return this._json("v1/agents");
  }

  /** @param {Object} query - query parameters; arrays are repeated, empty values left out */
  list(query) {
    return this._json(`v1/rollouts?${parameters(query)}`);
  }

  /** @param {string} uid @param {string} view - "basic", "messages", "samples" or "full" */
  rollout(uid, view = "messages") {
    return this._json(`${pathOf(uid)}?${parameters({ view })}`);
  }

  group(id) {
    return this._json(`v1/groups/${encodeURIComponent(id)}`);
  }

  /** Cancel a rollout. Finished rollouts do not change. */
  cancel(uid, reason) {
    const body = JSON.stringify({ reason });
    const headers = { "content-type": "application/json" };
    return this._json(`${pathOf(uid)}/cancel`, { method: "POST", body, headers });
  }

  /** @returns {Promise<import("page/tokens/texts.js").TokenText[]>} the texts of a range of tokens */
  async texts(uid, segment, start, stop) {
    const path = `${pathOf(uid)}/segments/${encodeURIComponent(segment)}/tokens`;
    const found = [];
    for (let from = start; from < stop; from += MAX_TEXTS) {
      const range = parameters({ start: from, stop: Math.min(stop, from + MAX_TEXTS) });
      found.push(...(await this._json(`${path}?${range}`)).texts);
    }
    return found;
  }

  /**
   * Yield the events of a rollout until it has finished. A connection that breaks is resumed after the last event.
   * @param {string} uid
   * @param {number} after - sequence number
   * @param {AbortSignal} signal - ends the iteration
   * @param {(connected: boolean) => void} [onConnection] - called when the connection changes
   */
  async *events(uid, after, signal, onConnection = () => {}) {
    while (!signal.aborted) {
      await untilVisible(signal);
      const connection = new AbortController();
      const ends = { signal: AbortSignal.any([signal, connection.signal]) };
      // Browsers open only six connections to a host: a tab that nobody sees must not keep one.
      document.addEventListener("visibilitychange", () => document.hidden && connection.abort(), ends);
      try {
        const response = await this._fetch(`${pathOf(uid)}/events?${parameters({ detail: "full", after })}`, ends);
        if (response.status === 204) return;
        onConnection(true);
        for await (const event of serverSentEvents(response.body)) {
          after = event.sequence || after;
          yield event;
          if (event.event === "finished") return;
        }
      } catch (error) {
        if (signal.aborted) return;
        // Without a status: the connection broke, or the tab was hidden.
        if (error.status && !isTransient(error)) throw error;
      } finally {
        connection.abort();
      }
      if (document.hidden) continue;
      onConnection(false);
      await pause();
    }
  }

  async _json(path, options) {
    return (await this._fetch(path, options)).json();
  }

  async _fetch(path, options = {}) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const authorization = key ? { authorization: `Bearer ${key}` } : {};
      const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401) throw error;
      // Several requests may be refused at once; one question answers all of them.
      if (sessionStorage.getItem(KEY) !== key) continue;
      this._asking ??= this._newKey(key ? error.message : "")
        .then((given) => sessionStorage.setItem(KEY, given))
        .finally(() => (this._asking = null));
      await this._asking;
    }
  }

  /** Ask until there is a key that a request can carry. */
  async _newKey(refusal) {
    const key = await this._askForKey(refusal);
    try {
      new Headers({ authorization: `Bearer ${key}` });
      return key;
    } catch {
      return this._newKey("This cannot be a key: it has characters that no HTTP header can have.");
    }
  }
}

function pathOf(uid) {
  return `v1/rollouts/${encodeURIComponent(uid)}`;
}

/** Whether a request may succeed later: the server is away, restarts, or has too much to do. @param {Error} error */
export function isTransient({ name, status }) {
  return name === "TypeError" || status >= 500 || status === 408 || status === 429;
}

/** Wait before a request is repeated. */
export function pause() {
  return new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
}

/** Wait until the tab is visible or the signal is aborted. */
async function untilVisible(signal) {
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      signal.addEventListener("abort", resolve, { once: true });
      document.addEventListener("visibilitychange", resolve, { once: true });
    });
  }
}

/** An error as the API returns it. @param {string} message - for people */
export function apiError(message, status, code = "") {
  return Object.assign(new Error(message), { status, code });
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return apiError(error.message, response.status, error.code);
  } catch {
    return apiError(`The gateway returned ${response.status} ${response.statusText}`, response.status);
  }
}

function parameters(query) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of [value].flat()) if (each !== "" && each !== undefined && each !== null) found.append(name, each);
  }
  return found;
}

/** Yield the JSON data of server-sent events (WHATWG HTML, 9.2). The gateway writes data on one line. */
async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    let from = Math.max(0, buffer.length - 1);
    buffer += value;
    for (let end; (end = buffer.indexOf("\n\n", from)) >= 0; from = 0) {
      const data = /^data: (.*)$/m.exec(buffer.slice(0, end));
      buffer = buffer.slice(end + 2);
      if (data) yield JSON.parse(data[1]);
    }
  }
}
