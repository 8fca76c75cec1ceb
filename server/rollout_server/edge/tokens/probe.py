"""What a chat template does with answers, found by rendering a few when its tokenizer is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.message import JSON
from rollout_server.runtime.port import Failed

Render: TypeAlias = Callable[[Sequence[Mapping[str, JSON]]], str]

_SAID = "Qf7xSaidByTheModel"
_ASKED: Mapping[str, JSON] = {"role": "user", "content": "Hello"}
_CALL_ID = "a1b2c3d4e"  # nine letters and digits, which is all that Mistral's templates take


@dataclass(frozen=True, slots=True)
class Stop:
    """The special token that a template writes after an answer."""

    text: str
    id: int


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found.

    Args:
        final: what closes an answer without tool calls; None where no special token does.
        calls: what closes one with tool calls; some templates use another token there.
        objects_only: tool call arguments given as text, which is how they come, make this template raise.
    """

    final: Stop | None
    calls: Stop | None
    objects_only: bool

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids of both stops."""
        return frozenset(stop.id for stop in (self.final, self.calls) if stop is not None)


def probe(render: Render, special: Mapping[int, str]) -> Probed:
    """Renders answers with and without tool calls (tokens.md, R3 and R6a).

    A stop is the first special token behind what the model said. The next message is there too, because the stops of some
    models (GLM) are the tokens with which the next message begins. `eos_token` is often another one.
    """
    final = _stop(_try(render, [_ASKED, {"role": "assistant", "content": _SAID}, _ASKED]), special)
    text = _try(render, _with_call(f'{{"value": "{_SAID}"}}'))
    if text is None and (text := _try(render, _with_call({"value": _SAID}))) is not None:
        return Probed(final, _stop(text, special) or final, objects_only=True)
    return Probed(final, _stop(text, special) or final, objects_only=False)


def _try(render: Render, messages: Sequence[Mapping[str, JSON]]) -> str | None:
    try:
        return render(messages)
    except Failed:
        return None


def _with_call(arguments: JSON) -> list[Mapping[str, JSON]]:
    call: JSON = {"id": _CALL_ID, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        _ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _CALL_ID, "name": "look", "content": "seen"},
    ]


def _stop(text: str | None, special: Mapping[int, str]) -> Stop | None:
    if text is None or (said := text.find(_SAID)) < 0:
        return None
    places = ((text.find(token, said), -len(token), index) for index, token in special.items() if token)
    first = min((place for place in places if place[0] >= 0), default=None)
    return None if first is None else Stop(special[first[2]], first[2])
