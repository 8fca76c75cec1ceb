// A map that drops the entry that was used least recently once it has `most` entries. `onDrop` is called with its key.

export class BoundedMap {
  #entries = new Map(); // in the order of use: a Map keeps the order of insertion
  #most;
  #onDrop;

  constructor(most, onDrop = () => {}) {
    this.#most = most;
    this.#onDrop = onDrop;
  }

  get(key) {
    const value = this.#entries.get(key);
    if (value !== undefined) this.set(key, value);
    return value;
  }

  set(key, value) {
    this.#entries.delete(key);
    this.#entries.set(key, value);
    if (this.#entries.size > this.#most) {
      const [oldest] = this.#entries.keys();
      this.#entries.delete(oldest);
      this.#onDrop(oldest);
    }
  }
}
