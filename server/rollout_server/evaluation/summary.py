"""Statistics of an evaluation."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout_server.authoring.rollout_result import Result

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics over all rollouts of an evaluation.

    Args:
        threshold: the reward at which a rollout passes.
        rows: number of rows with a result.
        rollouts: number of results.
        finished: rollouts that completed.
        judged: completed rollouts with a reward.
        passed: completed rollouts whose reward is at least `threshold`.
        pass_rate: passed, divided by judged plus not completed; None if that is 0.
        pass_at: by k, the unbiased estimate of pass@k, averaged over the rows with at least k rollouts.
        mean_reward: mean over `judged`; None without any reward.
        turns: mean per rollout.
        tokens: sums "prompt" and "generated", and "generated_mean" per rollout.
        seconds: "mean" and percentiles "p50", "p90", ... of completed rollouts, by nearest rank.
        tool_calls: sum.
        tool_errors: number of error results by tool.
        failures: number of rollouts by failure category, or by another end that is not completion.
        examples: the first message of each of these.
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
    """Compute the statistics of results."""
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
    """Return the category of a failure, or "cancellation"."""
    return result.end if result.end == "cancellation" else result.reason


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank: the smallest value that at least `percent` % of all values do not exceed.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the probability that k of n rollouts, drawn without replacement, include a pass.

    Formula of Chen et al. 2021, "Evaluating Large Language Models Trained on Code": 1 - C(n - c, k) / C(n, k), where c of n
    rollouts passed. Raises ValueError unless 1 <= k <= n.
    """
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
