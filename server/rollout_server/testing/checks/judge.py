"""The rules of all trainer protocols, as the strict trainer applies them. No HTTP, no clock, no randomness.

For each rollout the judge keeps the messages and the lengths of its own full renderings. In request k > 1,
``len(render k) - len(render k-1) - len(completion k-1)`` tokens are new, and the mask must have exactly that many zeros. The judge
accumulates the sample that a trainer would train on. A refused request or a scripted fault does not change the rollout.

* Synchronous HTTP API (docs/design.md, A): an id starts a new rollout if its last completion called no tools, and a request has a
  null mask and contains none of the earlier completions. The findings so far are kept as an earlier verdict.
* Asynchronous HTTP API (B): there is no mask. `async_rules` has the rules besides the history. A turn that is requested again under
  its key gets another completion (a *sibling*), which replaces the earlier one.
* Token mode: the request contains the ids, and `token_mode_check` verifies that the messages render to them.
"""

import threading
from collections.abc import Sequence
from typing import Final

from rollout_server.testing.checks.async_rules import call_fault, outcome_fault
from rollout_server.testing.checks.renderer import Message, PlainRenderer, UnrenderableError
from rollout_server.testing.checks.rollout_state import JudgedRollout, OutcomeDelivery, OutcomeNotice, TokenCounts
from rollout_server.testing.checks.token_mode_check import TokenModeCheck
from rollout_server.testing.checks.turn import CheckedPrompt, CompletionCall, ScriptedCompletion
from rollout_server.testing.checks.verdict import DeliveredOutcome, Refusal, RefusalReason, RefusedError, Verdict
from rollout_server.testing.script import Lie, ScriptedReply

ROLLOUTS_KEPT: Final = 4096
_KEYS_KEPT: Final = 16 * ROLLOUTS_KEPT


class RequestJudge:
    """Verifies requests and outcomes, turns replies into completions, and keeps the verdicts of the last `ROLLOUTS_KEPT` rollouts.

    With `reuses_ids` a rollout id of the asynchronous HTTP API may be used again once its outcome is settled.

    Threads: call `check`, `completion` and `accept` only in the thread that owns the renderer. All other methods are thread-safe.
    """

    def __init__(self, renderer: PlainRenderer, *, reuses_ids: bool = False) -> None:
        self._renderer = renderer
        self._token_mode = TokenModeCheck(renderer)
        self._reuses_ids = reuses_ids
        self._states: dict[str, JudgedRollout] = {}
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()

    def check(self, call: CompletionCall) -> CheckedPrompt:
        """Return the prompt of a correct request. Raises RefusedError for a wrong one, and records the refusal in the verdict."""
        state = self._states.get(call.key) or JudgedRollout(call.key)
        over = self._is_over(call, state)
        begins = state.next_turn == 1 or over
        try:
            self._check_keyed(call, JudgedRollout(call.key) if over else state)
            if call.again or (call.keyed and state.turn_keys[-1:] == [call.keyed.turn_key]):
                self._check_again(call, state)
                return CheckedPrompt(
                    call, state.last_prompt, state.last_turn.new_tokens, state.last_turn.number, repeats=True
                )
            return self._first(call) if begins else self._later(call, state)
        except RefusedError as error:
            self.refuse(call.key, error.refusal)
            raise

    def refuse(self, rollout_id: str, refusal: Refusal) -> None:
        """Record in the verdict that a request was refused."""
        with self._lock:
            state = self._states.get(rollout_id) or JudgedRollout(rollout_id)
            state.refuse(refusal)
            self._store(rollout_id, state)

    def receive_outcome(self, notice: OutcomeNotice) -> None:
        """Record the delivery of an outcome. Raises RefusedError if it is wrong or comes at the wrong time."""
        with self._lock:
            state = self._states.get(notice.rollout_id) or JudgedRollout(notice.rollout_id)
            fault = None
            if state.delivery is None:
                fault = outcome_fault(notice, state)
                state.delivery = OutcomeDelivery(notice)
            fault = state.delivery.receive(notice) or fault
            self._store(notice.rollout_id, state)
        if fault:
            refusal = Refusal(0, RefusalReason.OUTCOME, fault)
            self.refuse(notice.rollout_id, refusal)
            raise RefusedError(refusal)

    def settle(self, rollout_id: str, status: int) -> Verdict | None:
        """Record the status with which an outcome was answered. Return the verdict if that ends the delivery, else None."""
        with self._lock:
            state = self._states.get(rollout_id)
            if state is None or state.delivery is None or state.delivery.settled:
                return None
            state.delivery.settle(status)
            return state.verdict() if state.delivery.settled else None

    def accept(self, prompt: CheckedPrompt, reply: ScriptedReply, fault: str = "") -> ScriptedCompletion:
        """Return the completion of a checked request and record it: the rollout's next request must continue it.

        `fault`: the kind of failure that nevertheless loses the response, for the verdict.
        """
        completion = self.completion(prompt, reply)
        with self._lock:
            state = self._state_for(prompt)
            state.add(prompt, completion, TokenCounts.of(completion, reply))
            if fault:
                state.fault(prompt, fault)
            self._store(prompt.call.key, state)
        return completion

    def completion(self, prompt: CheckedPrompt, reply: ScriptedReply) -> ScriptedCompletion:
        """Return what `accept` would return, without recording it."""
        call = prompt.call
        # In token mode the prompt's ids may differ from the rendered ones, so the completion is cut from the rendering after the
        # template's own prompt.
        rendered = self._renderer.prompt(call.messages, call.tools) if call.token_prompt else prompt.ids
        ids = self._renderer.completion_ids(call.messages, call.tools, rendered, reply)
        message, finish = reply.message, reply.finish
        if call.max_tokens is not None and reply.lie is Lie.TOO_LONG:
            ids = [*ids[:1] * max(0, call.max_tokens + 1 - len(ids)), *ids]
        elif call.max_tokens is not None and len(ids) > call.max_tokens:
            ids = ids[: call.max_tokens]
            message, finish = {"role": "assistant", "content": self._renderer.decode(ids)}, "length"
        logprobs = _logprobs(len(prompt.ids), len(ids))
        return ScriptedCompletion(message, finish, ids, logprobs, prompt.ids, self._renderer.decode(ids))

    def record_fault(self, prompt: CheckedPrompt, name: str) -> None:
        """Record in the verdict that a checked request fails. `name` is the kind of failure."""
        with self._lock:
            state = self._state_for(prompt)
            state.fault(prompt, name)
            self._store(prompt.call.key, state)

    def record_lie(self, rollout_id: str, name: str) -> None:
        """Record in the verdict a lie about the last completion."""
        with self._lock:
            self._states[rollout_id].record_lie(name)

    def record_replay(self, prompt: CheckedPrompt) -> None:
        """Record in the verdict that the completion of a turn is sent again."""
        with self._lock:
            self._state_for(prompt).record_replay()

    def is_masked(self, rollout_id: str, messages: Sequence[Message]) -> bool | None:
        """Return whether the requests of the rollout that `messages` continue have masks; None if there is no such rollout."""
        with self._lock:
            state = self._states.get(rollout_id)
            over = state is None or state.delivery is not None or state.is_over_for(messages)
            return None if state is None or over else state.masked

    def start_anew(self, rollout_id: str) -> bool:
        """Discard a rollout's state and keep its verdict as an earlier one. Return whether the id was known.

        The next request with this id counts as the first one.
        """
        with self._lock:
            state = self._states.get(rollout_id)
            if state:
                self._store(rollout_id, state.fresh_state())
            return state is not None

    def verdict(self, rollout_id: str) -> Verdict | None:
        """Return the verdict of one rollout; None for an unknown id."""
        with self._lock:
            state = self._states.get(rollout_id)
            return state.verdict() if state else None

    def outcome(self, rollout_id: str) -> DeliveredOutcome | None:
        """Return the outcome of a rollout; None if none was delivered."""
        with self._lock:
            state = self._states.get(rollout_id)
            return state.delivery.value() if state and state.delivery else None

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return all stored verdicts, least recently used first."""
        with self._lock:
            return tuple(state.verdict() for state in self._states.values())

    def _check_again(self, call: CompletionCall, state: JudgedRollout) -> None:
        if call.again and not state.repeats_last_request(call.messages):
            text = f"turn {state.last_turn.number} is requested again, but the messages differ"
            raise _refusal_error(state.last_turn.number, RefusalReason.KEY, text)

    def _first(self, call: CompletionCall) -> CheckedPrompt:
        if call.masked and (fault := first_mask_fault(call.mask)):
            raise _refusal_error(1, RefusalReason.MASK, fault)
        return CheckedPrompt(call, self._ids(call, 1), new_tokens=0, turn=1, begins=True)

    def _later(self, call: CompletionCall, state: JudgedRollout) -> CheckedPrompt:
        turn = state.next_turn
        if fault := state.history_fault(call.messages):
            raise _refusal_error(turn, RefusalReason.HISTORY, fault)
        ids = self._ids(call, turn)
        new_tokens = len(ids) - state.seen_tokens
        if new_tokens < 0:
            text = (
                f"the messages render to {len(ids)} tokens, {-new_tokens} fewer than the {state.seen_tokens} "
                "of the last prompt and its completion: no response_mask can be right"
            )
            raise _refusal_error(turn, RefusalReason.SHRUNK, text)
        if call.masked and (fault := mask_fault(call.mask, new_tokens)):
            raise _refusal_error(turn, RefusalReason.MASK, fault)
        return CheckedPrompt(call, ids, new_tokens, turn)

    def _is_over(self, call: CompletionCall, state: JudgedRollout) -> bool:
        """Return whether the request starts a new rollout under the same id."""
        if call.masked or (call.keyed and state.masked):
            return not call.mask and state.is_over_for(call.messages)
        ended = state.delivery is not None and state.delivery.settled
        fresh = call.keyed is not None and call.keyed.turn_key not in state.turn_keys
        return self._reuses_ids and ended and fresh and not state.has_completion(call.messages)

    def _check_keyed(self, call: CompletionCall, state: JudgedRollout) -> None:
        if call.keyed is None:
            return
        if found := call_fault(call, call.keyed, state):
            raise _refusal_error(state.next_turn, *found)
        owner = self._owners.setdefault(call.keyed.turn_key, call.key)
        if owner != call.key:
            text = f"the Idempotency-Key is that of a turn of rollout {owner!r}: each turn must have its own key"
            raise _refusal_error(state.next_turn, RefusalReason.KEY, text)
        while len(self._owners) > _KEYS_KEPT:
            del self._owners[next(iter(self._owners))]

    def _ids(self, call: CompletionCall, turn: int) -> list[int]:
        """Return the prompt's ids: in token mode those of the request, if they are correct; else the rendered messages."""
        try:
            if call.token_prompt is None:
                return self._renderer.prompt(call.messages, call.tools)
            fault = self._token_mode.fault(call.messages, call.tools, call.token_prompt)
        except UnrenderableError as error:
            raise _refusal_error(turn, RefusalReason.TEMPLATE, str(error)) from error
        if fault:
            raise _refusal_error(turn, RefusalReason.TOKENS, fault)
        return call.token_prompt.ids

    def _state_for(self, prompt: CheckedPrompt) -> JudgedRollout:
        state = self._states.get(prompt.call.key) or JudgedRollout(prompt.call.key)
        return state.fresh_state() if prompt.begins and (state.next_turn > 1 or state.delivery) else state

    def _store(self, rollout_id: str, state: JudgedRollout) -> None:
        self._states.pop(rollout_id, None)
        self._states[rollout_id] = state
        while len(self._states) > ROLLOUTS_KEPT:
            del self._states[next(iter(self._states))]


def _refusal_error(turn: int, reason: RefusalReason, text: str) -> RefusedError:
    return RefusedError(Refusal(turn, reason, text))


def _logprobs(offset: int, count: int) -> list[float]:
    """Return multiples of 1/128 in (-1, 0), exact in float32. `offset` (the length of the prompt) varies the sequence."""
    return [-(1 + (offset * 31 + index * 7) % 97) / 128 for index in range(count)]


def mask_fault(mask: object, new_tokens: int) -> str | None:
    """Return what is wrong with the mask of a later turn, with both lengths; None if it is correct.

    Without new tokens, null and ``[]`` are both correct.
    """
    are_new = f"{new_tokens} tokens are new since the last completion"
    if mask is None:
        return f"response_mask is missing, {are_new}" if new_tokens else None
    if not isinstance(mask, list):
        return f"response_mask is not a list, {are_new}"
    if len(mask) != new_tokens:
        return f"response_mask has length {len(mask)}, {are_new}"
    for index, value in enumerate(mask):
        if type(value) is not int or value != 0:
            return f"response_mask[{index}] is {value!r}, but the model generated none of the {new_tokens} new tokens"
    return None


def first_mask_fault(mask: object) -> str | None:
    """Return what is wrong with the mask of the first turn, which must be null or ``[]``; None if it is correct."""
    if mask is None or mask == []:
        return None
    length = f"has length {len(mask)}" if isinstance(mask, list) else "is not a list"
    return f"response_mask {length}, but on the first turn it is null: 0 tokens are new"
