"""Rollouts with marked secrets fail in every way; no mark may appear in anything that the server emits."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from osmosis.rollout.v1 import event_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_server.core.spec import Dialect, Spec, Target
from rollout_server.edge.api_keys import Keyring, entry_of, key_of
from rollout_server.edge.trainer.http_client import HttpRequest
from rollout_server.runtime.outcome_delivery import PackedOutcome
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest
from rollout_server.settings import Settings

from tests.keys.test_callers import bearing, raw_call
from tests.support.http_trainer import Act, HttpTrainer, answer, closed, raw_trainer, reset
from tests.support.outcome_receiver import Answer, GrpcReceiver, grpc_receiver
from tests.support.processes import Serving, serve
from tests.support.server_client import Refusal
from tests.support.start_requests import start, target

MARK = "mArKeR"
API_KEY, ADMIN_KEY, FILED_KEY = f"{MARK}-api", f"{MARK}-admin", f"{MARK}-filed"
TRAINERS, RECEIVERS, TOOLS = f'{MARK}-"trainer"\\key', f"{MARK}-receiver/key", f"{MARK}-tools"
JUDGES = f'{MARK}-"judge"\\key'
PENDING = (pb.DELIVERY_STATE_UNSPECIFIED, pb.DELIVERY_STATE_PENDING)
HASHES = tuple(hashlib.sha256(key.encode()).hexdigest() for key in (API_KEY, ADMIN_KEY, FILED_KEY))
TRACES = (MARK.lower(), base64.b64encode(MARK.encode()).decode().rstrip("=").lower()[:8], *HASHES)


@dataclass
class Said:
    """Everything that the server emitted, by destination."""

    texts: dict[str, str] = field(default_factory=dict)
    rollouts: dict[str, pb.Rollout] = field(default_factory=dict)

    def add(self, where: str, what: object) -> None:
        """Store a text under a unique name."""
        self.texts[f"{where} #{len(self.texts)}"] = str(what)


def echo(status: int, form: Callable[[str], bytes], **headers: str) -> Callable[[list[HttpTrainer]], Act]:
    """A response that repeats the request's Authorization header in some form."""

    def make(trainer: list[HttpTrainer]) -> Act:
        async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            key = trainer[0].requests[-1].headers.get("authorization", "")
            await answer(form(key), status, **{name: value.format(key) for name, value in headers.items()})(
                reader, writer
            )

        return act

    return make


def as_detail(key: str) -> bytes:
    return json.dumps({"detail": f"wrong key: {key}", "headers": {"authorization": key}}).encode()


def as_message(**fields: str) -> Callable[[str], bytes]:
    """A completion that contains the key in place of another value."""

    def form(key: str) -> bytes:
        message = {"role": "assistant", "content": "8"} | {name: value.format(key) for name, value in fields.items()}
        return json.dumps({"choices": [{"message": message}], "token_ids": [1]}).encode()

    return form


ECHOES = {
    "401": echo(401, as_detail),
    "403 plain": echo(403, lambda key: f"{key} {key.removeprefix('Bearer ')}".encode()),
    "404 far behind": echo(404, lambda key: b"x" * 490 + key.encode()),
    "429": echo(429, as_detail),
    "500": echo(500, as_detail),
    "302": echo(302, as_detail, location="http://127.0.0.1:9/{}"),
    "no JSON": echo(200, lambda key: f"<html>{key}".encode()),
    "role": echo(200, as_message(role="{}")),
    "content type": echo(200, lambda key: b"{}", content_type="{}"),
    "choices": echo(200, lambda key: json.dumps({"choices": key}).encode()),
    "key of an object": echo(200, lambda key: json.dumps({"choices": [{"message": {key: [key]}}]}).encode()),
    "ids": echo(200, lambda key: json.dumps({"choices": [{"message": {}}], "token_ids": [key]}).encode()),
}
BREAKS: Mapping[str, Act] = {
    "reason": closed(f"HTTP/1.1 200 {TRAINERS}\r\n{TRAINERS}\r\n\r\n".encode()),
    "reset": reset(),
}


def request_for(name: str, url: str, outcome: str, *, plain: bool) -> pb.StartRolloutRequest:
    """A rollout with a mark in every place for a credential."""
    dialect = spec_pb2.DIALECT_HTTP_PLAIN if plain else spec_pb2.DIALECT_HTTP_MASKED
    request = start(
        rollout_id=name, completions=target(url, dialect=dialect), outcome=target(outcome), agent="calculator"
    )
    credentials = request.credentials
    credentials.completions_bearer, credentials.outcome_bearer, credentials.tools_bearer = TRAINERS, RECEIVERS, TOOLS
    request.spec.models["judge"].CopyFrom(target(url, dialect=spec_pb2.DIALECT_OPENAI, model="m"))
    credentials.model_bearers["judge"] = JUDGES
    return request


@dataclass
class Play:
    """Run rollouts on a server and store its output about them."""

    server: Serving
    said: Said
    stub: Any

    async def run(self, request: pb.StartRolloutRequest) -> None:
        """Run one rollout to the end of its delivery."""
        name, call = request.spec.rollout_id, {"metadata": bearing(FILED_KEY)}
        started = await self.stub.StartRollout(request, **call)
        self.said.add(f"start {name}", started)
        uid = started.rollout.uid
        watched = pb.WatchRolloutRequest(uid=uid, detail=event_pb2.EVENT_DETAIL_FULL)
        async for item in self.stub.WatchRollout(watched, **call):
            self.said.add(f"event of {name}", item)
        read = pb.GetRolloutRequest(uid=uid, view=pb.ROLLOUT_VIEW_FULL)
        found = pb.Rollout()
        while found.delivery.state in PENDING:
            await asyncio.sleep(0.02)
            found = (await self.stub.GetRollout(read, **call)).rollout
        self.said.add(f"rollout {name}", found)
        self.said.rollouts[name] = found

    async def refused(self, where: str, call: Awaitable[object]) -> None:
        """Make a call that is refused, and store everything in its status."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        self.said.add(
            where, (Refusal.of(caught.value), caught.value.trailing_metadata(), caught.value.debug_error_string())
        )


async def play_failures(play: Play, receivers: list[str]) -> None:
    """Trainers that fail in every way, in both Osmosis HTTP APIs, each with another receiver."""
    async with AsyncExitStack() as stack:
        urls = {"unreachable": "http://127.0.0.1:9"}
        for name, make in ECHOES.items():
            holder: list[HttpTrainer] = []
            holder.append(await stack.enter_async_context(raw_trainer(make(holder))))
            urls[name] = holder[0].url
        for name, act in BREAKS.items():
            urls[name] = (await stack.enter_async_context(raw_trainer(act))).url
        requests = [
            request_for(
                f"{name} {'plain' if plain else 'masked'}", url, receivers[number % len(receivers)], plain=plain
            )
            for number, (name, url) in enumerate(urls.items())
            for plain in (True, False)
        ]
        await asyncio.gather(*map(play.run, requests))


async def play_refusals(play: Play) -> None:
    """Invalid requests with marks in them."""
    stub, call = play.stub, {"metadata": bearing(API_KEY)}
    for url in (f"http://{MARK}@host", f"http://u:{MARK}@host:1", f"http://host/?key={MARK}", f"http://{MARK} x", MARK):
        for name in ("completions", "outcome"):
            await play.refused("URL", stub.StartRollout(start(**{name: target(url)}), **call))
    for name in ("completions_bearer", "outcome_bearer", "tools_bearer"):
        wrong = start(completions=target(f"http://x:{MARK}@h"))
        setattr(wrong.credentials, name, f"{MARK}\n")
        await play.refused(name, stub.StartRollout(wrong, **call))
    for header in (MARK, f"Bearer {API_KEY}x", f"Basic {API_KEY}"):
        asked = stub.ListAgents(pb.ListAgentsRequest(), metadata=(("authorization", header),))
        await play.refused("header", asked)
    for encoding in ("latin-1", "utf-8"):
        play.said.add("raw", await raw_call(play.server.grpc_port, f"Bearer {API_KEY}ü".encode(encoding)))


async def play_http(play: Play, trainer: str) -> None:
    """The same over HTTP: valid and invalid requests; responses, headers and the metrics are stored."""
    key = {"authorization": f"Bearer {API_KEY}"}
    message = {"role": "user", "content": "5 plus 3?"}
    asked = {"rollout_id": "http", "server_url": trainer, "messages": [message], "api_key": TRAINERS}
    masked = asked | {"sampling_params": {}, "tokenizer_name": "toy", "callback_api_key": TRAINERS}
    plain = {"messages": [message], "completions": {"url": trainer, "dialect": "http_plain", "bearer": TRAINERS}}
    wrong = [("/v1/rollout/init", asked), ("/rollout", masked), ("/v1/rollouts", plain)]
    async with httpx.AsyncClient(base_url=play.server.url, timeout=60, trust_env=False) as client:

        async def ask(method: str, path: str, headers: Any = key, **sent: Any) -> None:
            got = await client.request(method, path, headers=headers, **sent)
            play.said.add(f"{method} {path}", (got.status_code, dict(got.headers), got.text))

        for path, body in wrong:
            user = {"server_url": f"http://u:{MARK}@host", "completions": {"url": f"http://u:{MARK}@host"}}
            for changes in ({}, user, {name: [MARK] for name in ("api_key", "callback_api_key", "completions")}):
                await ask("POST", path, json=body | changes)
            await ask("POST", path, key | {"content-type": "application/json"}, content=json.dumps(body)[:-1])
            await ask("POST", path, {"authorization": f"Bearer {MARK}"}, json=body)
            await ask("POST", path, [(b"authorization", f"{MARK}ü".encode("latin-1"))], json=body)
        for path in (
            "/v1/rollouts",
            f"/v1/rollouts?api_key={API_KEY}",
            "/platform/health",
            "/health",
            "/metrics",
            "/tools",
        ):
            await ask("GET", path)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["json", "text"])
async def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Said]:
    """The complete output of a server with the most verbose log."""
    directory: Path = tmp_path_factory.mktemp("planted")
    (directory / "keys").write_text(entry_of("filed", FILED_KEY))
    env = {
        "ROLLOUT_LOG_LEVEL": "debug",
        "ROLLOUT_API_KEY": API_KEY,
        "ROLLOUT_ADMIN_KEY": ADMIN_KEY,
        "ROLLOUT_API_KEYS_FILE": "keys",
        "ROLLOUT_RETRIES": "1",
        "ROLLOUT_RETRY_BASE_SECONDS": "0.01",
        "ROLLOUT_DELIVERY_RETRIES": "1",
    }
    said = Said()
    text = f"no such key: Bearer {RECEIVERS} {RECEIVERS}"
    echoing = Answer(grpc.StatusCode.UNAUTHENTICATED, text), Answer(grpc.StatusCode.INTERNAL, text)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve("--log-format", request.param, cwd=directory, **env))
        called: list[GrpcReceiver] = [await stack.enter_async_context(grpc_receiver(each)) for each in echoing]
        posted: list[str] = []
        for status in (400, 500, 302):
            holder: list[HttpTrainer] = []
            act = echo(status, as_detail, location="http://127.0.0.1:9/{}")(holder)
            holder.append(await stack.enter_async_context(raw_trainer(act)))
            posted.append(holder[0].url)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}"))
        play = Play(server, said, RolloutServiceStub(channel))
        await play_failures(play, [*(each.url for each in called), *posted, "http://127.0.0.1:9"])
        await play_refusals(play)
        await play_http(play, posted[0])
        (directory / "keys").write_text(f"filed {FILED_KEY}")
        while "stay unchanged" not in server.text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        listing = pb.ListRolloutsRequest(page_size=1000, view=pb.ROLLOUT_VIEW_FULL)
        said.add("list", await play.stub.ListRollouts(listing, metadata=bearing(ADMIN_KEY)))
        server.send(signal.SIGINT)
        await server.ended()
        said.add("log", server.text)
    yield said


@pytest.mark.asyncio(loop_scope="module")
async def test_the_rollouts_failed_as_they_were_meant_to(said: Said) -> None:
    assert len(said.rollouts) == 2 * (len(ECHOES) + len(BREAKS) + 1)
    ends = {name: rollout.outcome for name, rollout in said.rollouts.items()}
    assert not [name for name, outcome in ends.items() if not outcome.HasField("failure")]
    assert {outcome.failure.http_status for outcome in ends.values()} >= {0, 302, 401, 403, 404, 429, 500}
    errors = [rollout.delivery.error for rollout in said.rollouts.values()]
    assert all(errors)
    assert sum("[redacted]" in error for error in errors) > len(errors) / 3


@pytest.mark.asyncio(loop_scope="module")
async def test_no_marker_is_in_anything_that_was_said(said: Said) -> None:
    assert len(said.texts) > 150
    for where, text in said.texts.items():
        for trace in TRACES:
            assert trace not in text.lower(), where


def test_no_repr_shows_a_secret() -> None:
    credentials = Credentials(TRAINERS, RECEIVERS, TOOLS)
    where = Target("http://host", Dialect.HTTP_PLAIN)
    keys = [key_of("a", API_KEY), key_of("b", ADMIN_KEY, admin=True)]
    shown = repr(
        (
            credentials,
            StartRequest(Spec("r", (), where), "a", credentials=credentials),
            PackedOutcome(where, "key", f"{MARK}".encode(), RECEIVERS),
            HttpRequest("http://host", f"{MARK}".encode(), {"authorization": f"Bearer {TRAINERS}"}),
            Settings(_env_file=None, api_key=API_KEY, admin_key=ADMIN_KEY),
            keys,
            Keyring(keys),
        )
    )
    for trace in TRACES:
        assert trace not in shown.lower()
