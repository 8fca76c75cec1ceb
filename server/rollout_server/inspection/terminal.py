"""A transcript drawn for a terminal.

Each line begins with the letter of its author, which no text can forge because every line break in a text begins a line of
its own; colour says the same once more. Then comes the number of the first token on the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_server.inspection.escape import BREAK, visible
from rollout_server.inspection.text import ending, headline, pieces_of
from rollout_server.inspection.token_text import Decode, TokenText, text_of
from rollout_server.inspection.transcript import Stretch, TokenRun, Transcript, TranscriptDrift

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = "M model, A model but masked by the author, P prompt, E environment, C closing token, ! drift; M trains, the rest does not"
_STYLES = {"M": "bold green", "A": "red", "P": "cyan", "E": "yellow", "C": "magenta", "!": "bold red", "?": "white"}
_IDS_ON_A_LINE = 12


@dataclass(frozen=True, slots=True)
class Look:
    """How to look: with the text of tokens where `decode` is known, and with logprobs if they are wanted."""

    decode: Decode | None
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TranscriptLine:
    """A line of a drawing. `letter` is blank for what stands between tokens; `number` is the first token's."""

    letter: str
    number: int | None
    text: str

    @property
    def margin(self) -> str:
        """What stands in front of the text."""
        return f"{self.letter} {'' if self.number is None else self.number:>6}│ " if self.letter else ""

    def wrapped(self, width: int) -> Iterator[TranscriptLine]:
        """The line in parts of at most so many cells, each with the letter in front: a terminal would wrap without."""
        from rich.cells import chop_cells

        indent = TranscriptLine(self.letter, None, "").margin or "  "
        first, *rest = chop_cells(self.text, max(width - len(indent), 1)) or [""]
        yield TranscriptLine(self.letter, self.number, first)
        for part in rest:
            yield TranscriptLine(self.letter, None, part if self.letter else f"  {part}")

    def __str__(self) -> str:
        return self.margin + self.text


def draw(console: Console, transcript: Transcript, look: Look) -> None:
    """Prints a transcript, wrapped where there is a terminal; a pipe gets whole lines."""
    from rich.text import Text

    for line in lines(transcript, look):
        for part in line.wrapped(console.width) if console.is_terminal else (line,):
            console.print(Text(str(part), _STYLES.get(part.letter, "")), soft_wrap=True, highlight=False)


def lines(transcript: Transcript, look: Look) -> Iterator[TranscriptLine]:
    """The lines of a transcript; no character in them does anything to a terminal."""
    yield TranscriptLine("", None, visible(headline(transcript.rollout)))
    yield TranscriptLine("", None, visible(ending(transcript.outcome)))
    for warning in transcript.outcome.warnings:
        yield TranscriptLine("", None, visible(f"warning in turn {warning.turn} ({warning.code}): {warning.message}"))
    if not transcript.outcome.segments:
        yield from _conversation(transcript)
        return
    yield TranscriptLine("", None, LEGEND)
    for stretch in transcript.stretches:
        yield TranscriptLine("", None, "")
        yield TranscriptLine("", None, visible(_title(stretch)))
        yield from _stretch(stretch, look)


def _conversation(transcript: Transcript) -> Iterator[TranscriptLine]:
    """What is left to see where no tokens are known."""
    yield TranscriptLine(
        "", None, "no tokens are known: the trainer sent none, or the rollout was read in a lesser view; its messages:"
    )
    for message in transcript.outcome.messages:
        yield TranscriptLine("", None, visible(message.json or str(message.chat)))


def _title(stretch: Stretch) -> str:
    shares = f"which shares {stretch.parent_tokens} tokens" if stretch.parent_tokens else "with a prompt of its own"
    opened = f" of segment {stretch.parent_id}, {shares}" if stretch.parent_id else ""
    masked = f", {stretch.masked} of the model's are masked by the author" if stretch.masked else ""
    checked = "verified" if stretch.verified else "not verified: the trainer did not report every prompt"
    trained = f"{stretch.trained} of {len(stretch.ids)} tokens train{masked}"
    return f"segment {stretch.id} ({stretch.kind}{opened}): {trained}, {checked}"


def _stretch(stretch: Stretch, look: Look) -> Iterator[TranscriptLine]:
    made = pieces_of(stretch, look.decode)
    drifts = list(stretch.drifts)
    turn = None
    for run in stretch.runs:
        if run.turn != turn:
            turn = run.turn
            yield TranscriptLine("", None, visible(_turn([each for each in stretch.runs if each.turn == turn])))
        own = [piece for piece in made if run.start <= piece.start < run.stop]
        while drifts and drifts[0].index < run.stop:
            drift = drifts.pop(0)
            yield from _run(run, [piece for piece in own if piece.start < drift.index], look)
            own = [piece for piece in own if piece.start >= drift.index]
            yield from _drift(drift, look)
        yield from _run(run, own, look)
    for drift in drifts:
        yield from _drift(drift, look)


def _turn(runs: Sequence[TokenRun]) -> str:
    """Which turn it is, and what the trainer said of it."""
    policy = next((f", policy {run.policy_version}" for run in runs if run.policy_version), "")
    planes = ", ".join(f"{name} ({dtype})" for run in runs for name, dtype in run.planes)
    return f"turn {runs[0].turn}{policy}{f', with {planes}' if planes else ''}"


def _run(run: TokenRun, own: Sequence[TokenText], look: Look) -> Iterator[TranscriptLine]:
    if look.logprobs and run.author == "model":
        for piece in own:
            yield TranscriptLine(run.letter, piece.start, f"{_logprobs(run, piece)}  {_word(run, piece)}")
    elif look.decode is None:
        for start in range(0, len(own), _IDS_ON_A_LINE):
            some = own[start : start + _IDS_ON_A_LINE]
            yield TranscriptLine(run.letter, some[0].start, " ".join(_word(run, piece) for piece in some))
    else:
        yield from _text(run, own)


def _text(run: TokenRun, own: Sequence[TokenText]) -> Iterator[TranscriptLine]:
    """Runs of text, broken behind each line feed. Tokens without a text stand there by their ids."""
    text, number = "", None
    for piece in own:
        *whole, rest = (f"⟨{_ids(run, piece)}⟩" if piece.text is None else piece.text).split("\n")
        for part in whole:
            yield TranscriptLine(run.letter, piece.start if number is None else number, text + visible(part) + BREAK)
            text, number = "", None
        if rest or not whole:
            number = piece.start if number is None and not whole else number
            text += visible(rest)
    if text:
        yield TranscriptLine(run.letter, number, text)


def _word(run: TokenRun, piece: TokenText) -> str:
    return _ids(run, piece) if piece.text is None else visible(piece.text)


def _ids(run: TokenRun, piece: TokenText) -> str:
    return " ".join(map(str, run.ids[piece.start - run.start : piece.stop - run.start]))


def _logprobs(run: TokenRun, piece: TokenText) -> str:
    if run.logprobs is None:
        return f"{'unknown':>9}"
    values = run.logprobs[piece.start - run.start : piece.stop - run.start]
    return " ".join(f"{value:9.4f}" for value in values)


def _drift(drift: TranscriptDrift, look: Look) -> Iterator[TranscriptLine]:
    said = drift.message or f"turn {drift.turn}: the trainer's prompt parts from ours at token {drift.index}"
    yield TranscriptLine("!", drift.index, visible(said))
    if drift.was is not None:
        yield TranscriptLine("!", None, f"was   {_window(drift.was, look)}")
    yield TranscriptLine("!", None, f"here  {_window(drift.here, look)}")


def _window(ids: Sequence[int], look: Look) -> str:
    text = text_of(ids, look.decode)
    if not ids:
        return "(nothing)"
    return " ".join(map(str, ids)) if text is None else visible(text)
