"""The scenarios themselves: the server's samples are the rows that the script expects, whatever framework takes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rollout_client import TrainingSample
from rollout_client.trainer import Finished, Prompt, SyncTrainer, parsers

from tests.adapters.scenarios import END, SCENARIOS, TRUNCATED_TOKENS, Script, decode, messages, metadata

PLAYED = [name for name in SCENARIOS if name != "cancelled"]


def play(server: str, script: Script, names: Sequence[str], agent: str, n: int = 1) -> list[Finished]:
    """Play scenarios with the script as the model; return the rollouts in order."""
    with SyncTrainer(server, generate=script.generate, decode=decode, parse=parsers.hermes, end_ids={END}) as trainer:
        prompts = [Prompt(messages(name, seed), metadata=metadata(name, seed)) for seed, name in enumerate(names)]
        groups = trainer.rollouts(
            prompts, n=n, in_order=True, agent=agent, tokenizer="toy", sampling={"logprobs": True}
        )
        return [each for group in groups for each in group.rollouts]


def all_samples(rollout: Finished) -> list[TrainingSample]:
    return sorted([*rollout.samples, *rollout.untrainable], key=lambda sample: int(sample.segment_id))


def same_as_script(script: Script, rollout: Finished) -> None:
    expected = script.expected(rollout.uid)
    found = all_samples(rollout)
    assert [each.segment_id for each in found] == sorted(expected, key=int)
    for sample in found:
        row = expected[sample.segment_id]
        assert (list(sample.prompt_ids), list(sample.response_ids)) == (row.prompt_ids, row.response_ids)
        assert sample.logprobs is not None


@pytest.mark.parametrize("name", PLAYED)
def test_each_scenario_gives_its_rows(server: str, name: str) -> None:
    script, scenario = Script(), SCENARIOS[name]
    (rollout,) = play(server, script, [name], scenario.agent)
    assert (rollout.end, rollout.failure_class) == (scenario.end, scenario.failure_class), rollout.error
    same_as_script(script, rollout)
    found = [(list(each.response_ids), list(each.response_mask)) for each in all_samples(rollout)]
    if name == "truncated":
        ((ids, mask),) = found
        assert (len(ids), mask, END in ids) == (TRUNCATED_TOKENS, [1] * TRUNCATED_TOKENS, False)
    else:
        assert found == scenario.responses()
    assert [each.trainable for each in all_samples(rollout)] == [scenario.end == "stop"] * len(found)


@pytest.mark.parametrize("agent", ["scenarios", "drifting"])
def test_random_rollouts_have_the_rows_of_the_script(server: str, agent: str) -> None:
    script = Script()
    rollouts = play(server, script, ["random"] * 20, agent, n=2)
    assert len(rollouts) == 40
    assert all(each.checked and each.mismatch is None for each in rollouts)
    for each in rollouts:
        same_as_script(script, each)
    assert any(len(all_samples(each)) > 1 for each in rollouts)
    assert any(each.end == "failure" for each in rollouts)
