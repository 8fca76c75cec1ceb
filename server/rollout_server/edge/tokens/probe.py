"""What a chat template does with answers, found by rendering a few when its tokenizer is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.cut import Render, environment_text
from rollout_server.edge.tokens.form import Arguments, Fields
from rollout_server.edge.tokens.mirror import mirror_length, mirrored
from rollout_server.runtime.port import Failed

_SAID = "Qf7xSaidByTheModel"
_ASKED: Fields = {"role": "user", "content": "Hello"}
_ANSWERED: Fields = {"role": "assistant", "content": _SAID}
_CALL_ID = "a1b2c3d4"  # nine letters and digits with its number, which is all that Mistral's templates take
_LONGEST_EXAMPLE = 160


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
        arguments: the forms of tool call arguments with which the template does not raise.
        mirrors: what follows an answer does not depend on what was said before it, in all that was tried.
        refusal: why rollouts cannot be rendered with this template, with an example; empty: they can.
    """

    final: Stop | None
    calls: Stop | None
    arguments: frozenset[Arguments]
    mirrors: bool = False
    refusal: str = ""

    @property
    def stops(self) -> tuple[Stop, ...]:
        """What closes answers."""
        return tuple(stop for stop in (self.final, self.calls) if stop is not None)

    @property
    def preferred(self) -> Arguments:
        """The form of arguments that is used: as they come, unless the template takes objects only."""
        return Arguments.PARSED if self.arguments == {Arguments.PARSED} else Arguments.RECEIVED

    def stop(self, *, calls: bool) -> Stop | None:
        """What closes an answer."""
        return self.calls if calls else self.final


def probe(render: Render, special: Mapping[int, str]) -> Probed:
    """Renders answers with and without tool calls (tokens.md, R2, R3 and R6a).

    A stop is the first special token behind what the model said. The next message is there too, because the stops of some
    models (GLM) are the tokens with which the next message begins. `eos_token` is often another one.
    """
    refusal = _refusal(render)
    final = _stop(_try(render, [_ASKED, _ANSWERED, _ASKED]), special)
    texts = {form: _try(render, [_ASKED, *_round(1, form, _SAID)]) for form in Arguments}
    accepted = frozenset(form for form, text in texts.items() if text is not None)
    found = (_stop(texts[form], special) for form in Arguments if form in accepted)
    calls = next((stop for stop in found if stop is not None), final)
    first = Probed(final, calls, accepted, refusal=refusal)
    return Probed(final, calls, accepted, _mirrors(render, first), refusal)


def _mirrors(render: Render, probed: Probed) -> bool:
    """Whether every environment that is tried comes out the same behind a mirrored history."""
    seen = [
        same
        for messages, answered in _histories(probed)
        if (same := _same(render, messages, answered, probed)) is not None
    ]
    return bool(seen) and all(seen)


def _same(render: Render, messages: Sequence[Fields], answered: int, probed: Probed) -> bool | None:
    """None where the template refuses the conversation, so that nothing was seen."""
    stop = probed.stop(calls="tool_calls" in messages[answered])
    full = _try(render, messages)
    if full is None or stop is None:
        return None
    short = mirrored(messages, answered)
    mirror = _try(render, short)
    if mirror is None:
        return False
    real = environment_text(render, messages, answered + 1, stop.text, full)
    return real == environment_text(render, short, mirror_length(messages, answered), stop.text, mirror)


def _histories(probed: Probed) -> Iterator[tuple[list[Fields], int]]:
    """Conversations, and the index of the answer in each that is followed by an environment."""
    system: Fields = {"role": "system", "content": "Be brief."}
    thought: Fields = {**_ANSWERED, "reasoning_content": "Let me see."}
    for start in ([_ASKED], [system, _ASKED], [_ASKED, thought, _ASKED]):
        rounds = [_round(number, probed.preferred) for number in (1, 2, 3)]
        for messages in accumulate(rounds, initial=list(start)):
            if len(messages) > len(start):
                yield messages, len(messages) - 2
            yield [*messages, _ANSWERED, _ASKED], len(messages)


def _round(number: int, form: Arguments, said: str = "x") -> list[Fields]:
    """A call and its result."""
    arguments: JSON = f'{{"value": "{said}"}}' if form is Arguments.RECEIVED else {"value": said}
    call: JSON = {
        "id": f"{_CALL_ID}{number}",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"{_CALL_ID}{number}", "name": "look", "content": f"seen {number}"},
    ]


def _refusal(render: Render) -> str:
    try:
        render([_ASKED], True)
        text = render([_ASKED, _ANSWERED, _ASKED], True)
    except Failed as failed:
        return f"{failed.failure.message} (tried with {_ASKED['content']!r} from a user, an answer, and the same again)"
    if _SAID in text:
        return ""
    shown = text[-_LONGEST_EXAMPLE:]
    return f"the chat template leaves out what was said before: {_SAID!r}, said by the model, is not in {shown!r}"


def _try(render: Render, messages: Sequence[Fields]) -> str | None:
    try:
        return render(messages, True)
    except Failed:
        return None


def _stop(text: str | None, special: Mapping[int, str]) -> Stop | None:
    if text is None or (said := text.find(_SAID)) < 0:
        return None
    places = ((text.find(token, said), -len(token), index) for index, token in special.items() if token)
    first = min((place for place in places if place[0] >= 0), default=None)
    return None if first is None else Stop(special[first[2]], first[2])
