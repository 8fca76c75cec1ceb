"""The description of the HTTP interface: served, complete, and its example runs as it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.conftest import Open, World


@pytest.fixture
async def world(open_here: Open) -> World:
    """A server that knows the tokenizer of the example under its name."""
    opened: World = await open_here(tokenizers={"Qwen/Qwen3-8B": "toy"})
    return opened


async def test_the_page_is_served(world: World) -> None:
    page = await world.http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text


async def test_the_example_runs(world: World) -> None:
    described = (await world.http.get("/openapi.json")).json()
    content = described["paths"]["/rollout"]["post"]["requestBody"]["content"]["application/json"]
    example = content["example"]
    answer = await world.http.post("/rollout", json={**example, "server_url": world.trainer.url})
    assert answer.status_code == 200
    said = answer.json()
    assert (said["rollout_id"], said["status"], said["finish_reason"]) == (example["rollout_id"], "COMPLETED", "stop")
    judged = world.trainer.verdict(example["rollout_id"])
    assert judged is not None
    assert judged.accepted
    sent = world.trainer.requests[0].body
    assert {key: sent[key] for key in example["sampling_params"]} == example["sampling_params"]
    assert said.keys() == described["components"]["schemas"]["RolloutAnswer"]["properties"].keys()


async def test_every_reference_leads_somewhere(world: World) -> None:
    described = (await world.http.get("/openapi.json")).json()
    for reference in set(references(described)):
        found = described
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found


def references(value: Any) -> Iterator[str]:
    """All `$ref` within."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)
