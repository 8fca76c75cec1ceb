"""Rendering of a transcript for a terminal.

Each line begins with a letter for the author of its tokens, followed by the index of its first token. Text cannot forge a letter,
because each line break in a text starts another line with its letter. Colours repeat the letters' meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_server.edge.tokens.token_text import Decode, TokenText, decoded_text
from rollout_server.inspection.escape import BREAK, visible
from rollout_server.inspection.text import calls_line, ending, headline, segment_token_texts
from rollout_server.inspection.transcript import TokenRun, Transcript, TranscriptDrift, TranscriptSegment

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = "M model (mask 1); mask 0: A model, masked by the agent, S model, stale, P prompt, E environment, C closing token; ! drift"
_STYLES = {
    "M": "bold green",
    "A": "red",
    "S": "red",
    "P": "cyan",
    "E": "yellow",
    "C": "magenta",
    "!": "bold red",
    "?": "white",
}
_IDS_ON_A_LINE = 12


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What to show.

    Args:
        decode: decodes token ids to text; None shows ids.
        logprobs: show each generated token with its logprob.
    """

    decode: Decode | None
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TranscriptLine:
    """A line of the rendering.

    Args:
        letter: the author; empty for headings and other lines without tokens.
        number: index of the line's first token in its segment; None on a continuation line.
        text: escaped text.
    """

    letter: str
    number: int | None
    text: str

    @property
    def margin(self) -> str:
        """Prefix of the line: letter and token index; empty for lines without a letter."""
        return f"{self.letter} {'' if self.number is None else self.number:>6}│ " if self.letter else ""

    def wrap(self, width: int) -> Iterator[TranscriptLine]:
        """Split the line into parts of at most `width` cells, each with the letter; a terminal would wrap without it."""
        from rich.cells import chop_cells

        indent = TranscriptLine(self.letter, None, "").margin or "  "
        first, *rest = chop_cells(self.text, max(width - len(indent), 1)) or [""]
        yield TranscriptLine(self.letter, self.number, first)
        for part in rest:
            yield TranscriptLine(self.letter, None, part if self.letter else f"  {part}")

    def __str__(self) -> str:
        return self.margin + self.text


def print_transcript(console: Console, transcript: Transcript, options: ViewOptions) -> None:
    """Print a transcript. Lines are wrapped on a terminal only, not in a pipe."""
    from rich.text import Text

    for line in lines(transcript, options):
        for part in line.wrap(console.width) if console.is_terminal else (line,):
            console.print(Text(str(part), _STYLES.get(part.letter, "")), soft_wrap=True, highlight=False)


def lines(transcript: Transcript, options: ViewOptions) -> Iterator[TranscriptLine]:
    """Yield the lines of a transcript. They contain no control characters."""
    yield TranscriptLine("", None, visible(headline(transcript.rollout)))
    yield TranscriptLine("", None, visible(ending(transcript.rollout)))
    for warning in transcript.outcome.warnings:
        yield TranscriptLine("", None, visible(f"warning in turn {warning.turn} ({warning.code}): {warning.message}"))
    if transcript.outcome.HasField("capture"):
        yield TranscriptLine("", None, visible(calls_line(transcript.outcome.capture)))
    if not transcript.outcome.segments:
        yield from _message_lines(transcript)
        return
    yield TranscriptLine("", None, LEGEND)
    for segment in transcript.segments:
        yield TranscriptLine("", None, "")
        yield TranscriptLine("", None, visible(_title(segment)))
        if segment.parting:
            yield TranscriptLine("", None, visible(segment.parting))
        yield from _segment_lines(segment, options)


def _message_lines(transcript: Transcript) -> Iterator[TranscriptLine]:
    """Yield the messages of a rollout that has no tokens."""
    yield TranscriptLine(
        "", None, "no token ids: the trainer sent none, or the rollout was not read with view=full; messages:"
    )
    for message in transcript.outcome.messages:
        yield TranscriptLine("", None, visible(message.json or str(message.chat)))


def _title(segment: TranscriptSegment) -> str:
    shares = f"{segment.parent_tokens} shared tokens" if segment.parent_tokens else "new prompt"
    opened = f" of segment {segment.parent_id}, {shares}" if segment.parent_id else ""
    masked = f", {segment.masked} generated tokens masked by the agent" if segment.masked else ""
    masked += f", {segment.stale} generated tokens stale" if segment.stale else ""
    checked = "verified" if segment.verified else "not verified: the trainer did not report every prompt"
    trained = f"{segment.trained} of {len(segment.ids)} tokens have mask 1{masked}"
    return f"segment {segment.id} ({segment.kind}{opened}): {trained}, {checked}"


def _segment_lines(segment: TranscriptSegment, options: ViewOptions) -> Iterator[TranscriptLine]:
    tokens = segment_token_texts(segment, options.decode)
    drifts = list(segment.drifts)
    turn = None
    for run in segment.runs:
        if run.turn != turn:
            turn = run.turn
            yield TranscriptLine("", None, visible(_turn([each for each in segment.runs if each.turn == turn])))
        own = [token for token in tokens if run.start <= token.start < run.stop]
        while drifts and drifts[0].index < run.stop:
            drift = drifts.pop(0)
            yield from _run_lines(run, [token for token in own if token.start < drift.index], options)
            own = [token for token in own if token.start >= drift.index]
            yield from _drift_lines(drift, options)
        yield from _run_lines(run, own, options)
    for drift in drifts:
        yield from _drift_lines(drift, options)


def _turn(runs: Sequence[TokenRun]) -> str:
    """Return the heading of a turn: number, policy version and token planes."""
    versions = [run.policy_label for run in runs if run.policy_label]
    policy = f", policy {', then '.join(versions)}" if versions else ""
    planes = ", ".join(f"{name} ({dtype})" for run in runs for name, dtype in run.planes)
    return f"turn {runs[0].turn}{policy}{f', planes {planes}' if planes else ''}"


def _run_lines(run: TokenRun, own: Sequence[TokenText], options: ViewOptions) -> Iterator[TranscriptLine]:
    if options.logprobs and run.author == "model":
        for token in own:
            yield TranscriptLine(run.letter, token.start, f"{_logprobs(run, token)}  {_token_label(run, token)}")
    elif options.decode is None:
        for start in range(0, len(own), _IDS_ON_A_LINE):
            some = own[start : start + _IDS_ON_A_LINE]
            yield TranscriptLine(run.letter, some[0].start, " ".join(_token_label(run, token) for token in some))
    else:
        yield from _text_lines(run, own)


def _text_lines(run: TokenRun, own: Sequence[TokenText]) -> Iterator[TranscriptLine]:
    """Yield lines of text, one per line feed. Tokens that cannot be decoded are shown as ids."""
    text, number = "", None
    for token in own:
        *complete, rest = (f"⟨{_ids(run, token)}⟩" if token.text is None else token.text).split("\n")
        for part in complete:
            yield TranscriptLine(run.letter, token.start if number is None else number, text + visible(part) + BREAK)
            text, number = "", None
        if rest or not complete:
            # The rest of a token after a line feed does not set the index of its line; the next token does.
            number = token.start if number is None and not complete else number
            text += visible(rest)
    if text:
        yield TranscriptLine(run.letter, number, text)


def _token_label(run: TokenRun, token: TokenText) -> str:
    return _ids(run, token) if token.text is None else visible(token.text)


def _ids(run: TokenRun, token: TokenText) -> str:
    return " ".join(map(str, run.ids[token.start - run.start : token.stop - run.start]))


def _logprobs(run: TokenRun, token: TokenText) -> str:
    if run.logprobs is None:
        return f"{'unknown':>9}"
    values = run.logprobs[token.start - run.start : token.stop - run.start]
    return " ".join(f"{value:9.4f}" for value in values)


def _drift_lines(drift: TranscriptDrift, options: ViewOptions) -> Iterator[TranscriptLine]:
    message = (
        drift.message or f"turn {drift.turn}: the reported prompt differs from the prediction at token {drift.index}"
    )
    yield TranscriptLine("!", drift.index, visible(message))
    if drift.was is not None:
        yield TranscriptLine("!", None, f"was   {_window(drift.was, options)}")
    yield TranscriptLine("!", None, f"here  {_window(drift.here, options)}")


def _window(ids: Sequence[int], options: ViewOptions) -> str:
    text = decoded_text(ids, options.decode)
    if not ids:
        return "(no tokens)"
    return " ".join(map(str, ids)) if text is None else visible(text)
