"""The attacks over HTTP/1.1, each on a separate server: refused with a reason, in bounded memory, and the server stays healthy."""

from __future__ import annotations

import json

import httpx
import pytest
from rollout_server.testing.trainer import StrictTrainer

from tests.hostile.attacks import Attack, all_attacks
from tests.hostile.attacks.http import ones
from tests.hostile.target import Target
from tests.hostile.target import target as fresh_target
from tests.support.bodies import body

MIB = 1 << 20
MEMORY = {"60 bodies of 15 MiB at once, with a key": 900 * MIB}
"""Memory bounds for attacks that may use more than the others."""
# Attacks that are concurrent or slow run only in `make hostile`.
LEFT_OUT = {"2,000 wrong keys, 100 at a time"}
HTTP = [each for each in all_attacks() if each.run.__module__.endswith(".http") and each.name not in LEFT_OUT]


@pytest.mark.parametrize("attack", HTTP, ids=[each.name for each in HTTP])
async def test_an_attack_is_answered_within_bounds(attack: Attack) -> None:
    async with fresh_target(**attack.settings) as target:
        await attack.run(target)
        assert await target.healthy()
        assert target.faults() == []
        assert target.memory("VmHWM") < MEMORY.get(attack.name, 450 * MIB)


async def test_a_rollout_runs_before_and_after_an_attack(target: Target, trainer: StrictTrainer) -> None:
    for number in range(2):
        asked = json.dumps(body(f"r{number}", trainer.url)).encode()
        answer = (await target.post("/rollout", asked)).json()
        assert answer["status"] == "COMPLETED", answer["error_message"]
        assert (await target.post("/v1/rollout/init", ones(MIB), key=False)).status_code == 401


async def test_a_refusal_without_a_key_costs_no_memory(target: Target) -> None:
    """Fifty bodies of 4 MiB would take 200 MiB if they were buffered together, and gigabytes if they were parsed."""
    assert (await target.post("/v1/rollouts", b"{}", key=False)).status_code == 401
    before = target.memory("VmHWM")
    for _ in range(50):
        reply: httpx.Response = await target.post("/v1/rollout/init", ones(4 * MIB), key=False)
        assert reply.status_code == 401
    assert target.memory("VmHWM") - before < 32 * MIB
