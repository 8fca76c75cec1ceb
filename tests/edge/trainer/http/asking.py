"""One turn, requested through the sampler of either HTTP API as the runtime does."""

from __future__ import annotations

from rollout_server.core.limits import Limits
from rollout_server.core.machine import LimitReached, Machine
from rollout_server.core.message import Message
from rollout_server.core.outcome import Failure
from rollout_server.core.record import Answered, Appended
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Credentials, Sampler

QUESTION = Message.write({"role": "user", "content": "5 plus 3?"})
MORE = Message.write({"role": "user", "content": "And 3 more?"})
TURN_KEY = "u1/0/{turn}"
SAMPLING = Sampling(temperature=1.0, max_tokens=64)


class Asking:
    """A rollout that requests completions turn by turn; the user message after each completion is the same.

    `remarks` holds the sampler's notes in the rollout's log before the end of the turn.
    """

    def __init__(
        self,
        trainers: MaskedTrainers | PlainTrainers,
        url: str,
        *,
        credential: str = "",
        deadline: float | None = None,
        sampling: Sampling = SAMPLING,
        replays: bool = False,
    ) -> None:
        plain = isinstance(trainers, PlainTrainers)
        spec = Spec(
            rollout_id="r1",
            messages=(QUESTION,),
            completions=Target(url, Dialect.HTTP_PLAIN if plain else Dialect.HTTP_MASKED, replays),
            sampling=sampling,
            tokenizer=None if plain else TokenizerName("toy"),
        )
        self.sampler: Sampler = trainers.open(spec) if isinstance(trainers, PlainTrainers) else trainers.open(spec, [])
        self.credentials = Credentials(completions=credential)
        self.deadline = deadline
        self.sampling = sampling
        self.asks: list[CompletionRequest] = []
        self.remarks: list[tuple[str, str]] = []
        self._machine = Machine("u1", [QUESTION], Limits())

    async def turn(self, sampling: Sampling | None = None) -> Answered:
        """Request the next completion; `sampling` None means the rollout's parameters. Raises `RolloutFailed`."""
        main, asked = self._machine.main, self._machine.request_completion()
        assert not isinstance(asked, LimitReached)
        before = main.messages, main.last_completion, main.turn_messages, main.line
        ask = CompletionRequest(
            asked, *before, self.deadline, self.credentials, self._remark, sampling or self.sampling
        )
        self.asks.append(ask)
        answered = await self.sampler.sample(ask)
        for record in (asked, answered, Appended((MORE,))):
            self._machine.accept(record)
        return answered

    async def failure(self) -> Failure:
        """Request the next completion, which must fail, and return the failure."""
        try:
            answered = await self.turn()
        except RolloutFailed as failed:
            return failed.failure
        raise AssertionError(f"the turn succeeded: {answered}")

    def _remark(self, code: str, text: str) -> None:
        self.remarks.append((code, text))
