/** Who wrote a token, its text made visible, and the fetching of texts. */
import { isTransient, MAX_TEXTS } from "page/api.js";
import { codeOf } from "page/dom.js";

const RETRY_MS = 3000;
const HIDDEN = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;

/** By letter: how `rollout inspect` marks a span, what it is called, and why its tokens train or do not. */
export const KINDS = {
  M: { name: "model", why: "the model wrote it, so it trains" },
  P: { name: "prompt", why: "the prompt at the start of the segment" },
  E: { name: "environment", why: "a tool result, a message or template text between two completions" },
  C: { name: "closing", why: "the stop token that a truncated completion lacks; the model did not write it" },
  A: { name: "masked", why: "the model wrote it, and the agent masked the completion out" },
  S: { name: "stale", why: "the model wrote it, with a policy older than the request allows" },
  "?": { name: "unknown", why: "a reason that this page does not know" },
};

const BY_REASON = {
  model: new Map([[null, "M"], ["author", "A"], ["stale", "S"]]),
  other: new Map([["prompt", "P"], ["environment", "E"], ["closing", "C"]]),
};

/** @param {import("page/rollout/model.js").Span} span @returns {string} a key of `KINDS` */
export function kindOf({ author, reason }) {
  return BY_REASON[author === "model" ? "model" : "other"].get(reason) ?? "?";
}

/** Return the text with every invisible character replaced by a printable one, as `rollout inspect` does. */
export function visible(text) {
  const spaced = /^ +$/.test(text) ? text.replaceAll(" ", "·") : text;
  return spaced.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code === 10) return "⏎";
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "␡" : codeOf(character);
  });
}

/**
 * The texts of a rollout's tokens. Several tokens may share a text, such as the bytes of one character.
 *
 * @typedef {{start: number, stop: number, text: string, special: boolean}} TokenText
 */
export class TokenTexts {
  /**
   * @param {Object} source
   * @param {string} uid
   * @param {(segment: string|null, start: number, stop: number) => void} changed - called after the texts of a range
   *   have arrived; null: after an error, which holds for all texts, and when they can be fetched again
   */
  constructor(source, uid, changed) {
    this._source = source;
    this._uid = uid;
    this._changed = changed;
    this._found = new Map();
    this._asked = new Set();
    this._queue = [];
    this._busy = false;
    /** Why there are no texts. @type {Error|null} */
    this.error = null;
  }

  /** @returns {TokenText|undefined} */
  at(segment, index) {
    return this._found.get(segment)?.[index];
  }

  /** Fetch the texts of a range, unless they were asked for before. */
  want(segment, start, stop) {
    const key = `${segment}:${start}:${stop}`;
    if (this.error || this._asked.has(key)) return;
    this._asked.add(key);
    this._queue.push({ segment, start, stop });
    if (!this._busy) this._run();
  }

  /** Forget an error, so that what is wanted again is fetched again. */
  retry() {
    this.error = null;
    this._asked.clear();
    this._changed(null, 0, Infinity);
  }

  async _run() {
    this._busy = true;
    // Ranges that are wanted in one go are fetched together.
    await Promise.resolve();
    while (this._queue.length && !this.error) {
      const { segment, start, stop } = this._next();
      try {
        this._keep(segment, await this._source.texts(this._uid, segment, start, stop));
      } catch (error) {
        this.error = error;
        // What else was wanted in the meantime is drawn, too, and waits for texts that are not fetched any more.
        this._queue.length = 0;
        if (isTransient(error)) setTimeout(() => this.retry(), RETRY_MS);
      }
      if (this.error) this._changed(null, 0, Infinity);
      else this._changed(segment, start, stop);
    }
    this._busy = false;
  }

  /** Take the range that was wanted last, which is what the reader sees, and its neighbours. */
  _next() {
    const range = this._queue.pop();
    for (;;) {
      const beside = this._queue.findIndex((each) => each.segment === range.segment
        && (each.stop === range.start || each.start === range.stop)
        && each.stop - each.start + range.stop - range.start <= MAX_TEXTS);
      if (beside < 0) return range;
      const [{ start, stop }] = this._queue.splice(beside, 1);
      Object.assign(range, { start: Math.min(start, range.start), stop: Math.max(stop, range.stop) });
    }
  }

  _keep(segment, texts) {
    if (!this._found.has(segment)) this._found.set(segment, []);
    const found = this._found.get(segment);
    for (const text of texts) for (let index = text.start; index < text.stop; index += 1) found[index] = text;
  }
}
