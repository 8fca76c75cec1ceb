"""A rollout's tokens as a picture: one box per token, coloured by who wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from rollout_server.edge.tokens.token_text import Decode, TokenText
from rollout_server.inspection.escape import visible
from rollout_server.inspection.text import segment_token_texts
from rollout_server.inspection.transcript import TokenRun, Transcript, TranscriptSegment

_WIDTH: Final = 1000
_MARGIN: Final = 16
_LABEL: Final = 176
_ROW: Final = 24
_BOX: Final = 19
# Width of a character of the monospace font at 12 px, rounded up: viewers have different fonts.
_CHARACTER: Final = 7.4
_PADDING: Final = 4
_GAP: Final = 2
# A longer prompt is cut in the middle: its system message and tools would fill the picture.
_EDGE_TOKENS: Final = 24

# Label, fill and text colour by the letter of a run.
_STYLES: Final = {
    "M": ("model · mask 1", "#a7f3d0", "#064e3b"),
    "P": ("prompt · mask 0", "#e5e7eb", "#374151"),
    "E": ("environment · mask 0", "#fde68a", "#78350f"),
    "C": ("stop token · mask 0", "#fecaca", "#7f1d1d"),
    "A": ("model, masked · mask 0", "#d1d5db", "#065f46"),
    "S": ("model, stale · mask 0", "#e5e7eb", "#065f46"),
    "?": ("unknown · mask 0", "#ffffff", "#374151"),
}


@dataclass(frozen=True, slots=True)
class _Box:
    """A token text in the picture."""

    text: str
    tooltip: str = ""

    @property
    def width(self) -> float:
        return len(self.text) * _CHARACTER + 2 * _PADDING


def transcript_svg(transcript: Transcript, decode: Decode | None) -> str:
    """The segments of a transcript as an SVG document without external references.

    Without `decode` the boxes show token ids. The tooltip of each box has the token's id, mask and logprob.
    """
    body: list[str] = []
    y = float(_MARGIN)
    for segment in transcript.segments:
        rows, y = _segment_rows(segment, decode, y)
        body += rows
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y:g}" viewBox="0 0 {_WIDTH} {y:g}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">'
    )
    background = f'<rect width="{_WIDTH}" height="{y:g}" rx="8" fill="#ffffff" stroke="#d1d5db"/>'
    return "\n".join([head, background, *body, "</svg>"]) + "\n"


def _segment_rows(segment: TranscriptSegment, decode: Decode | None, y: float) -> tuple[list[str], float]:
    """The rows of a segment, and where the next one begins."""
    title = f"segment {segment.id}: {segment.trained} of {len(segment.ids)} tokens train"
    found = [_text(_MARGIN, y + 12, title, "#111827")]
    y += _ROW
    texts = segment_token_texts(segment, decode)
    for run in segment.runs:
        label, fill, colour = _STYLES[run.letter]
        found.append(_text(_MARGIN, y + 13, label, colour))
        x = float(_LABEL)
        for box in _boxes(run, [text for text in texts if run.start <= text.start < run.stop], segment):
            if x > _LABEL and x + box.width > _WIDTH - _MARGIN:
                x, y = float(_LABEL), y + _ROW
            found.append(_rect(x, y, box, fill, colour))
            x += box.width + _GAP
        y += _ROW
    return found, y + _MARGIN


def _boxes(run: TokenRun, texts: Sequence[TokenText], segment: TranscriptSegment) -> Iterator[_Box]:
    """The boxes of a run; a long prompt without its middle."""
    cut = run.letter == "P" and len(texts) > 2 * _EDGE_TOKENS
    shown = texts[:_EDGE_TOKENS] if cut else texts
    yield from (_box(run, text, segment) for text in shown)
    if cut:
        left = sum(text.stop - text.start for text in texts[_EDGE_TOKENS:-_EDGE_TOKENS])
        yield _Box(f"… {left} tokens …")
        yield from (_box(run, text, segment) for text in texts[-_EDGE_TOKENS:])


def _box(run: TokenRun, text: TokenText, segment: TranscriptSegment) -> _Box:
    ids = segment.ids[text.start : text.stop]
    shown = " ".join(map(str, ids)) if text.text is None else text.text
    facts = [f"id {' '.join(map(str, ids))}", f"turn {run.turn}", f"mask {int(run.letter == 'M')}"]
    if run.logprobs is not None:
        facts.append(
            "logprob " + " ".join(f"{each:.3f}" for each in run.logprobs[text.start - run.start :][: len(ids)])
        )
    # Boxes of nothing but spaces would be invisible.
    printable = visible(shown).replace(" ", "·") if shown.isspace() else visible(shown)
    return _Box(printable, ", ".join(facts))


def _rect(x: float, y: float, box: _Box, fill: str, colour: str) -> str:
    tooltip = f"<title>{escape(box.tooltip)}</title>" if box.tooltip else ""
    rect = f'<rect x="{x:g}" y="{y:g}" width="{box.width:g}" height="{_BOX}" rx="3" fill="{fill}"/>'
    return f"<g>{tooltip}{rect}{_text(x + _PADDING, y + 13.5, box.text, colour)}</g>"


def _text(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
