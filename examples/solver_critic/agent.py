"""Solver and critic: one model in two roles, each with its own reward."""

from rollout_server import Agent, Limits, RewardResult, Run

ATTEMPTS = 3
REVIEW = "Is this answer right? End with RIGHT or WRONG.\n\nQuestion: {question}\n\nAnswer: {answer}"


def final(text: object) -> str:
    """Return what follows the last ####."""
    return str(text).rpartition("####")[2].strip()


class SolverCritic(Agent):
    """A solver answers. A critic, which sees only question and answer, may send it back."""

    name = "solver-critic"
    limits = Limits(turns=2 * ATTEMPTS, seconds=120)
    reward_rule = "own"

    async def play(self, run: Run) -> None:
        """Answer until the critic agrees, at most three times."""
        question = run.messages[-1]["content"]
        for attempt in range(1, ATTEMPTS + 1):
            answer = (await run.sample()).content
            review = REVIEW.format(question=question, answer=answer)
            critic = await run.fork([{"role": "user", "content": review}], role="critic")
            verdict = (await critic.sample()).content
            agrees = verdict.rstrip(".\n ").endswith("RIGHT")
            critic.give_reward(float(agrees == self.is_right(run, answer)))  # the critic's own reward
            if agrees or attempt == ATTEMPTS:
                return
            await run.append({"role": "user", "content": f"A critic says: {verdict}\n\nAnswer again."})

    def is_right(self, run: Run, answer: object) -> bool:
        """Return whether an answer ends with the ground truth."""
        return final(answer) == str(run.metadata.get("ground_truth"))

    async def reward(self, run: Run) -> RewardResult:
        """Reward the solver, whose conversation has the role "agent", for its last answer."""
        solved = float(self.is_right(run, run.messages[-1]["content"]))
        return RewardResult(reward=solved, scores={"attempts": run.turn / 2}, roles={"agent": solved})
