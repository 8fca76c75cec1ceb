/** One page of the list of rollouts. */

const PAGE_SIZE = 50;

/**
 * The rollouts that match filters, newest first, from a token on. Filters may read many rollouts to find few, so the
 * server may return a short page, even an empty one, and a token to go on with.
 */
export class RolloutPage {
  /** @param {Object} source @param {Object} filters @param {string} token - "": the first page */
  constructor(source, filters, token) {
    this.source = source;
    this.filters = filters;
    this.token = token;
    /** @type {{rollout: Object, token: string}[]} - `token`: of a page that begins with this rollout */
    this.rows = [];
    /** Token to go on with: of the next page, if this one is full. */
    this.next = token;
    this.requests = 0;
    this.isStopped = false;
    this.isRead = false;
  }

  get rollouts() {
    return this.rows.map((row) => row.rollout);
  }

  get isFull() {
    return this.rows.length >= PAGE_SIZE;
  }

  /** Read until the page is full, there are no more rollouts, or it is stopped. @param {() => void} onProgress */
  read(onProgress) {
    // A search that goes on soon after it was stopped may still wait for a response.
    this._reading ??= this._readOn(onProgress).finally(() => (this._reading = null));
    return this._reading;
  }

  async _readOn(onProgress) {
    do {
      const found = await this._list({ page_size: PAGE_SIZE - this.rows.length, page_token: this.next });
      this.rows.push(...rowsOf(found));
      this.next = found.next_page_token;
      this.requests += 1;
      this.isRead = this.isFull || !this.next;
      onProgress();
    } while (!this.isRead && !this.isStopped);
  }

  /** Bring the rollouts up to date, with at most two requests: the search through all older ones is not repeated. */
  async refresh() {
    const found = await this._list({ page_size: PAGE_SIZE, page_token: this.token });
    const fresh = rowsOf(found);
    if (fresh.length >= PAGE_SIZE || !found.next_page_token) {
      this.rows = fresh;
      this.next = found.next_page_token;
      this.isRead = true;
      return;
    }
    const rows = [...fresh, ...(await this._olderThan(fresh))];
    // A fleet sends no tokens of rollouts: what was pushed off this page is then missing between it and the next one.
    if (rows.length > PAGE_SIZE) this.next = rows[PAGE_SIZE].token || this.next;
    this.rows = rows.slice(0, PAGE_SIZE);
    this.isRead ||= this.isFull;
  }

  /** The rows that are not in `fresh`, without those that have changed and match no more. */
  async _olderThan(fresh) {
    const known = new Set(fresh.map((row) => row.rollout.uid));
    const older = this.rows.filter((row) => !known.has(row.rollout.uid));
    const uids = older.map((row) => row.rollout).filter((each) => each.state !== "finished").map((each) => each.uid);
    if (!uids.length) return older;
    const found = await this._list({ uid: uids, page_size: PAGE_SIZE });
    const changed = new Map(found.rollouts.map((rollout) => [rollout.uid, rollout]));
    const current = older.map(({ rollout, token }) => ({
      rollout: rollout.state === "finished" ? rollout : changed.get(rollout.uid), token,
    }));
    return current.filter((row) => row.rollout);
  }

  _list(query) {
    return this.source.list({ ...this.filters, ...query });
  }
}

function rowsOf({ rollouts, page_tokens = [] }) {
  return rollouts.map((rollout, index) => ({ rollout, token: page_tokens[index] ?? "" }));
}
