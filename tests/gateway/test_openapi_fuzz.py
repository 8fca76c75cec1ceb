"""Fuzz real servers from their OpenAPI description, with and without keys.

There is no undocumented response, no crash, and no secret in a response, the log, the metrics or the stored rollouts.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import IO, Any

import grpc
import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from rollout_gateway.app import create_app
from rollout_server.edge.api_keys import entry_of, new_key
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.processes import ANY_PORTS, COMMAND, environment

SECRET = "hush-this-is-a-secret"
CALLER, ADMIN = new_key(), new_key()
MARKS = (SECRET, CALLER, ADMIN)
NOWHERE = "http://127.0.0.1:9"
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
BOUNDED = settings(
    max_examples=4, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
NOT_OURS = {"cookie": f"session={SECRET}", "x-api-key": SECRET, "proxy-authorization": f"Basic {SECRET}"}
"""Headers that carry secrets for other services."""
WRONG = (None, f"Bearer {SECRET}", SECRET, f"Bearer {SECRET}\xe9")
SENDERS: Mapping[str, tuple[str | None, ...]] = {
    "open": (None, f"Bearer {SECRET}"),
    "keyed": tuple(each for wrong in WRONG for each in (f"Bearer {CALLER}", f"Bearer {ADMIN}") * 2 + (wrong,)),
}
"""Values of the `Authorization` header. Few are wrong keys, because a server answers those a second later."""


@dataclass
class Serving:
    """`rollout serve` in a separate process, with the most verbose log."""

    mode: str
    log: list[str] = field(default_factory=list)
    port: int = 0
    uid: str = ""
    serves: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.client = httpx.Client(timeout=30, trust_env=False)
        self.session = requests.Session()
        self.session.trust_env = False
        self.senders = cycle(SENDERS[self.mode])
        self.urls = cycle((NOWHERE, f"http://user:{SECRET}@127.0.0.1:9", f"http://{SECRET}@127.0.0.1:9"))

    def read(self, stderr: IO[str]) -> None:
        """Store the log and read the port from it."""
        for line in stderr:
            self.log.append(line)
            if found := re.search(r"HTTP on port (\d+)", line):
                self.port = int(found[1])
                self.serves.set()
        self.serves.set()

    @property
    def url(self) -> str:
        """Base URL of the HTTP port."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        """Read a path with a valid key."""
        return self.client.get(f"{self.url}{path}", headers={"authorization": f"Bearer {ADMIN}"})

    def start(self) -> None:
        """Start a rollout that fails soon, and record its uid."""
        target = {"url": NOWHERE, "bearer": SECRET}
        asked = {"messages": [{"role": "user"}], "completions": target, "tokenizer": {"name": "toy"}}
        headers = {"authorization": f"Bearer {CALLER}"}
        reply = self.client.post(f"{self.url}/v1/rollouts", json=asked, headers=headers)
        self.uid = str(reply.json()["rollout"]["uid"])

    def tamed(self, value: Any) -> Any:
        """The body with secrets inserted, and without addresses of other machines."""
        if isinstance(value, dict):
            return {
                key: SECRET if key in SECRET_FIELDS and isinstance(each, str) else self.tamed(each)
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [self.tamed(each) for each in value]
        return next(self.urls) if isinstance(value, str) and "://" in value else value


@pytest.fixture(scope="module", params=SENDERS)
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose rollouts end soon, without or with keys."""
    env = environment(
        ROLLOUT_TOKENIZERS_OFFLINE="true",
        ROLLOUT_MAX_SECONDS="0.1",
        ROLLOUT_DRAIN_SECONDS="0",
        ROLLOUT_LOG_LEVEL="debug",
        ROLLOUT_RETRIES="0",
    )
    if request.param == "keyed":
        env["ROLLOUT_API_KEYS"] = f"caller {entry_of('x', CALLER)[2:]},admin {entry_of('x', ADMIN)[2:]} admin"
    folder: Path = tmp_path_factory.mktemp("fuzzed")
    with subprocess.Popen(
        [*COMMAND, "serve", *ANY_PORTS], cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        found = Serving(request.param)
        assert process.stderr is not None
        reading = threading.Thread(target=found.read, args=(process.stderr,))
        reading.start()
        try:
            found.serves.wait()
            assert found.port, found.log
            found.start()
            yield found
        finally:
            found.client.close()
            found.session.close()
            process.kill()
            reading.join()


async def description() -> dict[str, Any]:
    """The gateway's description, which does not depend on the server."""
    async with grpc.aio.insecure_channel("unix:nowhere") as channel:
        return create_app(channel).openapi()


# Tests are generated from its operations, so it is needed before a server exists.
DESCRIBED = asyncio.run(description())
SCHEMA = schemathesis.openapi.from_dict(DESCRIBED)
SECRET_FIELDS = frozenset(
    name
    for model in DESCRIBED["components"]["schemas"].values()
    for name, described in model.get("properties", {}).items()
    if described.get("writeOnly")
)


def test_the_description_says_which_fields_are_secret() -> None:
    assert {"bearer", "api_key", "callback_api_key"} <= SECRET_FIELDS


def test_the_server_gives_this_description(serving: Serving) -> None:
    assert serving.get("/openapi.json").json() == DESCRIBED


@SCHEMA.parametrize()
@BOUNDED
def test_what_is_sent_is_answered_as_described(case: Any, serving: Serving) -> None:
    case.body = serving.tamed(case.body)
    if len(str(case.path_parameters.get("uid", "odd"))) % 2 == 0:
        case.path_parameters["uid"] = serving.uid
    sender = next(serving.senders)
    headers = NOT_OURS | ({} if sender is None else {"authorization": sender.encode("latin-1")})
    response = case.call(base_url=serving.url, headers=headers, timeout=20, session=serving.session)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code < 500, response.text
    told = response.text + str(response.headers)
    assert not [mark for mark in MARKS if mark in told]


def test_a_secret_out_of_place_is_no_fault_of_the_server(serving: Serving) -> None:
    for path, methods in DESCRIBED["paths"].items():
        where = path.replace("{uid}", SECRET)
        for method in methods:
            for query in (f"api_key={SECRET}", f"view={SECRET}", f"page_size={SECRET}", f"{SECRET}=1"):
                asked = httpx.Request(method, f"{serving.url}{where}?{query}", json={"bearer": {SECRET: SECRET}})
                assert serving.client.send(asked).status_code < 500


def test_what_is_kept_and_counted_has_no_secret(serving: Serving) -> None:
    """Checks its own rollouts, and those of earlier tests in the same process."""
    for _ in range(6):
        serving.start()
    uids = [rollout["uid"] for rollout in serving.get("/v1/rollouts?page_size=1000").json()["rollouts"]]
    assert len(uids) > 5
    told = [serving.get("/metrics").text, serving.get("/v1/rollouts?page_size=1000&view=full").text]
    told += [serving.get(f"/v1/rollouts/{uid}/events?detail=full").text for uid in uids[:20]]
    assert "rollout_" in told[0]
    assert not [mark for mark in MARKS if any(mark in each for each in told)]


def test_nothing_went_wrong_inside(serving: Serving) -> None:
    """Runs last for each server and checks the log of all earlier tests."""
    text = "".join(serving.log)
    assert "rollout finished" in text
    assert "Traceback" not in text
    assert " ERROR " not in text
    assert not [mark for mark in MARKS if mark in text]
