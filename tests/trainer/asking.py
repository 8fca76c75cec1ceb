"""One turn, asked through the sampler as the runtime asks it."""

from __future__ import annotations

from rollout_server.core.message import Message
from rollout_server.core.outcome import Failure
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.trainer.masked import MaskedSampler, Trainers
from rollout_server.runtime.port import Ask, Failed

QUESTION = Message.write({"role": "user", "content": "5 plus 3?"})
MORE = Message.write({"role": "user", "content": "And 3 more?"})
TURN_KEY = "u1/0/{turn}"


class Asking:
    """A rollout that asks a trainer turn by turn; the user says the same after each answer."""

    def __init__(self, trainers: Trainers, url: str, *, credential: str = "", deadline: float | None = None) -> None:
        spec = Spec(
            rollout_id="r1",
            messages=(QUESTION,),
            completions=Target(url, Dialect.HTTP_MASKED),
            sampling=Sampling(temperature=1.0, max_tokens=64),
            tokenizer=TokenizerName("toy"),
        )
        self.sampler: MaskedSampler = trainers.open("u1", spec, [])
        self.credential = credential
        self.deadline = deadline
        self.asks: list[Ask] = []
        self._messages = [QUESTION]
        self._last: Answered | None = None
        self._last_messages = 0
        self._turn = 0

    async def turn(self) -> Answered:
        """The next answer. Raises `Failed`."""
        asked = Asked(self._turn + 1, "0", TURN_KEY.format(turn=self._turn + 1), len(self._messages))
        ask = Ask(asked, self._messages, self._last, self._last_messages, self.deadline, self.credential)
        self.asks.append(ask)
        answered = await self.sampler.sample(ask)
        self._turn, self._last, self._last_messages = asked.turn, answered, len(self._messages)
        self._messages += [answered.message, MORE]
        return answered

    async def failure(self) -> Failure:
        """How the next turn fails."""
        try:
            answered = await self.turn()
        except Failed as failed:
            return failed.failure
        raise AssertionError(f"the turn was answered: {answered}")
