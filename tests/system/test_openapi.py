"""The OpenAPI description is served and complete, and its example runs unchanged."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.system.conftest import Open, Service


@pytest.fixture
async def world(open_here: Open) -> Service:
    """A server with the example's tokenizer under its name."""
    opened: Service = await open_here(tokenizers={"Qwen/Qwen3-8B": "toy"})
    return opened


LINK = re.compile(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url:\s*'([^']+)'""")
EXTERNAL = re.compile(r"https?://|//[a-z]", re.IGNORECASE)


async def test_the_page_loads_nothing_from_elsewhere(world: Service) -> None:
    page = await world.http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert not EXTERNAL.search(page.text)
    links = [one or other for one, other in LINK.findall(page.text)]
    kinds = {}
    for link in links:
        # Links must work as a browser resolves them, also if a proxy serves the gateway under a path prefix.
        assert urljoin("http://proxy/prefix/docs", link).startswith("http://proxy/prefix/")
        answer = await world.http.get(urljoin(str(page.url), link))
        assert answer.status_code == 200
        assert len(answer.content) > 1_000
        kinds[link.rpartition("/")[2]] = answer.headers["content-type"].partition(";")[0]
    assert kinds == {
        "swagger-ui-bundle.js": "text/javascript",
        "swagger-ui.css": "text/css",
        "favicon.png": "image/png",
        "openapi.json": "application/json",
    }
    assert (await world.http.get("/redoc")).status_code == 404


async def test_the_page_may_run_no_other_script_and_reach_no_other_origin(world: Service) -> None:
    page = await world.http.get("/docs")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    (inline,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    assert policy.pop("script-src") == f"'self' 'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert {word for value in policy.values() for word in value.split()} == {"'none'", "'self'", "data:"}
    assert "style=" not in page.text
    assert "<style" not in page.text


async def test_the_example_runs(world: Service) -> None:
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
    assert said.keys() == described["components"]["schemas"]["RolloutResponse"]["properties"].keys()


async def test_every_reference_leads_somewhere(world: Service) -> None:
    described = (await world.http.get("/openapi.json")).json()
    for reference in set(references(described)):
        found = described
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found


async def test_the_osmosis_apis_describe_the_errors_that_any_call_can_have(world: Service) -> None:
    paths = (await world.http.get("/openapi.json")).json()["paths"]
    calls = {"401", "403", "404", "414", "431", "500", "503", "504"}
    bodies = {"400", "408", "409", "413", "422", "429"}
    assert paths["/tools"]["get"]["responses"].keys() == {"200", "422"} | calls
    assert paths["/rollout"]["post"]["responses"].keys() == {"200"} | calls | bodies
    assert paths["/v1/rollout/init"]["post"]["responses"].keys() == {"202"} | calls | bodies


def references(value: Any) -> Iterator[str]:
    """All `$ref` values inside."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)
