"""The guarantees of the journal, checked from outside: on what clients, trainers, receivers and tools have seen.

Nothing here uses the server's code. Each function raises AssertionError with the rollout that broke a guarantee.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from osmosis.rollout.v1 import event_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.token_pb2 import Sample

from tests.durability.receivers import ReceivedDelivery
from tests.durability.trials import DELIVERED, REPLAYING, Trial

Tokens: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt ids, response ids, mask and logprobs of a sample."""
Events: TypeAlias = Sequence[event_pb2.RolloutEvent]


@dataclass(frozen=True)
class Reference:
    """The results of an undisturbed run."""

    samples: Sequence[Tokens]
    reward: float
    turns: int


def tokens(sample: Sample) -> Tokens:
    """The fields of a sample that a trainer trains on."""
    return (
        tuple(sample.prompt_ids),
        tuple(sample.response_ids),
        tuple(int(value) for value in sample.response_mask),
        tuple(sample.logprobs.values),
    )


def reference_of(rollout: pb.Rollout) -> Reference:
    """The results of a rollout that completed."""
    assert rollout.outcome.HasField("stop"), rollout.outcome
    return Reference(
        [tokens(sample) for sample in rollout.outcome.samples], rollout.outcome.reward, rollout.outcome.metrics.turns
    )


def check_runs(trial: Trial, found: Sequence[pb.Rollout], received: Set[str]) -> Sequence[pb.Rollout]:
    """Return the rollouts of a start, the oldest first. All have finished. However often the start was sent, there is one.

    The exception is a crash right before the response to POST /rollout: the outcome was acknowledged, so the repeated request
    starts another rollout ("Not covered" in docs/durability.md). `received` has the uids of acknowledged outcomes.
    """
    runs = sorted(found, key=lambda rollout: rollout.create_time.ToNanoseconds())
    for older, newer in pairwise(runs):
        is_excused = trial.kind == "masked" and older.uid in received
        is_excused &= older.finish_time.ToNanoseconds() < newer.create_time.ToNanoseconds()
        assert is_excused, f"{trial.rollout_id} ran {len(runs)} times: {[rollout.uid for rollout in runs]}"
    assert 1 <= len(runs) <= 1 + trial.crashes, f"{trial.rollout_id}: {len(runs)} rollouts"
    for rollout in runs:
        assert trial.uid in ("", rollout.uid), f"{trial.rollout_id} was {trial.uid} and is {rollout.uid}"
        assert rollout.state == pb.ROLLOUT_STATE_FINISHED, trial.rollout_id
        assert rollout.outcome.WhichOneof("end") is not None, f"{trial.rollout_id} has no outcome"
    return runs


def check_result(trial: Trial, rollout: pb.Rollout, reference: Reference, events: Events) -> None:
    """A rollout completed with the samples of an undisturbed run, or was interrupted for a reason and kept its evidence."""
    samples = [tokens(sample) for sample in rollout.outcome.samples]
    where = f"{trial.rollout_id} ({rollout.uid}, agent {trial.agent})"
    if rollout.outcome.HasField("stop"):
        assert len(samples) == len(reference.samples), (
            f"{where}: {len(samples)} samples instead of {len(reference.samples)}"
        )
        for ours, undisturbed in zip(samples, reference.samples, strict=True):
            check_equal(where, ours, undisturbed)
        assert rollout.outcome.reward == reference.reward, f"{where}: reward {rollout.outcome.reward}"
        assert rollout.outcome.metrics.turns == reference.turns, where
        return
    failure = rollout.outcome.failure
    assert failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED, (
        f"{where}: {failure}{rollout.outcome.cancellation}"
    )
    assert failure.message, where
    assert not rollout.outcome.HasField("reward"), where
    kinds = " ".join(str(event.WhichOneof("event")) for event in events)
    assert reason_to_end(trial, events), f"{where} could have been resumed: {failure.message}; its log: {kinds}"
    for ours, whole in zip(samples, reference.samples, strict=False):
        assert ours[0] == whole[0], f"{where}: another prompt"
        for name, part, complete in zip(("ids", "mask", "logprobs"), ours[1:], whole[1:], strict=True):
            assert part == complete[: len(part)], f"{where}: {name} are not the beginning of the undisturbed ones"


def check_equal(where: str, ours: Tokens, undisturbed: Tokens) -> None:
    """A sample is that of an undisturbed run."""
    for name, found, wanted in zip(("prompt", "ids", "mask", "logprobs"), ours, undisturbed, strict=True):
        same = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), "their end")
        counts = f"{len(found)} instead of {len(wanted)} values"
        assert found == wanted, f"{where}: {name} differ from those of an undisturbed run from {same} on, {counts}"


def reason_to_end(trial: Trial, events: Events) -> str:
    """Why an interrupted rollout could not be resumed; empty if it could."""
    if trial.agent == "unrepeatable":
        return "its agent cannot be replayed"
    open_turn, calls = False, dict[str, str]()
    for event in events:
        match event.WhichOneof("event"):
            case "asked":
                open_turn = True
            case "answered":
                open_turn = False
            case "tool_started":
                calls[event.tool_started.call_id] = event.tool_started.name
            case "tool_returned":
                calls.pop(event.tool_returned.call_id, None)
    if open_turn and trial.kind not in REPLAYING:
        return "a completion was in flight, and the trainer would generate it again"
    return "a tool that is not idempotent may have run" if "note" in calls.values() else ""


def check_events(trial: Trial, after: Events) -> None:
    """The log is numbered without gaps, ends with the outcome, and still has the events that were seen before the crash."""
    numbers = [event.sequence for event in after]
    assert numbers == list(range(1, len(after) + 1)), f"{trial.rollout_id}: {numbers}"
    kinds = [event.WhichOneof("event") for event in after]
    assert kinds.count("finished") == 1, f"{trial.rollout_id}: {kinds}"
    assert kinds[-1] == "finished", f"{trial.rollout_id}: {kinds}"
    seen = [event.sequence for event in trial.events]
    assert seen == list(range(1, len(seen) + 1)), f"{trial.rollout_id}: before the crash {seen}"
    for before, now in zip(trial.events, after, strict=False):
        assert before == now, f"{trial.rollout_id}: event {before.sequence} has changed:\n{before}\n{now}"
    assert len(trial.events) <= len(after), f"{trial.rollout_id}: events that a watcher saw are gone"


def check_generations(
    trial: Trial, runs: Sequence[pb.Rollout], keys: Counter[str], generated: Mapping[tuple[int, int], int]
) -> None:
    """Requests of completions are those of these rollouts, and none generated a turn twice."""
    uids = [rollout.uid for rollout in runs]
    foreign = [key for key in keys if key.partition("/")[0] not in uids]
    assert foreign == [], f"{trial.rollout_id} is {uids}, and completions were requested for {foreign}"
    repeated = [key for key, count in keys.items() if count > 1]
    assert len(repeated) <= trial.crashes, f"{trial.rollout_id}: finished turns were requested again: {keys}"
    is_excused = any(warning.code == "resampled" for rollout in runs for warning in rollout.outcome.warnings)
    is_excused |= runs[-1].outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
    again = {turn: n for (case, turn), n in generated.items() if case == trial.case.number and n > len(runs)}
    assert not again or is_excused, f"{trial.rollout_id}: turns were generated again: {again}"


def check_effects(trial: Trial, rollout: pb.Rollout, effects: Sequence[str]) -> None:
    """No tool that is not idempotent began twice. In a rollout that completed every tool ran."""
    runs: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for line in effects:
        phase, uid, case, tool, step, _ = line.split()
        if uid == rollout.uid:
            assert int(case) == trial.case.number, f"{trial.rollout_id}: {line}"
            runs[phase][tool, step] += 1
    twice = {call: n for call, n in runs["begun"].items() if call[0] == "note" and n > 1}
    assert not twice, f"{trial.rollout_id}: a tool that is not idempotent ran again: {twice}"
    if rollout.outcome.HasField("stop"):
        turns = range(1, len(trial.case.steps) + 1)
        wanted = {(name, str(call["step"])) for turn in turns for name, call in trial.case.calls(turn)}
        assert set(runs["done"]) == wanted, f"{trial.rollout_id}: of {wanted} only {set(runs['done'])} ran"


def check_deliveries(trial: Trial, rollout: pb.Rollout, deliveries: Sequence[ReceivedDelivery]) -> None:
    """The receiver has one outcome, always with the same bytes under the same key, and nothing after the acknowledgement."""
    if trial.kind not in DELIVERED:
        assert deliveries == [], trial.rollout_id
        return
    # A strict trainer refuses an outcome that it has acknowledged, also if a crash lost the acknowledgement.
    is_sent_again = trial.kind == "plain" and len(deliveries) > 1
    settled = {pb.DELIVERY_STATE_ACKNOWLEDGED, *([pb.DELIVERY_STATE_REFUSED] if is_sent_again else [])}
    assert rollout.delivery.state in settled, f"{trial.rollout_id}: {rollout.delivery}"
    keys = {delivery.key for delivery in deliveries}
    assert len(keys) == 1, f"{trial.rollout_id}: {len(deliveries)} deliveries under the keys {sorted(keys)}"
    assert deliveries[0].key, trial.rollout_id
    assert len({delivery.raw for delivery in deliveries}) == 1, f"{trial.rollout_id}: the bytes differ"
    assert any(delivery.acknowledged for delivery in deliveries), f"{trial.rollout_id}: {deliveries}"


def check_response(trial: Trial, rollout: pb.Rollout) -> None:
    """The response to POST /rollout is the outcome."""
    if trial.kind == "masked":
        assert trial.response is not None, trial.rollout_id
        completed = rollout.outcome.HasField("stop")
        assert trial.response["status"] == ("COMPLETED" if completed else "ERROR"), trial.rollout_id
        if not completed:
            assert trial.response["extra_fields"]["error_category"] == "interrupted", trial.response
