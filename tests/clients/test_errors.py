"""What the official SDKs raise for a call that is refused, and that none of them asks again."""

from __future__ import annotations

import pytest

from tests.clients.recording import recording
from tests.clients.service import ENVIRONMENT, TurnModel, World, access_environment, program, run_program, serving_world

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="no .venv-clients: `make .venv-clients/.ready` makes it"
)
CALLS = ("chat", "chat stream", "responses", "messages", "messages stream")


async def raised(world: World, path: str, key: str) -> dict[str, str]:
    """The error of each call by its name. Each call is one request: the SDKs repeat nothing."""
    async with recording(world.endpoint) as recorder:
        printed = await run_program(program("sdk_errors"), access_environment(recorder.url + path, key), None)
    assert len(recorder.calls) == len(CALLS)
    return dict(line.split(": ", 1) for line in printed.splitlines())


async def test_a_key_that_is_not_the_rollouts_is_forbidden() -> None:
    async with serving_world(TurnModel(["Hi."])) as world:
        _, path, _ = await world.start()
        _, _, other = await world.start()
        found = await raised(world, path, other["authorization"].split()[1])
    assert set(found) == set(CALLS)
    assert {each.rsplit(" ", 1)[0] for each in found.values()} == {"PermissionDeniedError 403"}


async def test_a_rollout_that_is_over_is_gone() -> None:
    async with serving_world(TurnModel(["Hi."])) as world:
        uid, path, bearer = await world.start()
        await world.finish(uid, path, bearer)
        found = await raised(world, path, bearer["authorization"].split()[1])
    over = {name: each for name, each in found.items() if name != "responses"}
    assert {each.split()[1] for each in over.values()} == {"410"}
    assert found["responses"].split()[1] == "400"  # Codex repeats a 410
    assert found["chat"] == "APIStatusError 410 rollout_over"


async def test_a_prompt_that_is_too_long_is_the_agents_to_shorten() -> None:
    async with serving_world(TurnModel(["Hi."], context=10)) as world:
        uid, path, bearer = await world.start()
        found = await raised(world, path, bearer["authorization"].split()[1])
        outcome = await world.finish(uid, path, bearer)
    assert {each.rsplit(" ", 1)[0] for each in found.values()} == {"BadRequestError 400"}
    assert found["chat"] == found["responses"] == "BadRequestError 400 context_length_exceeded"
    assert found["messages"] == "BadRequestError 400 invalid_request_error"
    assert outcome.capture.refused == len(CALLS)
