"""What a tokenizer and its chat template add to the checks: the ends of turns, the markers of messages, and retokenization."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import JSON
from rollout_server.edge.tokens.loader import TokenizerFiles
from rollout_server.edge.tokens.rendering_form import Arguments, Fields, with_names
from rollout_server.edge.tokens.template_probe import TOOL
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.verification.alignment import TurnTokens, trained_spans
from rollout_server.verification.findings import FindingKind, SampleFinding
from rollout_server.verification.row_lists import SampleRow

_USER: Fields = {"role": "user", "content": "Hello"}
_ARGUMENT, _CALL_ID = "Qf7xSeen", "a1b2c3d41"
_CONTEXT = 6
"""Tokens around a marker that are shown."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The tokenizer of the checked samples.

    Args:
        loaded: encodes and decodes.
        turn_tokens: stop tokens, and the generation prompt.
        markers: tokens that a template writes around user messages and tool results and never in a completion.
    """

    loaded: LoadedTokenizer
    turn_tokens: TurnTokens
    markers: frozenset[int]

    def check(self, row: SampleRow) -> Iterator[SampleFinding]:
        """Yield a finding if a marker of a user or tool message trains."""
        if not row.trains or self.markers.isdisjoint(row.response):
            return
        wrong = [
            i
            for i, (each, trains) in enumerate(zip(row.response, row.mask, strict=True))
            if trains and each in self.markers
        ]
        if wrong:
            at, more = wrong[0], f" ({len(wrong)} markers)" if len(wrong) > 1 else ""
            marker = self._text(row, at, at + 1)
            around = self._text(row, max(0, at - _CONTEXT), at + _CONTEXT)
            text = f"{marker!r} begins or ends a user or tool message, but has mask 1{more}: {around!r}"
            yield row.finding(FindingKind.TRAINED_MARKERS, row.raw.names.mask, row.mask_start + at, text)

    def retokenized(self, row: SampleRow) -> tuple[int, int]:
        """Return how many completions of a row encode to other tokens than were sampled, and the number of all."""
        spans = trained_spans(row.mask) if row.raw.trainable else []
        different = sum(not self._is_stable(row, start, stop) for start, stop in spans)
        return different, len(spans)

    def _is_stable(self, row: SampleRow, start: int, stop: int) -> bool:
        try:
            return list(self.loaded.encode(self._text(row, start, stop))) == row.response[start:stop]
        except RolloutFailed:  # the text cannot be encoded, for example half of a surrogate pair
            return False

    def _text(self, row: SampleRow, start: int, stop: int) -> str:
        return self.loaded.decode(pack_tokens(row.response[start:stop]))


def token_rules(name: str, files: TokenizerFiles) -> TokenRules:
    """Return the rules of a tokenizer. Takes a second: its template renders a few conversations."""
    with ThreadPoolExecutor(1) as executor:
        loaded = LoadedTokenizer(name, files.tokenizer, executor, files.ends)
    added = files.tokenizer.added_tokens_decoder
    eos = files.tokenizer.eos_token_id
    stops = {*files.ends, *(stop.id for stop in loaded.probed.stops), *(() if eos is None else (eos,))}
    written = f"{_render(loaded, [_USER])}{_tool_message(loaded)}"
    markers = {index for index, token in added.items() if token.content and token.content in written}
    turn_tokens = TurnTokens(frozenset(stops), _generation_prompt(loaded))
    return TokenRules(loaded, turn_tokens, frozenset(markers - stops - loaded.probed.inside))


def _render(
    loaded: LoadedTokenizer, messages: list[Fields], *, generation_prompt: bool = False, tools: bool = False
) -> str:
    """Return a rendered conversation; empty if the template refuses it."""
    try:
        return loaded.text(messages, Frame([TOOL] if tools else None), generation_prompt=generation_prompt)
    except RolloutFailed:
        return ""


def _generation_prompt(loaded: LoadedTokenizer) -> list[int]:
    """Return the tokens that the template adds when a completion is wanted; empty if it adds nothing behind the messages."""
    without, prompt = (_render(loaded, [_USER], generation_prompt=wanted) for wanted in (False, True))
    return list(loaded.encode(prompt[len(without) :])) if without and prompt.startswith(without) else []


def _tool_message(loaded: LoadedTokenizer) -> str:
    """Return what the template writes behind a completion for the result of its tool call; empty if it cannot be found."""
    arguments: JSON = {"value": _ARGUMENT}
    if loaded.probed.preferred is Arguments.RECEIVED:
        arguments = json.dumps(arguments)
    call: Fields = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "look", "arguments": arguments}}],
    }
    messages = [_USER, call, {"role": "tool", "tool_call_id": _CALL_ID, "content": "seen"}]
    if loaded.probed.needs_names:
        messages = list(with_names(messages))
    _, _, text = _render(loaded, messages, tools=True).rpartition(_ARGUMENT)
    # The rest of the call, such as its end marker, is part of the completion.
    starts = (
        text.find(stop.text) + (0 if stop.opens_next else len(stop.text))
        for stop in loaded.probed.stops
        if stop.text in text
    )
    return text[min(starts, default=len(text)) :]
