/** Rollouts that the document itself contains, as a source with the methods of ApiSource; none can be cancelled. */
import { apiError } from "page/api.js";

const PAGE = 100;

/**
 * @typedef {{rollout: Object, events: Object[], texts: Object<string, Object[]>}} Saved - `rollout`: JSON of GET
 *   /v1/rollouts/UID with view "full"; `events`: its events with detail "full", or none; `texts`: by segment id
 */
export class EmbeddedSource {
  readOnly = true;
  isSaved = true;
  isEmbedded = true;

  /** @param {{rollouts: Saved[]}} data - newest first */
  constructor(data) {
    this._saved = new Map((data.rollouts ?? []).map((saved) => [saved.rollout.uid, saved]));
  }

  /** The uid of the only rollout; null if there are none or several. @returns {string|null} */
  get only() {
    return this._saved.size === 1 ? this._saved.keys().next().value : null;
  }

  async server() {
    return {};
  }

  async agents() {
    const names = new Set([...this._saved.values()].map(({ rollout }) => rollout.spec.agent).filter(Boolean));
    return { agents: [...names].sort().map((name) => ({ name })) };
  }

  async list(query) {
    const found = [...this._saved.values()].map(({ rollout }) => rollout).filter((rollout) => matches(rollout, query));
    const [start, size] = [Number(query.page_token || 0), Number(query.page_size || PAGE)];
    const page = (number) => (number >= 0 && number < found.length ? String(number) : "");
    return { rollouts: found.slice(start, start + size), next_page_token: page(start + size), page_tokens: [] };
  }

  async rollout(uid) {
    return this._find(uid).rollout;
  }

  async group(id) {
    const rollouts = (await this.list({ group_id: id, page_size: this._saved.size })).rollouts;
    if (!rollouts.length) throw apiError(`No rollout of group ${id}.`, 404);
    const members = rollouts.map(({ uid, state, spec }) => {
      return { index: spec.group_index ?? 0, uid, rollout_id: spec.rollout_id, finished: state === "finished" };
    });
    members.sort((a, b) => a.index - b.index);
    return { group_id: id, members, result: null, create_time: rollouts.at(-1).create_time };
  }

  async texts(uid, segment, start, stop) {
    const texts = this._find(uid).texts?.[segment];
    if (!texts) throw apiError("The texts of the tokens were not saved.", 404, "NO_TOKENIZER");
    return texts.filter((each) => each.stop > start && each.start < stop);
  }

  async *events(uid, after, signal, onConnection = () => {}) {
    onConnection(true);
    yield* this._find(uid).events.filter((event) => event.sequence > after);
  }

  _find(uid) {
    const saved = this._saved.get(uid);
    if (!saved) throw apiError(`This document has no rollout ${uid}.`, 404);
    return saved;
  }
}

/** Whether a rollout is among those that the pages ask for. */
function matches({ uid, state, spec, outcome }, query) {
  const allows = (wanted, value) => !wanted?.length || [wanted].flat().includes(value);
  return allows(query.uid, uid) && allows(query.state, state) && allows(query.agent, spec.agent)
    && allows(query.group_id, spec.group_id) && allows(query.failure_class, outcome?.failure_class ?? "")
    && containsText({ uid, spec, outcome }, query.text);
}

function containsText({ uid, spec, outcome }, text) {
  const places = [uid, spec.rollout_id, spec.group_id, spec.agent, outcome?.reason, outcome?.message];
  return !text || places.some((place) => place?.toLowerCase().includes(text.toLowerCase()));
}
