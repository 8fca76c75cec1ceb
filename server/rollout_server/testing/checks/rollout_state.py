"""What the judge remembers of one rollout: mutable, and changed by an accepted answer or a delivered outcome only."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollout_server.testing.checks.history_check import Reading, canonical, first_difference, verbatim
from rollout_server.testing.checks.renderer import Message
from rollout_server.testing.checks.turn import CheckedPrompt, ScriptedCompletion
from rollout_server.testing.checks.verdict import EARLIER_KEPT, JudgedTurn, Refusal, TrainerSample, Verdict
from rollout_server.testing.outcome_delivery import OutcomeDelivery
from rollout_server.testing.script import ScriptedReply

_COUNTED: Final = frozenset({"token_ids", "prompt_token_ids", "usage", "choices"})


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How many tokens of prompt and answer a response spoke of, by its ids or its usage; None where it did not."""

    prompt: int | None
    answer: int | None

    @classmethod
    def by(cls, answer: ScriptedCompletion, reply: ScriptedReply) -> "TokenCounts":
        """What a reply tells of an answer. Fields that were overridden may say anything."""
        if _COUNTED & set(reply.override):
            return cls(None, None)
        prompt = reply.usage or "prompt_token_ids" not in reply.omit
        generated = reply.usage or "token_ids" not in reply.omit
        return cls(len(answer.prompt_ids) if prompt else None, len(answer.token_ids) if generated else None)


@dataclass(frozen=True, slots=True)
class _Before:
    """What stood before the last turn, for a sibling of its answer to begin from."""

    known: list[str]
    seen: list[int]
    ended: bool
    response_tokens: int


class JudgedRollout:
    """The messages known so far, the last prompt and answer, and the sample accumulated from them."""

    def __init__(self, rollout_id: str, earlier: tuple[Verdict, ...] = ()) -> None:
        self._rollout_id = rollout_id
        self._earlier = earlier[-EARLIER_KEPT:]
        self._read: Reading = canonical
        self._known: list[str] = []
        self._answers: list[str] = []
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
        self.told: list[TokenCounts] = []
        self.turn_keys: list[str] = []
        self.asked_key = ""
        self.masked: bool | None = None
        self.conclusion: OutcomeDelivery | None = None

    @property
    def next_turn(self) -> int:
        """The number of the turn that comes next, from 1."""
        return len(self._turns) + 1

    @property
    def last_turn(self) -> JudgedTurn:
        """The turn that was answered last; there has to be one."""
        return self._turns[-1]

    @property
    def last_prompt(self) -> list[int]:
        """The prompt of that turn."""
        return self._seen[: self.last_turn.prompt_tokens]

    @property
    def seen_tokens(self) -> int:
        """The length of the last prompt and its answer together."""
        return len(self._seen)

    def has_answer(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` hold any of the answers given."""
        return any(self._read(message) in self._answers for message in messages)

    def is_over_for(self, messages: Sequence[Message]) -> bool:
        """Whether the last answer called no tools and `messages` hold none of the answers given."""
        return self._ended and not self.has_answer(messages)

    def history_fault(self, messages: Sequence[Message]) -> str | None:
        """How `messages` fail to continue what is known, naming the index; None where they do continue it."""
        index = first_difference(self._known, messages, self._read)
        if index is None:
            return None
        what = "the answer of the last turn" if index == len(self._known) - 1 else "what was sent before"
        if index < len(messages):
            return f"messages[{index}] is not {what}: the history of a rollout only grows"
        return (
            f"messages[{index}] is missing, it has to be {what}: {len(messages)} messages came, "
            f"{len(self._known)} are known, and the history of a rollout only grows"
        )

    def asked_alike(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are exactly those that the last answered turn came with."""
        asked = self._known[:-1]
        return len(messages) == len(asked) and first_difference(asked, messages, self._read) is None

    def final_fault(self, messages: Sequence[Message], *, with_answer: bool) -> str | None:
        """How an outcome's messages fail to begin with what was seen here, the last answer included or not."""
        index = first_difference(self._known if with_answer else self._known[:-1], messages, self._read)
        if index is None:
            return None
        return (
            f"final_messages[{index}] is {'not' if index < len(messages) else 'missing:'} what this trainer saw or said"
        )

    def drift(self, prompt_ids: Sequence[int]) -> int | None:
        """The first index at which `prompt_ids` does not extend the last prompt and its answer."""
        pairs = zip(self._seen, prompt_ids, strict=False)
        if len(prompt_ids) >= len(self._seen) and prompt_ids[: len(self._seen)] == self._seen:
            return None
        return next((i for i, (old, new) in enumerate(pairs) if old != new), len(prompt_ids))

    def refuse(self, refusal: Refusal) -> None:
        """Records a refusal; nothing else changes."""
        self._refusals.append(refusal)

    def fault(self, prompt: CheckedPrompt, name: str) -> None:
        """Records a failure of the trainer itself; what comes next is another attempt at the same turn."""
        self._faults.append(f"turn {prompt.turn}: {name}")
        if prompt.call.keyed and prompt.turn == self.next_turn:
            self.asked_key = prompt.call.keyed.turn_key

    def lied(self, name: str) -> None:
        """Records that what was told of the last answer is not what counts here."""
        self._faults.append(f"turn {self.next_turn - 1}: {name}")

    def replayed(self) -> None:
        """Records that an answer was given again."""
        self._replays += 1

    def add(self, prompt: CheckedPrompt, answer: ScriptedCompletion, told: TokenCounts) -> None:
        """Takes an accepted turn into the sample; a sibling in place of the answer that it is one of."""
        if prompt.repeats:
            self._undo()
            self._siblings += 1
        drift = self.drift(prompt.ids) if self._turns else None
        self._before = _Before(self._known, self._seen, self._ended, len(self._response_ids))
        self._turns.append(JudgedTurn(self.next_turn, len(prompt.ids), prompt.new_tokens, len(answer.token_ids), drift))
        if len(self._turns) == 1:
            self._prompt_ids = prompt.ids
        else:
            environment = prompt.ids[len(self._seen) :]
            self._append(environment, 0, [0.0] * len(environment))
        self._append(answer.token_ids, 1, answer.logprobs)
        self._seen = prompt.ids + answer.token_ids
        self._remember(prompt, answer)
        self.told.append(told)

    def _remember(self, prompt: CheckedPrompt, answer: ScriptedCompletion) -> None:
        keyed = prompt.call.keyed
        self.masked, self.asked_key = prompt.call.masked, ""
        self._read = verbatim if keyed else canonical
        self._known = [self._read(message) for message in (*prompt.call.messages, answer.message)]
        self._answers.append(self._known[-1])
        self._ended = not answer.message.get("tool_calls")
        self.turn_keys.append(keyed.turn_key if keyed else "")

    def _undo(self) -> None:
        before = self._before
        for grown in (self._turns, self._answers, self.told, self.turn_keys):
            grown.pop()
        for tokens in (self._response_ids, self._mask, self._logprobs):
            del tokens[before.response_tokens :]
        self._known, self._seen, self._ended = before.known, before.seen, before.ended

    def _append(self, ids: list[int], mask: int, logprobs: list[float]) -> None:
        self._response_ids += ids
        self._mask += [mask] * len(ids)
        self._logprobs += logprobs

    def verdict(self) -> Verdict:
        """All of it as a value."""
        sample = TrainerSample(
            tuple(self._prompt_ids), tuple(self._response_ids), tuple(self._mask), tuple(self._logprobs)
        )
        return Verdict(
            rollout_id=self._rollout_id,
            turns=tuple(self._turns),
            refusals=tuple(self._refusals),
            faults=tuple(self._faults),
            sample=sample,
            outcome=self.conclusion.value() if self.conclusion else None,
            siblings=self._siblings,
            replays=self._replays,
            earlier=self._earlier,
        )

    def anew(self) -> "JudgedRollout":
        """An empty tally under the same id, which keeps this one's verdict as an earlier one."""
        verdict = dataclasses.replace(self.verdict(), earlier=())
        return JudgedRollout(self._rollout_id, (*self._earlier, verdict))
