"""Text game: the world knows a number, and answers each guess with "higher" or "lower"."""

import re

from rollout_server import Environment, Limits, Reply, Run, Step


class GuessTheNumber(Environment):
    """Guess a number from 1 to 100. Each completion has its own reward; their sum is the reward of the rollout."""

    name = "guess-the-number"
    limits = Limits(turns=10, seconds=120)
    reward_rule = "own"

    async def reset(self, run: Run) -> None:
        """Begin a game. The request's last message explains it, so the world says nothing more."""
        number = run.metadata.get("ground_truth") or run.random().randint(1, 100)
        run.state.update(number=int(str(number)), low=1, high=100)

    async def step(self, run: Run, reply: Reply) -> Step:
        """Compare the last number in the completion with the number of the game."""
        guesses = re.findall(r"\b\d{1,3}\b", reply.content)
        if not guesses:
            return Step("Write a number from 1 to 100.", reward=-0.2)
        guess, number, low, high = int(guesses[-1]), *map(run.state.get, ("number", "low", "high"))
        if guess == number:
            return Step(f"Yes, it is {number}.", reward=1.0, done=True)
        useful = low <= guess <= high  # the answers so far leave it possible
        if guess < number:
            run.state["low"] = max(low, guess + 1)
        else:
            run.state["high"] = min(high, guess - 1)
        return Step("Higher." if guess < number else "Lower.", reward=0.0 if useful else -0.1)
