"""A fuzzer over the OpenAPI description of a real server: no crash, nothing undocumented, no secret in an answer."""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import grpc
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from rollout_gateway.app import create_app
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.system.processes import ANY_PORTS, COMMAND, environment

SECRET = "hush-this-is-a-secret"
SECRET_FIELDS = frozenset({"bearer", "api_key", "callback_api_key"})
NOWHERE = "http://127.0.0.1:9"
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
BOUNDED = settings(
    max_examples=15, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@dataclass
class Serving:
    """`rollout serve` in a process of its own."""

    log: list[str] = field(default_factory=list)
    port: int = 0
    uid: str = ""
    serves: threading.Event = field(default_factory=threading.Event)

    def read(self, stderr: IO[str]) -> None:
        """Keeps the log; notes the port."""
        for line in stderr:
            self.log.append(line)
            if found := re.search(r"HTTP on port (\d+)", line):
                self.port = int(found[1])
                self.serves.set()
        self.serves.set()

    @property
    def url(self) -> str:
        """Where it serves HTTP."""
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose rollouts end soon."""
    env = environment(ROLLOUT_TOKENIZERS_OFFLINE="true", ROLLOUT_MAX_SECONDS="0.2", ROLLOUT_DRAIN_SECONDS="0")
    folder: Path = tmp_path_factory.mktemp("fuzzed")
    with subprocess.Popen(
        [*COMMAND, "serve", *ANY_PORTS], cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        found = Serving()
        assert process.stderr is not None
        reading = threading.Thread(target=found.read, args=(process.stderr,))
        reading.start()
        try:
            found.serves.wait()
            assert found.port, found.log
            found.uid = a_rollout(found.url)
            yield found
        finally:
            process.kill()
            reading.join()


def a_rollout(url: str) -> str:
    """Starts a rollout that fails soon; returns its uid."""
    asked = {"messages": [{"role": "user"}], "completions": {"url": NOWHERE}, "tokenizer": {"name": "toy"}}
    reply = httpx.post(f"{url}/v1/rollouts", json=asked, trust_env=False)
    return str(reply.json()["rollout"]["uid"])


async def description() -> dict[str, Any]:
    """The description that a gateway gives, whatever server it has."""
    async with grpc.aio.insecure_channel("unix:nowhere") as channel:
        return create_app(channel).openapi()


# Tests are made of its operations, so it is needed before there is a server.
DESCRIBED = asyncio.run(description())
SCHEMA = schemathesis.openapi.from_dict(DESCRIBED)


def test_the_server_gives_this_description(serving: Serving) -> None:
    assert httpx.get(f"{serving.url}/openapi.json", trust_env=False).json() == DESCRIBED


def tamed(value: Any) -> Any:
    """The same body with secrets where it has room for some, and without addresses of others."""
    if isinstance(value, dict):
        return {
            key: SECRET if key in SECRET_FIELDS and isinstance(each, str) else tamed(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [tamed(each) for each in value]
    return NOWHERE if isinstance(value, str) and "://" in value else value


@SCHEMA.parametrize()
@BOUNDED
def test_what_is_sent_is_answered_as_described(case: Any, serving: Serving) -> None:
    case.body = tamed(case.body)
    if len(str(case.path_parameters.get("uid", "odd"))) % 2 == 0:
        case.path_parameters["uid"] = serving.uid
    response = case.call(base_url=serving.url, timeout=20)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code < 500 or response.status_code == 503
    assert SECRET not in response.text
    assert SECRET not in str(response.headers)


def test_nothing_went_wrong_inside(serving: Serving) -> None:
    """Runs last: the log of all of the above."""
    text = "".join(serving.log)
    assert "Traceback" not in text
    assert SECRET not in text
