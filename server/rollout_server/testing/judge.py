"""The law of the synchronous dialect, as a strict trainer applies it. No HTTP, no clock, no randomness.

The judge keeps, for each rollout, the messages it has seen and the lengths of its own full renderings. On call k > 1
``len(render k) - len(render k-1) - len(answer k-1)`` tokens are new, whatever they are, and the mask has to have exactly
that many zeros. What it accumulates is the sample that a trainer would train on.

A refused call and a committed fault leave the rollout as it was. In the masked dialect an id starts anew, as http-wire.md
(A) has it, when its last answer called no tools and a call comes with a null mask and without any answer given before;
what was found until then is kept as an earlier verdict.
"""

import threading
from typing import Final

from rollout_server.testing.call import Answer, Call, Prompt
from rollout_server.testing.mask import first_mask_fault, mask_fault
from rollout_server.testing.renderer import PlainRenderer, UnrenderableError
from rollout_server.testing.script import Reply
from rollout_server.testing.tally import Tally
from rollout_server.testing.verdict import Refusal, RefusalReason, RefusedError, Verdict

ROLLOUTS_KEPT: Final = 4096


class Judge:
    """Checks calls, turns replies into answers, and keeps a verdict for each of the last `rollouts_kept` rollouts.

    `check` and `accept` belong together and are for one thread, the one that owns the renderer. Verdicts may be read, and
    rollouts forgotten, from any other.
    """

    def __init__(self, renderer: PlainRenderer, rollouts_kept: int = ROLLOUTS_KEPT) -> None:
        self._renderer = renderer
        self._rollouts_kept = rollouts_kept
        self._tallies: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def check(self, call: Call) -> Prompt:
        """The prompt that a right call gives. RefusedError for a wrong one, which is then part of the verdict."""
        tally = self._tallies.get(call.key) or Tally(call.key)
        over = call.masked and not call.mask and tally.is_over_for(call.messages)
        begins = tally.next_turn == 1 or over
        try:
            return self._first(call) if begins else self._later(call, tally)
        except RefusedError as error:
            with self._lock:
                refused = self._tallies.get(call.key) or tally
                refused.refuse(error.refusal)
                self._keep(call.key, refused)
            raise

    def accept(self, prompt: Prompt, reply: Reply) -> Answer:
        """The answer to a checked call; from now on the rollout's next call has to continue it."""
        answer = self.answer(prompt, reply)
        with self._lock:
            tally = self._tally(prompt)
            tally.add(prompt, answer)
            self._keep(prompt.call.key, tally)
        return answer

    def answer(self, prompt: Prompt, reply: Reply) -> Answer:
        """What `accept` would give, without counting it."""
        call = prompt.call
        ids = self._renderer.answer(call.messages, call.tools, prompt.ids, reply)
        return Answer(reply.message, reply.finish, ids, _logprobs(len(prompt.ids), len(ids)), prompt.ids)

    def record_fault(self, prompt: Prompt, name: str) -> None:
        """Notes in the verdict that a checked call is not answered, by what kind of failure."""
        with self._lock:
            tally = self._tally(prompt)
            tally.fault(name)
            self._keep(prompt.call.key, tally)

    def start_anew(self, rollout_id: str) -> bool:
        """Makes the next call under this id a first one; whether the id was known."""
        with self._lock:
            tally = self._tallies.get(rollout_id)
            if tally:
                self._keep(rollout_id, tally.anew())
            return tally is not None

    def verdict(self, rollout_id: str) -> Verdict | None:
        """What was found about one rollout; None for an id that is not known."""
        with self._lock:
            tally = self._tallies.get(rollout_id)
            return tally.verdict() if tally else None

    def verdicts(self) -> tuple[Verdict, ...]:
        """All that are kept, the one called least recently first."""
        with self._lock:
            return tuple(tally.verdict() for tally in self._tallies.values())

    def _first(self, call: Call) -> Prompt:
        if call.masked and (fault := first_mask_fault(call.mask)):
            raise _refused(1, RefusalReason.MASK, fault)
        return Prompt(call, self._rendered(call, 1), new_tokens=0, begins=True)

    def _later(self, call: Call, tally: Tally) -> Prompt:
        turn = tally.next_turn
        if fault := tally.history_fault(call.messages):
            raise _refused(turn, RefusalReason.HISTORY, fault)
        ids = self._rendered(call, turn)
        new_tokens = len(ids) - tally.seen_tokens
        if new_tokens < 0:
            text = (
                f"the messages render to {len(ids)} tokens, {-new_tokens} fewer than the {tally.seen_tokens} "
                "of the last prompt and its answer: no response_mask can be right"
            )
            raise _refused(turn, RefusalReason.SHRUNK, text)
        if call.masked and (fault := mask_fault(call.mask, new_tokens)):
            raise _refused(turn, RefusalReason.MASK, fault)
        return Prompt(call, ids, new_tokens, begins=False)

    def _rendered(self, call: Call, turn: int) -> list[int]:
        try:
            return self._renderer.prompt(call.messages, call.tools)
        except UnrenderableError as error:
            raise _refused(turn, RefusalReason.TEMPLATE, str(error)) from error

    def _tally(self, prompt: Prompt) -> Tally:
        tally = self._tallies.get(prompt.call.key) or Tally(prompt.call.key)
        return tally.anew() if prompt.begins and tally.next_turn > 1 else tally

    def _keep(self, rollout_id: str, tally: Tally) -> None:
        self._tallies.pop(rollout_id, None)
        self._tallies[rollout_id] = tally
        while len(self._tallies) > self._rollouts_kept:
            del self._tallies[next(iter(self._tallies))]


def _refused(turn: int, reason: RefusalReason, text: str) -> RefusedError:
    return RefusedError(Refusal(turn, reason, text))


def _logprobs(offset: int, count: int) -> list[float]:
    """Multiples of 1/128 in (-1, 0), which float32 holds exactly; another sequence for each length of prompt."""
    return [-(1 + (offset * 31 + index * 7) % 97) / 128 for index in range(count)]
