"""One line about an evaluation that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollout_server.evaluation.row_result import RowResult


class RunningFigures:
    """Counts results as their rollouts end.

    Args:
        total: number of rollouts of the evaluation.
        earlier: results of an earlier run. They count as done; speed and time left are those of this run.
        clock: returns seconds.
    """

    def __init__(self, total: int, earlier: Iterable[RowResult], clock: Callable[[], float]) -> None:
        self.total = total
        self.done = self._failed = self._tokens = self._judged = 0
        self._rewards = 0.0
        self._clock = clock
        for result in earlier:
            self.add(result)
        self._began = clock()
        self._before, self._tokens = self.done, 0

    def add(self, result: RowResult) -> None:
        """Count one more result: its end, its reward if it has one, and its generated tokens."""
        self.done += 1
        self._failed += not result.finished
        self._tokens += result.tokens.generated
        if result.finished and result.reward is not None:
            self._judged += 1
            self._rewards += result.reward

    def line(self) -> str:
        """Return the line: done and total, mean reward, failures, tokens per second, time left."""
        seconds, done = self._clock() - self._began, self.done - self._before
        parts = [f"{self.done}/{self.total}"]
        if self._judged:
            parts.append(f"mean reward {self._rewards / self._judged:.3f}")
        parts.append(f"{self._failed} failed")
        if seconds > 0:
            parts.append(f"{self._tokens / seconds:.0f} tokens/s")
        if done > 0 and self.done < self.total:
            parts.append(f"{_clock_time((self.total - self.done) * seconds / done)} left")
        return " · ".join(parts)


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
