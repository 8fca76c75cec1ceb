"""What an evaluation comes to."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout_server.authoring.rollout_result import Result

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over all rollouts of an evaluation.

    Args:
        rows: rows that have a result.
        rollouts: results.
        finished: those that came to their own end.
        judged: of these, those with a reward.
        passed: of these, those whose reward reaches `threshold`.
        pass_rate: passed among those that were judged or went wrong; None where there are none of either.
        pass_at: by k, the chance that one of k rollouts of a row passes, without bias, averaged over the rows that have k.
        mean_reward: of those judged; None: no agent gave a reward.
        tokens: "prompt", "generated" and the mean of "generated" for each rollout.
        seconds: "mean" and percentiles "p50", "p90", ... of whole rollouts, by nearest rank.
        failures: how often each category of failure, or other end, came.
        examples: for each of these the first message.
        tool_errors: how often each tool answered with an error.
    """

    threshold: float
    rows: int = 0
    rollouts: int = 0
    finished: int = 0
    judged: int = 0
    passed: int = 0
    pass_rate: float | None = None
    pass_at: dict[str, float] = field(default_factory=dict)
    mean_reward: float | None = None
    turns: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


def summary_of(results: Sequence[Result], threshold: float) -> Summary:
    """The figures of results."""
    finished = [result for result in results if result.finished]
    judged = [result for result in finished if result.reward is not None]
    passed = sum(result.passes(threshold) for result in judged)
    wrong = [result for result in results if not result.finished]
    counted = [*judged, *wrong]
    rewards = [result.reward for result in judged if result.reward is not None]
    generated = sum(result.tokens.generated for result in results)
    return Summary(
        threshold=threshold,
        rows=len({result.row for result in results}),
        rollouts=len(results),
        finished=len(finished),
        judged=len(judged),
        passed=passed,
        pass_rate=passed / len(counted) if counted else None,
        pass_at=_pass_at(counted, threshold),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        turns=_mean([result.turns for result in results]),
        tokens={
            "prompt": sum(result.tokens.prompt for result in results),
            "generated": generated,
            "generated_mean": generated / len(results) if results else 0.0,
        },
        seconds=_spread([result.ms.total / 1000 for result in finished]),
        tool_calls=sum(result.tool_calls for result in results),
        tool_errors=_sum_counts(result.tool_errors for result in results),
        failures=dict(Counter(map(kind_of, wrong)).most_common()),
        examples={kind_of(result): result.message or result.reason for result in reversed(wrong)},
    )


def kind_of(result: Result) -> str:
    """The category of a failure; for other ends that are not the rollout's own, their name."""
    return result.end if result.end == "cancellation" else result.reason


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: the smallest value that so many percent do not exceed. Raises ValueError where there is none."""
    if not values:
        raise ValueError("of no values there is no percentile")
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """The chance that k of a row's rollouts, drawn without putting back, hold one that passed (Chen et al. 2021)."""
    if not 0 < k <= rollouts:
        raise ValueError(f"k must be from 1 to {rollouts}")
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)


def _pass_at(results: Sequence[Result], threshold: float) -> dict[str, float]:
    rows: dict[int, list[bool]] = defaultdict(list)
    for result in results:
        rows[result.row].append(result.passes(threshold))
    most = max(map(len, rows.values()), default=0)
    if most < 2:
        return {}
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return {
        str(k): _mean([pass_at_k(len(found), sum(found), k) for found in rows.values() if len(found) >= k])
        for k in [*powers, most]
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"mean": _mean(values), **{f"p{each}": percentile(values, each) for each in _PERCENTILES}}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total.most_common())
