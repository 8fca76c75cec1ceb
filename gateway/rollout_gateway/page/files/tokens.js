/** The token strip: every token of a segment, who wrote it, and why it trains or not. Only what is near the view is in the DOM. */
import { copy, count, fill, h } from "page/dom.js";
import { departuresOf, driftsOf, idsOf, samplesOf, shownSegment, trainedTokens } from "page/segments.js";
import { COLOURINGS } from "page/token_colours.js";
import { tokenDetail } from "page/token_detail.js";
import { KINDS, kindOf, TokenTexts, visible } from "page/token_texts.js";

const PIECE = 256;
/** So many pieces before and after a visible one have their texts fetched. */
const AHEAD = 6;
/** Pieces of up to so many tokens are about two lines high. */
const SHORT = 40;

const CELL = h("span", { role: "option", "aria-selected": "false" });

/** @param {import("page/rollout.js").View} view */
export function tokensPart(view) {
  const strip = new TokenStrip(view);
  return { element: strip.element, update: () => strip.update(), selected: () => strip.selected() };
}

class TokenStrip {
  constructor(view) {
    this.view = view;
    this.texts = new TokenTexts(view.source, view.uid, (...range) => this._onTexts(...range));
    this.segment = null;
    this.colour = "author";
    /** The other end of a selected range. @type {number|null} */
    this.anchor = null;
    this.pieces = [];
    /** The end of the strip stays in view. */
    this.follows = view.model.rollout.state !== "finished";
    this._last = { scrollTop: 0, scrollHeight: 0 };
    this._build();
    this._near = new IntersectionObserver((entries) => this._onNear(entries), { root: this.strip, rootMargin: "75% 0px" });
  }

  _build() {
    this.title = h("p.tokens-title");
    this.notice = h("p.tokens-notice", { hidden: true });
    this.legend = h("ul.tokens-legend", { "aria-label": "Legend" });
    this.overview = svg("svg", { class: "tokens-overview", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.overview.addEventListener("click", (event) => this._onOverview(event));
    this.detail = h("div.tokens-detail", { role: "status", "aria-live": "polite" });
    this.strip = h("div.tokens-strip", {
      role: "listbox", tabIndex: 0, "aria-multiselectable": "true", "aria-label": "Tokens",
      on: {
        click: (event) => this._onClick(event),
        keydown: (event) => this._onKey(event),
        pointerover: (event) => this._onHover(event),
        pointerleave: () => this._showDetail(),
        scroll: () => this._onScroll(),
      },
    });
    const choices = Object.entries(COLOURINGS).map(([value, { name }]) => h(
      "label", {}, h("input", { type: "radio", name: "tokens-colour", value, checked: value === this.colour,
        on: { change: () => this._setColour(value) } }), h("span", {}, name)));
    const switcher = h("fieldset.tokens-switch", {}, h("legend", {}, "Colours show"), choices);
    const head = h("header.tokens-head", {}, this.title, switcher);
    this.element = h("section.tokens", { "aria-label": "Tokens" }, head, this.legend, this.notice, this.overview, this.strip, this.detail);
  }

  /** Draw what has changed in the model. */
  update() {
    const segment = shownSegment(this.view);
    const { drifts, outcome } = this.view.model;
    const spans = (segment?.spans ?? []).map((span) => `${span.ids.length}${kindOf(span)}`);
    const state = [segment?.id, drifts.length, Boolean(outcome), ...spans].join();
    if (state === this._state) return;
    this._state = state;
    if (segment?.id !== this.segment?.id) this._clear();
    this.segment = segment;
    this.shade = null;
    this.strip.setAttribute("aria-label", segment ? `Tokens of segment ${segment.id}` : "Tokens");
    this._updatePieces();
    this._updateHead();
    this._showDetail();
    this._follow();
  }

  /** Show what is selected now. */
  selected() {
    const { segment, turn, token } = this.view.selection;
    if (shownSegment(this.view)?.id !== this.segment?.id) this.update();
    if (this.anchor !== null && token === null) this.anchor = null;
    const isOwn = this.segment && (!segment || segment === this.segment.id);
    this._mark();
    this._showDetail();
    if (!isOwn || (token === null && !turn)) return;
    this.follows = token === this.segment.length - 1;
    if (token !== null) this._reveal(token);
    else this._showPiece(this.pieces.findIndex(({ span }) => span.turn === turn && span.author === "model"));
  }

  _clear() {
    for (const piece of this.pieces) this._near.unobserve(piece.element);
    this.pieces = [];
    this.anchor = null;
    fill(this.strip);
    this.strip.scrollTop = 0;
  }

  /** Make pieces for new spans, and again for spans whose mask has changed. */
  _updatePieces() {
    this.drifts = this.segment ? [...driftsOf(this.view.model, this.segment), ...departuresOf(this.view.model, this.segment)] : [];
    const marks = new Set(this.drifts.map((each) => each.index));
    const wanted = (this.segment?.spans ?? []).flatMap((span) => cut(span, marks));
    const isSame = (piece, index) => this.pieces[index]?.key === piece.key;
    const kept = wanted.findIndex((piece, index) => !isSame(piece, index));
    const from = kept < 0 ? wanted.length : kept;
    for (const piece of this.pieces.splice(from)) {
      this._near.unobserve(piece.element);
      piece.element.remove();
    }
    for (const piece of wanted.slice(from)) {
      piece.element = h("div.tokens-piece.tokens-empty", { role: "group", "aria-label": labelOf(piece) });
      piece.element.classList.toggle("tokens-short", piece.stop - piece.start <= SHORT);
      piece.element.classList.toggle("tokens-rest", piece.start > piece.span.start);
      piece.element.piece = piece;
      this.pieces.push(piece);
      this.strip.append(piece.element);
      this._near.observe(piece.element);
    }
    // The spans of an outcome replace those of the events.
    wanted.forEach((piece, index) => (this.pieces[index].span = piece.span));
  }

  _onNear(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this._fill(target.piece);
      else this._empty(target.piece);
    }
    this._follow();
  }

  /** Follow the end from when the reader is there until the reader scrolls up. Heights change while texts arrive. */
  _onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.strip;
    if (scrollTop === this._last.scrollTop) return;
    if (scrollHeight - scrollTop - clientHeight < 40) this.follows = true;
    else if (scrollTop < this._last.scrollTop && scrollHeight >= this._last.scrollHeight) this.follows = false;
    this._last = { scrollTop, scrollHeight };
  }

  _follow() {
    if (this.follows) this._scrollBy(this.strip.scrollHeight);
  }

  /** Scroll without a decision of the reader: see `_onScroll`. */
  _scrollBy(pixels) {
    this.strip.scrollTop += pixels;
    const { scrollTop, scrollHeight } = this.strip;
    this._last = { scrollTop, scrollHeight };
  }

  _fill(piece) {
    if (!piece.isFilled) this._draw(piece);
  }

  _empty(piece) {
    if (!piece.isFilled) return;
    piece.isFilled = false;
    // The browser keeps the size that the piece had: see `contain-intrinsic-block-size` in style.css.
    piece.element.classList.add("tokens-empty");
    fill(piece.element);
  }

  _draw(piece) {
    piece.isFilled = true;
    piece.isMarked = false;
    this.shade ??= COLOURINGS[this.colour].shader(this.segment);
    piece.element.classList.remove("tokens-empty");
    this._fetchAround(piece);
    const kind = kindOf(piece.span);
    const label = h("div.tokens-label", { "aria-hidden": "true" },
      h(`b.tokens-${KINDS[kind].name}`, { title: KINDS[kind].name }, kind), h("span", {}, piece.start === piece.span.start
        ? (kind === "P" ? `prompt · ${count(piece.span.ids.length)}` : `turn ${piece.span.turn} · ${count(piece.span.ids.length)}`)
        : `from ${count(piece.start)}`));
    const cells = h("div.tokens-cells", { role: "presentation" });
    for (let index = piece.start; index < piece.stop; ) index = this._drawCell(cells, piece, index, kind);
    fill(piece.element, label, cells);
    this._markPiece(piece);
  }

  /** Fetch the texts of a piece and of those around it, which the reader may see next. */
  _fetchAround(piece) {
    const at = this.pieces.indexOf(piece);
    for (const near of this.pieces.slice(Math.max(0, at - AHEAD), at + AHEAD + 1)) this.texts.want(this.segment.id, near.start, near.stop);
  }

  /** Add the cell of the token at an index. @returns {number} the index after the cell */
  _drawCell(cells, piece, index, kind) {
    const found = this.texts.at(this.segment.id, index);
    const stop = Math.min(found?.stop ?? index + 1, piece.stop);
    const classes = ["tokens-cell", `tokens-${KINDS[kind].name}`, this.shade(piece.span, index)];
    if (!found) classes.push(this.texts.error ? "tokens-id" : "tokens-wait");
    else if (found.special) classes.push("tokens-special");
    if (this.drifts.some((drift) => drift.index === index)) classes.push("tokens-drift");
    const cell = CELL.cloneNode();
    cell.className = classes.filter(Boolean).join(" ");
    cell.setAttribute("data-start", index);
    cell.setAttribute("data-stop", stop);
    // A text that began in an earlier piece was shown there.
    const text = found ? (found.start < index ? "…" : visible(found.text)) : String(piece.span.ids[index - piece.span.start]);
    cell.textContent = text === "" ? "∅" : text;
    cells.append(cell);
    if (found?.text.includes("\n")) cells.append("\n");
    return stop;
  }

  /** Draw again what is in a range of the segment. What the reader looks at stays where it is. */
  _redraw(start = 0, stop = Infinity) {
    const view = this.strip.getBoundingClientRect();
    const place = () => this.strip.querySelector("#tokens-active") ?? this.strip.querySelector(".tokens-current");
    const before = place()?.getBoundingClientRect();
    for (const piece of this.pieces) if (piece.isFilled && piece.start < stop && piece.stop > start) this._draw(piece);
    if (before && before.bottom > view.top && before.top < view.bottom) {
      this._scrollBy(place().getBoundingClientRect().top - before.top);
    }
    this._follow();
    this._updateNotice();
    this._showDetail();
  }

  _onTexts(segment, start, stop) {
    if (segment === this.segment?.id) this._redraw(start, stop);
  }

  _retry() {
    this.texts.retry();
    this._redraw();
  }

  _setColour(colour) {
    this.colour = colour;
    this.shade = null;
    this._redraw();
    this._updateLegend();
  }

  _updateHead() {
    const { segment } = this;
    fill(this.title, segment ? `Segment ${segment.id} (${segment.kind}): ${count(trainedTokens(segment))} of ${count(segment.length)} tokens train` : "No tokens yet");
    this._updateNotice();
    this._updateLegend();
    this._drawOverview();
  }

  _updateNotice() {
    const { segment, texts } = this;
    const refused = samplesOf(this.view.model, segment).filter((sample) => sample.trainable === false);
    const reasons = [...new Set(refused.map((sample) => sample.untrainable_reason || "not trainable"))];
    const lines = [];
    if (reasons.length) lines.push(h("span.warn", {}, `Mask 1 says who wrote a token; this sample does not train: ${reasons.join(", ")}.`));
    if (segment && !segment.verified) lines.push("The trainer reported no prompts: prompt and environment tokens are the server's own rendering.");
    if (texts.error) lines.push(h("span", {}, `Token ids are shown, because their texts are not available: ${visible(texts.error.message)} `,
      texts.error.status < 500 ? null : h("button", { on: { click: () => this._retry() } }, "Try again")));
    this.notice.hidden = !lines.length;
    fill(this.notice, lines.map((line) => h("span.tokens-line", {}, line)));
  }

  _updateLegend() {
    const rows = this.segment ? COLOURINGS[this.colour].legend(this.segment) : [];
    fill(this.legend, rows.map(({ name, key, text, why }) =>
      h("li", { title: why ?? "" }, name ? h(`b.tokens-key.${name}`, {}, key ?? "") : null, h("span", {}, text))));
  }

  _drawOverview() {
    const { segment, overview } = this;
    const rect = (name, x, width) => svg("rect", { class: `tokens-${name}`, x, width, height: 1, y: 0 });
    fill(overview, (segment?.spans ?? []).map((span) => rect(KINDS[kindOf(span)].name, span.start, span.ids.length)),
      this.drifts.map((drift) => rect("drift", drift.index, segment.length / 300)));
    overview.setAttribute("viewBox", `0 0 ${Math.max(1, segment?.length ?? 1)} 1`);
  }

  _onOverview(event) {
    const { left, width } = this.overview.getBoundingClientRect();
    if (this.segment) this._go(Math.floor(((event.clientX - left) / width) * this.segment.length));
  }

  _onHover(event) {
    const cell = event.target.closest(".tokens-cell");
    if (cell) this._showDetail(cell);
  }

  _onClick(event) {
    const cell = event.target.closest(".tokens-cell");
    if (cell && !getSelection().toString()) this._go(Number(cell.dataset.start), event.shiftKey);
  }

  /** Select a token, or extend the selection to it. */
  _go(token, extends_ = false) {
    if (!this.segment?.length) return;
    const at = Math.max(0, Math.min(this.segment.length - 1, token));
    this.anchor = extends_ ? this.anchor ?? this._token() ?? at : null;
    const span = this.view.model.spanAt(this.segment.id, at);
    this.view.select({ segment: this.segment.id, turn: span.turn, token: at });
  }

  /** @returns {number|null} the selected token of the segment */
  _token() {
    const { segment, token } = this.view.selection;
    const isOwn = this.segment && (!segment || segment === this.segment.id);
    return isOwn && token !== null && token < this.segment.length ? token : null;
  }

  /** @returns {{start: number, stop: number}|null} the selected tokens, with all of a shared text */
  _range() {
    const token = this._token();
    if (token === null) return null;
    const ends = [token, this.anchor ?? token].map((index) => this.texts.at(this.segment.id, index) ?? { start: index, stop: index + 1 });
    return { start: Math.min(...ends.map((end) => end.start)), stop: Math.max(...ends.map((end) => end.stop)) };
  }

  _onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.segment?.length) return;
    const token = this._token();
    if (event.key === "c" || event.key === "C") {
      if (token !== null) this._copy(event.key === "C");
      return;
    }
    const to = this._target(event.key, token ?? 0);
    if (to === null) return;
    event.preventDefault();
    this._go(token === null && event.key.startsWith("Arrow") ? 0 : to, event.shiftKey);
  }

  /** @returns {number|null} the token to which a key moves */
  _target(key, token) {
    const { spans } = this.segment;
    const at = this._range() ?? { start: token, stop: token + 1 };
    const here = spans.findIndex((span) => token < span.start + span.ids.length);
    const turns = spans.filter((span, index) => index === 0 || span.turn !== spans[index - 1].turn);
    const turn = turns.findLastIndex((span) => span.start <= token);
    const start = (list, index) => list[Math.max(0, Math.min(list.length - 1, index))].start;
    switch (key) {
      case "ArrowRight": return this.anchor === null ? at.stop : token + 1;
      case "ArrowLeft": return this.anchor === null ? at.start - 1 : token - 1;
      case "ArrowDown": return this._beside(token, 1);
      case "ArrowUp": return this._beside(token, -1);
      case "Home": return 0;
      case "End": return this.segment.length - 1;
      case "PageDown": return start(turns, turn + 1);
      case "PageUp": return start(turns, turn - 1);
      case "]": return start(spans, here + 1);
      case "[": return start(spans, here - 1);
      default: return null;
    }
  }

  /** @returns {number} the token above or below another, as it is drawn */
  _beside(token, direction) {
    const cells = [...this.strip.querySelectorAll(".tokens-cell")];
    const here = cells.findIndex((cell) => token < Number(cell.dataset.stop) && token >= Number(cell.dataset.start));
    if (here < 0) return token;
    const box = cells[here].getBoundingClientRect();
    let best = null;
    for (let index = here + direction; index >= 0 && index < cells.length; index += direction) {
      const other = cells[index].getBoundingClientRect();
      if (Math.abs(other.top - box.top) < box.height / 2) continue;
      if (best && Math.abs(other.top - best.top) > box.height / 2) break;
      const distance = Math.abs(other.left - box.left);
      if (!best || distance < best.distance) best = { top: other.top, distance, token: Number(cells[index].dataset.start) };
    }
    return best?.token ?? token;
  }

  async _copy(isSpan, button = h("button")) {
    const range = this._range();
    const span = this.view.model.spanAt(this.segment.id, this._token());
    const from = isSpan ? { start: span.start, stop: span.start + span.ids.length } : range;
    await copy(JSON.stringify(idsOf(this.segment, from.start, from.stop)), button);
  }

  _showDetail(cell = null) {
    if (!this.segment) return void fill(this.detail);
    const range = cell ? { start: Number(cell.dataset.start), stop: Number(cell.dataset.stop) } : this._range();
    const copies = cell || !range ? [] : [["copy ids", false], ["copy ids of the span", true]].map(([label, isSpan]) =>
      h("button", { on: { click: (event) => this._copy(isSpan, event.target) } }, label));
    fill(this.detail, tokenDetail(this, range), copies.length ? h("div.tokens-copy", {}, copies) : null);
  }

  _reveal(token) {
    const at = this.pieces.findIndex((piece) => token < piece.stop);
    if (at < 0) return;
    this._fill(this.pieces[at]);
    const cell = [...this.pieces[at].element.querySelectorAll(".tokens-cell")].find((each) => token < Number(each.dataset.stop));
    this._scrollTo(cell);
  }

  _showPiece(index) {
    if (index < 0) return;
    this._fill(this.pieces[index]);
    this._scrollTo(this.pieces[index].element, true);
  }

  /** Scroll the strip, and nothing around it: to the start of an element, or as little as possible. */
  _scrollTo(element, isStart = false) {
    const box = element.getBoundingClientRect();
    const view = this.strip.getBoundingClientRect();
    const margin = isStart ? 0 : Math.min(40, view.height / 4);
    const above = box.top - view.top - margin;
    const below = box.bottom - view.bottom + margin;
    if (isStart || above < 0) this._scrollBy(above);
    else if (below > 0) this._scrollBy(below);
  }

  _mark() {
    for (const piece of this.pieces) if (piece.isFilled) this._markPiece(piece);
  }

  _markPiece(piece) {
    const range = this._range();
    const { turn, token } = this.view.selection;
    piece.element.classList.toggle("tokens-current", token === null && turn !== 0 && turn === piece.span.turn);
    const isMarked = range !== null && piece.start < range.stop && piece.stop > range.start;
    if (!isMarked && !piece.isMarked) return;
    piece.isMarked = isMarked;
    for (const cell of piece.element.querySelectorAll(".tokens-cell")) {
      const isSelected = range !== null && Number(cell.dataset.start) < range.stop && Number(cell.dataset.stop) > range.start;
      if ((cell.getAttribute("aria-selected") === "true") !== isSelected) cell.setAttribute("aria-selected", isSelected);
      const isActive = isSelected && Number(cell.dataset.start) <= token && token < Number(cell.dataset.stop);
      cell.id = isActive ? "tokens-active" : "";
      if (isActive) this.strip.setAttribute("aria-activedescendant", cell.id);
    }
  }
}

/** Cut a span into pieces, also where drift is marked. */
function cut(span, marks) {
  const stop = span.start + span.ids.length;
  const pieces = [];
  for (let start = span.start; start < stop; start += PIECE) {
    const end = Math.min(stop, start + PIECE);
    const marked = [...marks].filter((index) => index >= start && index < end);
    pieces.push({ span, start, stop: end, key: `${start}-${end}-${span.turn}-${kindOf(span)}-${marked}` });
  }
  return pieces;
}

function labelOf({ span, start, stop }) {
  return `${KINDS[kindOf(span)].name}, turn ${span.turn}, tokens ${start} to ${stop - 1}`;
}

function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
