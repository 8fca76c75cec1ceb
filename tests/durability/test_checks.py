"""The checks find planted faults, each in the results of a run without a crash."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from osmosis.rollout.v1 import event_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.durability import checks
from tests.durability.receivers import ReceivedDelivery
from tests.durability.stage import Stage
from tests.durability.trials import Trial, trial


@dataclass
class Results:
    """What a test sees of one rollout."""

    trial: Trial
    found: list[pb.Rollout]
    reference: checks.Reference
    events: list[event_pb2.RolloutEvent]
    keys: Counter[str]
    generated: dict[tuple[int, int], int]
    effects: list[str]
    deliveries: list[ReceivedDelivery] = field(default_factory=list)

    def check(self) -> None:
        """Run all checks."""
        runs = checks.check_runs(self.trial, self.found, frozenset())
        rollout = runs[-1]
        checks.check_events(self.trial, self.events)
        checks.check_result(self.trial, rollout, self.reference, self.events)
        checks.check_generations(self.trial, runs, self.keys, self.generated)
        checks.check_effects(self.trial, rollout, self.effects)
        checks.check_deliveries(self.trial, rollout, self.deliveries)
        checks.check_response(self.trial, rollout)

    def interrupt(self, *, before: str) -> None:
        """End as interrupted right before the first event of this kind."""
        self.trial.events = []
        outcome = self.found[0].outcome
        outcome.failure.category = outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
        outcome.failure.message = "The server stopped."
        outcome.ClearField("reward")
        del outcome.samples[:]
        index = next(i for i, event in enumerate(self.events) if event.WhichOneof("event") == before)
        self.events = [*self.events[:index], self.events[-1]]
        self.events[-1].sequence = index + 1


async def results(here: Stage) -> Results:
    """Run a rollout without a crash."""
    chosen = trial("grpc", 0, "checked")
    await here.prepare([chosen])
    here.trainers.generations.counts.clear()
    await here.clients.start(chosen)
    found = await here.clients.settled([chosen.rollout_id])
    chosen.events = await here.clients.events(found[0].uid)
    return Results(
        chosen,
        found,
        here.references[chosen.reference],
        list(chosen.events),
        here.trainers.keys_by_rollout()[chosen.rollout_id],
        dict(here.trainers.generations.counts),
        here.effects(),
        here.deliveries()[chosen.rollout_id],
    )


def runs_twice(of: Results) -> None:
    of.found.append(of.found[0])


def has_another_uid(of: Results) -> None:
    of.found[0].uid += "x"


def has_no_outcome(of: Results) -> None:
    of.found[0].ClearField("outcome")


def changes_a_token(of: Results) -> None:
    of.found[0].outcome.samples[0].response_ids[3] ^= 1


def changes_a_mask(of: Results) -> None:
    of.found[0].outcome.samples[0].response_mask = b"\x00" * len(of.found[0].outcome.samples[0].response_mask)


def loses_a_logprob(of: Results) -> None:
    of.found[0].outcome.samples[0].logprobs.values[0] = 0.0


def loses_the_reward(of: Results) -> None:
    of.found[0].outcome.ClearField("reward")


def is_interrupted_without_need(of: Results) -> None:
    of.interrupt(before="answered")


def fails(of: Results) -> None:
    of.interrupt(before="tool_returned")
    of.found[0].outcome.failure.category = outcome_pb2.FAILURE_CATEGORY_NETWORK


def skips_an_event(of: Results) -> None:
    del of.events[4]


def changes_an_event(of: Results) -> None:
    of.events[4] = copy.deepcopy(of.events[4])
    of.events[4].time.nanos ^= 1024


def forgets_events(of: Results) -> None:
    of.events = [*of.events[:3], copy.deepcopy(of.events[-1])]
    of.events[-1].sequence = 4


def generates_again(of: Results) -> None:
    of.generated[0, 2] += 1


def requests_finished_turns(of: Results) -> None:
    of.keys = Counter(dict.fromkeys(of.keys, 2))


def requests_under_another_uid(of: Results) -> None:
    of.keys["other/0/1"] += 1


def runs_a_tool_again(of: Results) -> None:
    of.effects += [line for line in of.effects if " note " in line]


def skips_a_tool(of: Results) -> None:
    of.effects = [line for line in of.effects if " note " not in line]


def delivers_nothing(of: Results) -> None:
    of.deliveries = []


def delivers_other_bytes(of: Results) -> None:
    of.deliveries.append(replace(of.deliveries[0], raw=of.deliveries[0].raw + b" "))


def delivers_under_another_key(of: Results) -> None:
    of.deliveries.append(replace(of.deliveries[0], key="other"))


def is_not_acknowledged(of: Results) -> None:
    of.found[0].delivery.state = pb.DELIVERY_STATE_EXPIRED


FAULTS: Mapping[Callable[[Results], None], str] = {
    runs_twice: "ran 2 times",
    has_another_uid: " was .* and is ",
    has_no_outcome: "has no outcome",
    changes_a_token: "ids differ from",
    changes_a_mask: "mask differ from",
    loses_a_logprob: "logprobs differ from",
    loses_the_reward: "reward 0",
    is_interrupted_without_need: "could have been resumed",
    fails: "NETWORK",
    skips_an_event: r"\[1, 2, 3, 4, 6",
    changes_an_event: "event 5 has changed",
    forgets_events: "event 4 has changed",
    generates_again: "were generated again",
    requests_finished_turns: "requested again",
    requests_under_another_uid: "were requested for",
    runs_a_tool_again: "ran again",
    skips_a_tool: "only .*look",
    delivers_nothing: "0 deliveries",
    delivers_other_bytes: "bytes differ",
    delivers_under_another_key: "under the keys",
    is_not_acknowledged: "EXPIRED",
}
"""The planted faults, and what the checks say about each."""


async def test_the_checks_find_each_planted_fault(here: Stage) -> None:
    sound = await results(here)
    sound.check()
    for fault, text in FAULTS.items():
        spoiled = copy.deepcopy(sound)
        fault(spoiled)
        with pytest.raises(AssertionError, match=text):
            spoiled.check()


async def test_an_interrupted_rollout_is_allowed_where_it_cannot_be_resumed(here: Stage) -> None:
    stopped = await results(here)
    stopped.interrupt(before="tool_returned")  # the tool `note` runs
    stopped.check()


async def test_an_outcome_after_the_acknowledgement_is_found(here: Stage) -> None:
    trials = here.trials()
    await here.prepare(trials)
    here.trainers.generations.counts.clear()
    await here.recover_and_check(trials)
    here.check_nothing_after_acknowledgement()
    here.receiver.deliveries.append(here.receiver.deliveries[-1])
    with pytest.raises(AssertionError):
        here.check_nothing_after_acknowledgement()
