"""The judge's state of one rollout: its history, its sample and the delivery of its outcome.

Only accepted completions and delivered outcomes change history and sample.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rollout_server.testing.checks.renderer import Message
from rollout_server.testing.checks.turn import CheckedPrompt, ScriptedCompletion
from rollout_server.testing.checks.verdict import (
    EARLIER_KEPT,
    DeliveredOutcome,
    JudgedTurn,
    Refusal,
    TrainerSample,
    Verdict,
)
from rollout_server.testing.script import ScriptedReply

_COUNTED: Final = frozenset({"token_ids", "prompt_token_ids", "usage", "choices"})


Reading: TypeAlias = Callable[[Message], str]
"""Converts a message to a text. Equivalent messages have equal texts."""
RETRIED_STATUSES: Final = frozenset({408, 425, 429})
"""The 4xx statuses after which the same outcome is sent again. Any other 4xx is final (docs/design.md, B)."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Number of prompt and completion tokens that a response reported, in its ids or its usage; None if it did not."""

    prompt: int | None
    completion: int | None

    @classmethod
    def of(cls, completion: ScriptedCompletion, reply: ScriptedReply) -> "TokenCounts":
        """Return the counts that a reply reports. Overridden fields may contain anything, so their counts are unknown."""
        if _COUNTED & set(reply.override):
            return cls(None, None)
        prompt = reply.usage or "prompt_token_ids" not in reply.omit
        generated = reply.usage or "token_ids" not in reply.omit
        return cls(len(completion.prompt_ids) if prompt else None, len(completion.token_ids) if generated else None)


@dataclass(frozen=True, slots=True)
class _Before:
    """The state before the last turn, to which a sibling of its completion returns."""

    known: list[str]
    seen: list[int]
    ended: bool
    response_tokens: int


class JudgedRollout:
    """The messages so far, the last prompt and completion, and the sample accumulated from them.

    Attributes:
        reported_counts: the token counts reported in each turn.
        turn_keys: the ``Idempotency-Key`` of each answered turn; empty texts for requests without keys.
        pending_key: the key of a turn that failed and may be retried.
        masked: whether the rollout's requests have masks; None before the first one.
        delivery: the delivery of the outcome; None if there was none.
    """

    def __init__(self, rollout_id: str, earlier: tuple[Verdict, ...] = ()) -> None:
        self._rollout_id = rollout_id
        self._earlier = earlier[-EARLIER_KEPT:]
        self._read: Reading = canonical
        self._known: list[str] = []
        self._completions: list[str] = []
        self._ended = False
        self._seen: list[int] = []
        self._turns: list[JudgedTurn] = []
        self._refusals: list[Refusal] = []
        self._faults: list[str] = []
        self._prompt_ids: list[int] = []
        self._response_ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._before = _Before([], [], ended=False, response_tokens=0)
        self._siblings = self._replays = 0
        self.reported_counts: list[TokenCounts] = []
        self.turn_keys: list[str] = []
        self.pending_key = ""
        self.masked: bool | None = None
        self.delivery: OutcomeDelivery | None = None

    @property
    def next_turn(self) -> int:
        """The number of the next turn, from 1."""
        return len(self._turns) + 1

    @property
    def last_turn(self) -> JudgedTurn:
        """The last answered turn. There must be one."""
        return self._turns[-1]

    @property
    def last_prompt(self) -> list[int]:
        """The prompt's token ids in the last answered turn."""
        return self._seen[: self.last_turn.prompt_tokens]

    @property
    def seen_tokens(self) -> int:
        """The length of the last prompt and its completion together, in tokens."""
        return len(self._seen)

    def has_completion(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` contain any completion of this rollout."""
        return any(self._read(message) in self._completions for message in messages)

    def is_over_for(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` start a new rollout: the last completion called no tools, and they contain no completion."""
        return self._ended and not self.has_completion(messages)

    def history_fault(self, messages: Sequence[Message]) -> str | None:
        """Return at which index `messages` do not continue the history, as text; None if they do."""
        index = first_difference(self._known, messages, self._read)
        if index is None:
            return None
        what = "the completion of the last turn" if index == len(self._known) - 1 else "what was sent before"
        if index < len(messages):
            return f"messages[{index}] is not {what}: the history of a rollout is append-only"
        return (
            f"messages[{index}] is missing, it has to be {what}: the request has {len(messages)} messages, "
            f"{len(self._known)} are known, and the history of a rollout is append-only"
        )

    def repeats_last_request(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` are exactly those of the last answered request."""
        previous = self._known[:-1]
        return len(messages) == len(previous) and first_difference(previous, messages, self._read) is None

    def final_fault(self, messages: Sequence[Message], *, with_completion: bool) -> str | None:
        """Return how an outcome's messages fail to begin with the history; None if they do.

        `with_completion`: the history includes the last completion.
        """
        index = first_difference(self._known if with_completion else self._known[:-1], messages, self._read)
        if index is None:
            return None
        if index < len(messages):
            return f"final_messages[{index}] is not the message that this trainer received or sent"
        return f"final_messages[{index}] is missing: this trainer received or sent more messages"

    def drift(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the first index at which `prompt_ids` differs from the last prompt and completion; None if it extends them."""
        pairs = zip(self._seen, prompt_ids, strict=False)
        if len(prompt_ids) >= len(self._seen) and prompt_ids[: len(self._seen)] == self._seen:
            return None
        return next((i for i, (old, new) in enumerate(pairs) if old != new), len(prompt_ids))

    def refuse(self, refusal: Refusal) -> None:
        """Record a refusal. Nothing else changes."""
        self._refusals.append(refusal)

    def fault(self, prompt: CheckedPrompt, name: str) -> None:
        """Record a failure of the trainer itself. The next request is then another attempt of the same turn."""
        self._faults.append(f"turn {prompt.turn}: {name}")
        if prompt.call.keyed and prompt.turn == self.next_turn:
            self.pending_key = prompt.call.keyed.turn_key

    def record_lie(self, name: str) -> None:
        """Record a lie about the last completion."""
        self._faults.append(f"turn {self.next_turn - 1}: {name}")

    def record_replay(self) -> None:
        """Record that a completion was sent again."""
        self._replays += 1

    def add(self, prompt: CheckedPrompt, completion: ScriptedCompletion, counts: TokenCounts) -> None:
        """Append an accepted turn to history and sample. A sibling replaces the completion of the same turn."""
        if prompt.repeats:
            self._drop_last_turn()
            self._siblings += 1
        drift = self.drift(prompt.ids) if self._turns else None
        self._before = _Before(self._known, self._seen, self._ended, len(self._response_ids))
        self._turns.append(
            JudgedTurn(self.next_turn, len(prompt.ids), prompt.new_tokens, len(completion.token_ids), drift)
        )
        if len(self._turns) == 1:
            self._prompt_ids = prompt.ids
        else:
            environment = prompt.ids[len(self._seen) :]
            self._append(environment, 0, [0.0] * len(environment))
        self._append(completion.token_ids, 1, completion.logprobs)
        self._seen = prompt.ids + completion.token_ids
        self._store_history(prompt, completion)
        self.reported_counts.append(counts)

    def _store_history(self, prompt: CheckedPrompt, completion: ScriptedCompletion) -> None:
        keyed = prompt.call.keyed
        self.masked, self.pending_key = prompt.call.masked, ""
        self._read = verbatim if keyed else canonical
        self._known = [self._read(message) for message in (*prompt.call.messages, completion.message)]
        self._completions.append(self._known[-1])
        self._ended = not completion.message.get("tool_calls")
        self.turn_keys.append(keyed.turn_key if keyed else "")

    def _drop_last_turn(self) -> None:
        before = self._before
        for grown in (self._turns, self._completions, self.reported_counts, self.turn_keys):
            grown.pop()
        for tokens in (self._response_ids, self._mask, self._logprobs):
            del tokens[before.response_tokens :]
        self._known, self._seen, self._ended = before.known, before.seen, before.ended

    def _append(self, ids: list[int], mask: int, logprobs: list[float]) -> None:
        self._response_ids += ids
        self._mask += [mask] * len(ids)
        self._logprobs += logprobs

    def verdict(self) -> Verdict:
        """Return the verdict as an immutable value."""
        sample = TrainerSample(
            tuple(self._prompt_ids), tuple(self._response_ids), tuple(self._mask), tuple(self._logprobs)
        )
        return Verdict(
            rollout_id=self._rollout_id,
            turns=tuple(self._turns),
            refusals=tuple(self._refusals),
            faults=tuple(self._faults),
            sample=sample,
            outcome=self.delivery.value() if self.delivery else None,
            siblings=self._siblings,
            replays=self._replays,
            earlier=self._earlier,
        )

    def fresh_state(self) -> "JudgedRollout":
        """Return an empty state for the same id, which keeps this state's verdict among the earlier ones."""
        verdict = dataclasses.replace(self.verdict(), earlier=())
        return JudgedRollout(self._rollout_id, (*self._earlier, verdict))


def canonical(message: Message) -> str:
    """Return a text in which null and absent keys are equal.

    The order of keys is ignored, except inside `arguments`, which templates render in the given order. ``8`` and ``8.0`` differ.
    """
    return verbatim({key: value for key, value in message.items() if value is not None})


def verbatim(message: Message) -> str:
    """Return a text in which null and absent keys differ, for a protocol that passes messages on unchanged."""
    return json.dumps(_with_sorted_keys(message))


def first_difference(known: Sequence[str], messages: Sequence[Message], read: Reading = canonical) -> int | None:
    """Return the first index at which `messages` differs from the texts in `known`; None if it begins with them."""
    for index, text in enumerate(known):
        if index >= len(messages) or read(messages[index]) != text:
            return index
    return None


def _with_sorted_keys(value: object) -> object:
    if isinstance(value, Mapping):
        return [[key, value[key] if key == "arguments" else _with_sorted_keys(value[key])] for key in sorted(value)]
    if isinstance(value, list | tuple):
        return ["", *(_with_sorted_keys(item) for item in value)]
    return value


@dataclass(frozen=True, slots=True)
class OutcomeNotice:
    """One delivery of an outcome: body as bytes, parsed body, and ``Idempotency-Key`` (empty if missing)."""

    rollout_id: str
    raw: bytes
    body: Mapping[str, Any]
    key: str


class OutcomeDelivery:
    """The first delivery of an outcome, the number of deliveries, and the status that settled it."""

    def __init__(self, first: OutcomeNotice) -> None:
        self._first = first
        self._deliveries = 0
        self._final_status: int | None = None

    @property
    def settled(self) -> bool:
        """Whether the outcome was acknowledged or finally refused."""
        return self._final_status is not None

    def receive(self, notice: OutcomeNotice) -> str | None:
        """Count a delivery and return how it differs from the first one; None if it is correct."""
        self._deliveries += 1
        if self._final_status is not None:
            return f"the outcome was answered with status {self._final_status}, which is final, but it was sent again"
        if notice.raw != self._first.raw:
            return (
                "the body differs from the one delivered before: every delivery of an outcome must send the same bytes"
            )
        if notice.key != self._first.key:
            return f"the Idempotency-Key is {notice.key!r}, but was {self._first.key!r} before"
        return None

    def settle(self, status: int) -> None:
        """Record the status that was sent. The first final one counts."""
        final = 200 <= status < 300 or (400 <= status < 500 and status not in RETRIED_STATUSES)
        if final and self._final_status is None:
            self._final_status = status

    def value(self) -> DeliveredOutcome:
        """Return the delivered outcome as an immutable value."""
        return DeliveredOutcome(self._first.body, self._first.key, self._deliveries, self._final_status)
