/**
 * The token strip: every token of a segment, who wrote it, and why it trains or not.
 *
 * A segment may have hundreds of thousands of tokens. Its spans are cut into pieces, and only those near the view have
 * cells.
 */
import { copy, count, fill, h } from "page/dom.js";
import {
  departuresOf, driftsOf, idsOf, shownSegment, trainedTokens, whyNoTokens, whyNotTrained,
} from "page/rollout/segments.js";
import { COLOURINGS } from "page/tokens/colours.js";
import { tokenDetail } from "page/tokens/detail.js";
import { targetOf } from "page/tokens/moves.js";
import { tokenOverview } from "page/tokens/overview.js";
import { KINDS, kindOf, TokenTexts, visible } from "page/tokens/texts.js";

const PIECE = 256;
/** So many pieces before and after a visible one have their texts fetched. */
const AHEAD = 6;
/** Pieces of up to so many tokens are about two lines high. */
const SHORT = 40;

const CELL = h("span", { role: "option", "aria-selected": "false" });

/** @param {import("page/rollout/rollout.js").View} view */
export function tokensPart(view) {
  return new TokenStrip(view);
}

class TokenStrip {
  constructor(view) {
    this.view = view;
    const onTexts = (segment, start, stop) => [null, this.segment?.id].includes(segment) && this._redraw(start, stop);
    this.texts = new TokenTexts(view.source, view.uid, onTexts);
    this.segment = null;
    this.colour = "author";
    /** The other end of a selected range. @type {number|null} */
    this.anchor = null;
    this.pieces = [];
    /** The end of the strip stays in view. */
    this.follows = view.model.rollout.state !== "finished";
    this._last = { scrollTop: 0, scrollHeight: 0 };
    this._build();
    const near = { root: this.strip, rootMargin: "75% 0px" };
    this._near = new IntersectionObserver((entries) => this._onNear(entries), near);
  }

  _build() {
    this.title = h("p.tokens-title");
    this.notice = h("div.tokens-notice", { hidden: true });
    this.legend = h("ul.tokens-legend", { "aria-label": "Legend" });
    this.overview = tokenOverview((part) => this._go(Math.floor(part * this.segment.length)));
    // The buttons are never replaced, so that a live update takes no focus from them.
    const button = (label, isSpan) => h("button", { on: { click: () => this._copy(isSpan) } }, label);
    this.copying = [button("copy ids", false), button("copy ids of the span", true)];
    this.copies = h("div.tokens-copy", {}, this.copying);
    this.facts = h("div");
    this.detail = h("div.tokens-detail", {}, this.facts, this.copies);
    this.strip = h("div.tokens-strip", {
      role: "listbox", tabIndex: 0, "aria-multiselectable": "true", "aria-label": "Tokens",
      on: {
        click: (event) => this._onClick(event),
        keydown: (event) => this._onKey(event),
        // Shift extends the range of tokens, and not the browser's selection of text.
        mousedown: (event) => event.shiftKey && event.preventDefault(),
        pointerover: (event) => this._onHover(event),
        pointerleave: () => this._showDetail(),
        scroll: () => this._onScroll(),
      },
    });
    const choices = Object.entries(COLOURINGS).map(([value, { name }]) => {
      const change = () => this._setColour(value);
      const checked = value === this.colour;
      const input = h("input", { type: "radio", name: "tokens-colour", value, checked, on: { change } });
      return h("label", {}, input, h("span", {}, name));
    });
    const switcher = h("fieldset.tokens-switch", {}, h("legend", {}, "Colours show"), choices);
    this.element = h("section.tokens", { "aria-label": "Tokens" }, h("header.tokens-head", {}, this.title, switcher),
      this.legend, this.notice, this.overview.element, this.strip, this.detail);
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
    const { turn, token } = this.view.selection;
    if (shownSegment(this.view)?.id !== this.segment?.id) this.update();
    if (this.anchor !== null && token === null) this.anchor = null;
    for (const piece of this.pieces) if (piece.isFilled) this._markPiece(piece);
    this._showDetail();
    if (!this._isSelected || (token === null && !turn)) return;
    this.follows = token === this.segment.length - 1;
    if (token !== null) this._reveal(token);
    else this._showPiece(this._turnPiece());
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
    const { segment } = this;
    const { model } = this.view;
    this.drifts = segment ? [...driftsOf(model, segment), ...departuresOf(model, segment)] : [];
    const wanted = (segment?.spans ?? []).flatMap((span) => cut(span, this.drifts));
    const isMoved = (piece, at) => this.pieces[at]?.start !== piece.start || this.pieces[at].stop !== piece.stop;
    const moved = wanted.findIndex(isMoved);
    const kept = moved < 0 ? wanted.length : moved;
    for (const piece of this.pieces.splice(kept)) {
      this._near.unobserve(piece.element);
      piece.element.remove();
    }
    this.pieces.forEach((piece, at) => {
      const isSame = piece.key === wanted[at].key;
      Object.assign(piece, wanted[at]);
      piece.element.ariaLabel = labelOf(piece);
      if (!isSame && piece.isFilled) this._draw(piece);
    });
    for (const piece of wanted.slice(kept)) this._addPiece(piece);
  }

  _addPiece(piece) {
    piece.element = h("div.tokens-piece.tokens-empty", { role: "group", ariaLabel: labelOf(piece) });
    piece.element.classList.toggle("tokens-short", piece.stop - piece.start <= SHORT);
    piece.element.classList.toggle("tokens-rest", piece.start > piece.span.start);
    piece.element.piece = piece;
    this.pieces.push(piece);
    this.strip.append(piece.element);
    this._near.observe(piece.element);
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
    // A strip that shrinks is moved up to its end by the browser: that is no decision of the reader.
    if (scrollTop > this._last.scrollTop && scrollHeight - scrollTop - clientHeight < 40) this.follows = true;
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
    const { turn, ids, start } = piece.span;
    const name = `${kind === "P" ? "prompt" : `turn ${turn}`} · ${count(ids.length)}`;
    const place = piece.start > start ? `from ${count(piece.start)}` : name;
    const letter = h(`b.tokens-${KINDS[kind].name}`, { title: KINDS[kind].name }, kind);
    const cells = h("div.tokens-cells", { role: "presentation" });
    for (let index = piece.start; index < piece.stop; ) index = this._drawCell(cells, piece, index, kind);
    fill(piece.element, h("div.tokens-label", { "aria-hidden": "true" }, letter, h("span", {}, place)), cells);
    this._markPiece(piece);
  }

  /** Fetch the texts of a piece and of those around it, which the reader may see next. */
  _fetchAround(piece) {
    const at = this.pieces.indexOf(piece);
    const around = this.pieces.slice(Math.max(0, at - AHEAD), at + AHEAD + 1);
    for (const { start, stop } of around) this.texts.want(this.segment.id, start, stop);
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
    if (!found) cell.textContent = piece.span.ids[index - piece.span.start];
    // A text that began in an earlier piece was shown there.
    else cell.textContent = found.start < index ? "…" : visible(found.text) || "∅";
    cells.append(cell);
    if (found?.text.includes("\n")) cells.append("\n");
    return stop;
  }

  /** Draw again what is in a range of the segment. What the reader looks at stays where it is. */
  _redraw(start = 0, stop = Infinity) {
    const view = this.strip.getBoundingClientRect();
    const place = () => this.strip.querySelector("#tokens-active") || this._turnPiece()?.element;
    const before = place()?.getBoundingClientRect();
    for (const piece of this.pieces) if (piece.isFilled && piece.start < stop && piece.stop > start) this._draw(piece);
    if (before && before.bottom > view.top && before.top < view.bottom) {
      this._scrollBy(place().getBoundingClientRect().top - before.top);
    }
    this._follow();
    this._updateNotice();
    this._showDetail();
  }

  _setColour(colour) {
    this.colour = colour;
    this.shade = null;
    this._redraw();
    this._updateLegend();
  }

  _updateHead() {
    const { segment } = this;
    const numbers = segment && `${count(trainedTokens(segment))} of ${count(segment.length)} tokens train`;
    const title = segment ? `Segment ${segment.id} (${segment.kind}): ${numbers}` : whyNoTokens(this.view.model);
    fill(this.title, title);
    this._updateNotice();
    this._updateLegend();
    this.overview.draw(segment, this.drifts);
  }

  _updateNotice() {
    const { segment, texts } = this;
    const reason = segment && whyNotTrained(this.view.model, segment);
    const state = [reason, segment?.verified, texts.error?.message].join();
    if (state === this._noticed) return;
    this._noticed = state;
    const again = h("button", { on: { click: () => this.texts.retry() } }, "Try again");
    const lines = [
      reason && h("p.warn", {}, `Mask 1 says which tokens would train; this sample does not train: ${reason}.`),
      segment && !segment.verified
        && h("p", {}, "The trainer reported no prompts: prompt and environment tokens are the server's own rendering."),
      texts.error && h("p", {},
        `Token ids are shown, because their texts are not available: ${texts.error.message} `,
        texts.error.code !== "NO_TOKENIZER" && again),
    ].filter(Boolean);
    this.notice.hidden = !lines.length;
    fill(this.notice, lines);
  }

  _updateLegend() {
    const rows = this.segment ? COLOURINGS[this.colour].legend(this.segment) : [];
    fill(this.legend, rows.map(({ name, key, text, why }) =>
      h("li", { title: why }, name && h(`b.tokens-key.${name}`, {}, key), h("span", {}, text))));
  }

  _onHover(event) {
    const cell = event.target.closest(".tokens-cell");
    if (cell) this._showDetail(cell);
  }

  _onClick(event) {
    const cell = event.target.closest(".tokens-cell");
    // Who selects text with the pointer selects no token.
    if (cell && (event.shiftKey || getSelection().isCollapsed)) this._go(Number(cell.dataset.start), event.shiftKey);
  }

  /** Select a token, or extend the selection to it. */
  _go(token, isExtending = false) {
    if (!this.segment?.length) return;
    const at = Math.max(0, Math.min(this.segment.length - 1, token));
    this.anchor = isExtending ? this.anchor ?? this._token() ?? at : null;
    const span = this.view.model.spanAt(this.segment.id, at);
    this.view.select({ segment: this.segment.id, turn: span.turn, token: at });
  }

  /** Whether the selection is in the segment that is shown. */
  get _isSelected() {
    const { segment } = this.view.selection;
    return this.segment && (!segment || segment === this.segment.id);
  }

  /** @returns {number|null} the selected token of the segment */
  _token() {
    const { token } = this.view.selection;
    return this._isSelected && token !== null && token < this.segment.length ? token : null;
  }

  /** @returns {{start: number, stop: number}|null} the selected tokens, with all of a shared text */
  _range() {
    const token = this._token();
    if (token === null) return null;
    const textAt = (index) => this.texts.at(this.segment.id, index) ?? { start: index, stop: index + 1 };
    const ends = [textAt(token), textAt(this.anchor ?? token)];
    return { start: Math.min(...ends.map((end) => end.start)), stop: Math.max(...ends.map((end) => end.stop)) };
  }

  _onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.segment?.length) return;
    const token = this._token();
    if (event.key === "c" || event.key === "C") {
      if (token !== null) this._copy(event.key === "C");
      return;
    }
    const at = token ?? 0;
    const range = (this.anchor === null && this._range()) || { start: at, stop: at + 1 };
    const cells = () => [...this.strip.querySelectorAll(".tokens-cell")];
    const to = targetOf(event.key, at, { segment: this.segment, range, cells });
    if (to === null) return;
    event.preventDefault();
    this._go(token === null && event.key.startsWith("Arrow") ? 0 : to, event.shiftKey);
  }

  _copy(isSpan) {
    const { start, stop } = this._range();
    const ids = isSpan ? this.view.model.spanAt(this.segment.id, this._token()).ids : idsOf(this.segment, start, stop);
    copy(JSON.stringify(ids), this.copying[isSpan ? 1 : 0]);
  }

  _showDetail(cell = null) {
    const range = cell ? { start: Number(cell.dataset.start), stop: Number(cell.dataset.stop) } : this._range();
    this.copies.hidden = Boolean(cell || !range);
    fill(this.facts, this.segment && tokenDetail(this, range));
  }

  _reveal(token) {
    const at = this.pieces.findIndex((piece) => token < piece.stop);
    if (at < 0) return;
    this._fill(this.pieces[at]);
    const cells = [...this.pieces[at].element.querySelectorAll(".tokens-cell")];
    this._scrollTo(cells.find((cell) => token < Number(cell.dataset.stop)));
  }

  /** The first piece of the completion of the selected turn. */
  _turnPiece() {
    const { turn } = this.view.selection;
    return this._isSelected && this.pieces.find(({ span }) => span.turn === turn && span.author === "model");
  }

  _showPiece(piece) {
    if (!piece) return;
    this._fill(piece);
    this._scrollTo(piece.element, true);
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

  _markPiece(piece) {
    const range = this._range();
    const { turn, token } = this.view.selection;
    piece.element.classList.toggle("tokens-current", token === null && turn !== 0 && turn === piece.span.turn);
    const isMarked = range !== null && piece.start < range.stop && piece.stop > range.start;
    if (!isMarked && !piece.isMarked) return;
    piece.isMarked = isMarked;
    for (const cell of piece.element.querySelectorAll(".tokens-cell")) {
      const [start, stop] = [Number(cell.dataset.start), Number(cell.dataset.stop)];
      const isActive = isMarked && start <= token && token < stop;
      cell.ariaSelected = String(isMarked && start < range.stop && stop > range.start);
      cell.id = isActive ? "tokens-active" : "";
      if (isActive) this.strip.setAttribute("aria-activedescendant", cell.id);
    }
  }
}

/** Cut a span into pieces. The key of a piece changes when it must be drawn again. */
function cut(span, drifts) {
  const pieces = [];
  for (let start = span.start; start < span.start + span.ids.length; start += PIECE) {
    const stop = Math.min(span.start + span.ids.length, start + PIECE);
    const marks = drifts.map((drift) => drift.index).filter((index) => index >= start && index < stop);
    pieces.push({ span, start, stop, key: `${kindOf(span)} ${span.turn} ${marks}` });
  }
  return pieces;
}

function labelOf({ span, start, stop }) {
  return `${KINDS[kindOf(span)].name}, turn ${span.turn}, tokens ${start} to ${stop - 1}`;
}
