"""What the judge remembers of one rollout: mutable, and changed by an accepted answer only."""

import dataclasses
from collections.abc import Sequence

from rollout_server.testing.call import Answer, Prompt
from rollout_server.testing.history import canonical, first_difference
from rollout_server.testing.renderer import Message
from rollout_server.testing.verdict import EARLIER_KEPT, Refusal, Sample, Turn, Verdict


class Tally:
    """The messages known so far, the last prompt and answer, and the sample accumulated from them."""

    def __init__(self, rollout_id: str, earlier: tuple[Verdict, ...] = ()) -> None:
        self._rollout_id = rollout_id
        self._earlier = earlier[-EARLIER_KEPT:]
        self._known: list[str] = []
        self._answers: set[str] = set()
        self._ended = False
        self._seen: list[int] = []
        self._turns: list[Turn] = []
        self._refusals: list[Refusal] = []
        self._faults: list[str] = []
        self._prompt_ids: list[int] = []
        self._response_ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []

    @property
    def next_turn(self) -> int:
        """The number of the turn that comes next, from 1."""
        return len(self._turns) + 1

    @property
    def seen_tokens(self) -> int:
        """The length of the last prompt and its answer together."""
        return len(self._seen)

    def is_over_for(self, messages: Sequence[Message]) -> bool:
        """Whether the last answer called no tools and `messages` hold none of the answers given."""
        return self._ended and not any(canonical(message) in self._answers for message in messages)

    def history_fault(self, messages: Sequence[Message]) -> str | None:
        """How `messages` fail to continue what is known, naming the index; None where they do continue it."""
        index = first_difference(self._known, messages)
        if index is None:
            return None
        what = "the answer of the last turn" if index == len(self._known) - 1 else "what was sent before"
        if index < len(messages):
            return f"messages[{index}] is not {what}: the history of a rollout only grows"
        return (
            f"messages[{index}] is missing, it has to be {what}: {len(messages)} messages came, "
            f"{len(self._known)} are known, and the history of a rollout only grows"
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

    def fault(self, name: str) -> None:
        """Records a failure of the trainer itself; nothing else changes."""
        self._faults.append(f"turn {self.next_turn}: {name}")

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Takes an accepted turn into the sample."""
        drift = self.drift(prompt.ids) if self._turns else None
        self._turns.append(Turn(self.next_turn, len(prompt.ids), prompt.new_tokens, len(answer.token_ids), drift))
        if len(self._turns) == 1:
            self._prompt_ids = prompt.ids
        else:
            environment = prompt.ids[len(self._seen) :]
            self._append(environment, 0, [0.0] * len(environment))
        self._append(answer.token_ids, 1, answer.logprobs)
        self._seen = prompt.ids + answer.token_ids
        self._known = [canonical(message) for message in (*prompt.call.messages, answer.message)]
        self._answers.add(self._known[-1])
        self._ended = not answer.message.get("tool_calls")

    def _append(self, ids: list[int], mask: int, logprobs: list[float]) -> None:
        self._response_ids += ids
        self._mask += [mask] * len(ids)
        self._logprobs += logprobs

    def verdict(self) -> Verdict:
        """All of it as a value."""
        sample = Sample(tuple(self._prompt_ids), tuple(self._response_ids), tuple(self._mask), tuple(self._logprobs))
        return Verdict(
            rollout_id=self._rollout_id,
            turns=tuple(self._turns),
            refusals=tuple(self._refusals),
            faults=tuple(self._faults),
            sample=sample,
            earlier=self._earlier,
        )

    def anew(self) -> "Tally":
        """An empty tally under the same id, which keeps this one's verdict as an earlier one."""
        verdict = dataclasses.replace(self.verdict(), earlier=())
        return Tally(self._rollout_id, (*self._earlier, verdict))
