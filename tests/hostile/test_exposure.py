"""What a server exposes and which targets it calls: malicious target URLs, safe defaults, and the startup report."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import example, given
from hypothesis import strategies as st
from osmosis.rollout.v1 import agent_service_pb2, spec_pb2, trainer_service_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_gateway.http.serve import Listening
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.edge.api_keys import Keyring, new_key
from rollout_server.edge.targets.host_port import HostName, MalformedTarget, read_url
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpSettings
from rollout_server.network_exposure import authenticates_callers, log_exposure
from rollout_server.settings import Settings
from rollout_server.settings.standalone_gateway import GatewayOptions
from yarl import URL

from tests.support.bodies import TOKENIZER, body
from tests.support.gateways import http_client
from tests.support.http_trainer import COMPLETION, HttpTrainer, answer, raw_trainer
from tests.support.processes import Serving, environment, started
from tests.support.start_requests import start, target

SUFFIX = "/v1/chat/completions"
CANARY = "canary-7731"
TAILS = [
    *(
        "#",
        "?",
        "/#",
        "/v2/keys/purge#",
        "/v2/keys/purge?",
        "?x=1",
        "/v1/../../admin",
        "/..",
        "/%2e%2e/admin",
        "/a%2fb",
    ),
    *("\\..\\admin", "/a\\b", "/..;/admin", "//evil.example/x", "/a b", "/a\tb", "/a\r\nX: y", "/a\x00"),
]
WRONG_HOSTS = [
    *("http://169.254.169.254/latest", "http://[fe80::1]:9001", "http://[fd00:ec2::254]", "http://100.100.100.200"),
    *(
        "http://2130706433:9001",
        "http://0177.0.0.1",
        "http://127.1",
        "http://0x7f.1",
        "http://[::1%25lo]",
        "http://ⓐ.example",
    ),
    *("http://user:pass@127.0.0.1", "http://127.0.0.1\\@evil.example", "http://[::ffff:169.254.169.254]"),
]


# The URL that is requested.


class Everywhere(AbstractResolver):
    """A resolver that maps every name to this machine and records the names."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return 127.0.0.1 for any name."""
        self.asked.append(host)
        number = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=number)]

    async def close(self) -> None:
        """Release nothing; the resolver has no resources."""


class Wire:
    """The server's real HTTP client, connected to a socket that records each raw request."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.resolver = Everywhere()
        self.stack = AsyncExitStack()
        self.trainer, self.client = self.runner.run(self._open())
        self.port = int(self.trainer.url.rpartition(":")[2])

    async def _open(self) -> tuple[HttpTrainer, HttpClient]:
        trainer = await self.stack.enter_async_context(raw_trainer(answer()))
        lookup = CheckedLookup(TargetRules(), self.resolver)
        self.stack.push_async_callback(lookup.close)
        client = HttpClient(HttpSettings(resolver=lookup))
        self.stack.push_async_callback(client.close)
        return trainer, client

    def post(self, url: str) -> tuple[str, str]:
        """Send a request and return the request target and Host header that arrive."""
        self.runner.run(self.client.post(HttpRequest(url, b"{}", {"content-type": "application/json"})))
        request = self.trainer.requests[-1]
        self.trainer.requests.clear()
        return request.target, request.headers["host"]

    def close(self) -> None:
        """Close client and socket."""
        self.runner.run(self.stack.aclose())
        self.runner.close()


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    """One client and one socket for all examples."""
    opened = Wire()
    yield opened
    opened.close()


PLAIN_PIECES = st.sampled_from(["/", "a", "v1", "B-c_d", "/...", "/~x", "@b", ":", "=", "/v1/", ",", "(", "$"])
PIECES = st.sampled_from(
    [
        *(
            "/",
            "//",
            ".",
            "..",
            "/..",
            "/.",
            "%2e",
            "%2f",
            "%5c",
            "\\",
            "#",
            "?",
            ";",
            "@",
            ":",
            "&",
            "=",
            "+",
            "~",
            "!",
            "*",
        ),
        *(
            "a",
            "v1",
            "B-c_d",
            "%",
            "%41",
            "%c0%ae",
            " ",
            "\t",
            "\n",
            "\x00",
            "ü",
            "。",
            "\uff0e",
            "//x.example",
            ",",
            "'",
            "(",
            "$",
        ),
    ]
)
PATHS = st.one_of(
    st.lists(PLAIN_PIECES, max_size=6).map("".join), st.lists(PIECES, max_size=6).map("".join), st.text(max_size=8)
).map(lambda text: text if not text or text[0] in "/#?\\" else f"/{text}")
GOOD_HOSTS = st.sampled_from(
    [
        *("127.0.0.1", "localhost", "LocalHost.", "trainer.internal"),
        *("xn--bcher-kva.example", "a_b", "[::ffff:127.0.0.1]"),
    ]
)
ODD_HOSTS = st.lists(PIECES, min_size=1, max_size=4).map("".join).filter(lambda host: "/" not in host)
HOSTS = st.one_of(GOOD_HOSTS, GOOD_HOSTS, GOOD_HOSTS, ODD_HOSTS)


@given(host=HOSTS, path=PATHS, slashes=st.integers(0, 2))
@example("127.0.0.1", "/v2/keys/purge#", 0)
@example("127.0.0.1", "/v2/keys/purge?", 0)
@example("localhost", "/a/../b", 1)
@example("trainer.internal", "/a/...", 1)
def test_what_is_requested_has_the_host_port_and_path_of_the_target(
    wire: Wire, host: str, path: str, slashes: int
) -> None:
    """For every accepted target, the request on the socket, yarl's parse and the DNS query agree with the target."""
    base = f"http://{host}:{wire.port}{path}{'/' * slashes}".rstrip("/")
    if next(TargetRules().violations(base, "url"), None) is not None:
        return
    place = read_url(base)
    written = base.partition("://")[2]
    authority, slash, rest = written.partition("/")
    assert authority == f"{host}:{wire.port}"
    url = URL(f"{base}{SUFFIX}", encoded=True)
    assert (url.raw_path, url.raw_query_string, url.raw_fragment) == (f"{slash}{rest}{SUFFIX}", "", "")
    assert (url.scheme, url.port, url.user, url.password) == ("http", wire.port, None, None)
    wire.resolver.asked.clear()
    arrived, named = wire.post(f"{base}{SUFFIX}")
    assert arrived == f"{slash}{rest}{SUFFIX}"
    read = read_url(f"http://{named}")
    assert (read.host, read.port) == (place.host, place.port)
    for asked in wire.resolver.asked:
        assert isinstance(place.host, HostName)
        assert asked.lower().removesuffix(".") == place.host.text


@given(st.lists(PIECES, max_size=8).map(lambda pieces: "http://a" + "".join(pieces)))
def test_any_text_is_taken_or_refused_with_a_reason(url: str) -> None:
    try:
        place = read_url(url)
    except MalformedTarget as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert reason.startswith(("must", "needs"))
        return
    assert not set(url) & set("#?\\%; ")
    assert url.isascii()
    assert url.isprintable()
    assert "//" not in url.removeprefix("http://")
    assert not {".", ".."} & set(url.split("/"))
    assert place.scheme == "http"


# A server, and a service that is not a trainer.


def settings(**changes: Any) -> Settings:
    """Settings of a server on free ports."""
    fields: dict[str, Any] = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "drain_seconds": 0, "retries": 0}
    fields |= {"tokenizers": {TOKENIZER: "toy"}, "tokenizers_offline": True, "delivery_retries": 0}
    return Settings(_env_file=None, **(fields | changes))


class Opened:
    """A server with a client for HTTP and a stub for gRPC."""

    def __init__(self, server: Server, http: httpx.AsyncClient, stub: Any) -> None:
        self.server, self.http, self.stub = server, http, stub

    async def refused_everywhere(self, url: str) -> None:
        """Assert that each API refuses this target, for completions and for the outcome, and names the field."""
        init = {
            "rollout_id": "r",
            "server_url": url,
            "messages": [{"role": "user", "content": "x"}],
            "completion_params": {},
        }
        for path, asked, field in (
            ("/rollout", body("r", url), "server_url"),
            ("/v1/rollout/init", init, "server_url"),
        ):
            answered = await self.http.post(path, json=asked)
            assert (answered.status_code, field in answered.text) == (422, True), (path, url, answered.text)
        fine = "http://127.0.0.1:9"
        for completions, outcome in (
            (target(url), None),
            (target(fine), target(url)),
            (target(url, dialect=spec_pb2.DIALECT_OPENAI, model="m"), None),
            (target(url, dialect=spec_pb2.DIALECT_VLLM, model="m"), None),
            (target(url.replace("http://", "grpc://", 1)), None),
            (target(fine), target(url.replace("http://", "grpc://", 1))),
        ):
            where = "spec.outcome.url" if outcome else "spec.completions.url"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self.stub.StartRollout(start(completions=completions, outcome=outcome))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, url
            assert where in str(caught.value.details()), url
        plain = {
            "start": {"spec": {"messages": [{"json": '{"role":"user","content":"x"}'}], "completions": {"url": url}}}
        }
        answered = await self.http.post("/v1/rollouts", json=plain)
        assert answered.status_code in (400, 422), answered.text


@asynccontextmanager
async def opened(**changes: Any) -> AsyncIterator[Opened]:
    """A server with these settings."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server([Calculator()], settings(**changes)))
        http = await stack.enter_async_context(http_client(f"http://127.0.0.1:{server.http_port}", timeout=60))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}"))
        yield Opened(server, http, RolloutServiceStub(channel))


async def test_no_api_takes_a_target_that_leads_elsewhere() -> None:
    async with raw_trainer(answer(b"OK")) as service, opened() as server:
        for tail in TAILS:
            await server.refused_everywhere(service.url + tail)
        for url in WRONG_HOSTS:
            await server.refused_everywhere(url)
        assert service.requests == []


async def test_redirects_proxies_and_netrc_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"default login {CANARY} password {CANARY}\n")
    async with raw_trainer(answer(b"OK")) as elsewhere, opened() as server:
        moved = answer(b"", 307, location=f"{elsewhere.url}/admin")
        async with raw_trainer(moved) as trainer:
            for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
                monkeypatch.setenv(name, elsewhere.url)
                monkeypatch.setenv(name.upper(), elsewhere.url)
            monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
            answered = (await server.http.post("/rollout", json=body("moved", trainer.url))).json()
            assert answered["status"] == "ERROR"
            assert [request.target for request in trainer.requests] == [SUFFIX]
            assert "authorization" not in trainer.requests[0].headers
        assert elsewhere.requests == []


# This machine's own addresses.


async def test_a_server_that_others_reach_does_not_call_its_own_machine() -> None:
    async with raw_trainer(answer()) as service, opened(host="0.0.0.0") as server:
        port = service.url.rpartition(":")[2]
        for host in ("127.0.0.1", "127.9.9.9", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]"):
            answered = await server.http.post("/rollout", json=body("r", f"http://{host}:{port}"))
            assert (answered.status_code, "loopback" in answered.text) == (422, True), answered.text
        named = await server.http.post("/rollout", json=body("r", f"http://localhost:{port}"))
        assert "loopback" in named.json()["error_message"]
        begun = await server.stub.StartRollout(start(completions=target(f"grpc://localhost:{port}"), tokenizer=None))
        over = await server.stub.WaitRollout(pb.WaitRolloutRequest(uid=begun.rollout.uid))
        assert "loopback" in over.rollout.outcome.failure.message
        assert service.connections == 0


async def test_a_rule_for_loopback_lets_a_server_that_others_reach_call_it() -> None:
    async with raw_trainer(answer()) as service, opened(host="0.0.0.0", targets=("127.0.0.0/8",)) as server:
        answered = (await server.http.post("/rollout", json=body("r", service.url))).json()
        assert answered["status"] == "COMPLETED", answered


# Responses of services that are not trainers.

WORDS = json.dumps({"detail": CANARY, "error": {"message": CANARY}, "secret": CANARY}).encode()
NOT_TRAINERS = [(WORDS, 403), (CANARY.encode(), 404), (WORDS, 500), (CANARY.encode(), 422), (WORDS, 200)]
STRANGERS = {"host": "0.0.0.0", "targets": ("127.0.0.0/8",)}


async def outcomes(server: Opened, url: str) -> str:
    """All texts that callers can read about rollouts with this completion or outcome target."""
    told = [(await server.http.post("/rollout", json=body("r", url))).text]
    for fields in (
        {"completions": target(url, dialect=spec_pb2.DIALECT_HTTP_PLAIN)},
        {"completions": target(url, dialect=spec_pb2.DIALECT_OPENAI, model="m")},
        {"outcome": target(url), "completions": target("http://127.0.0.1:9", dialect=spec_pb2.DIALECT_HTTP_PLAIN)},
    ):
        begun = await server.stub.StartRollout(start(**fields))
        await server.stub.WaitRollout(pb.WaitRolloutRequest(uid=begun.rollout.uid))
        while True:
            got = await server.stub.GetRollout(pb.GetRolloutRequest(uid=begun.rollout.uid, view=pb.ROLLOUT_VIEW_FULL))
            if got.rollout.delivery.state != pb.DELIVERY_STATE_PENDING:
                break
            await asyncio.sleep(0.01)
        told += [str(got), (await server.http.get(f"/v1/rollouts/{begun.rollout.uid}")).text]
    return "\n".join(told)


@pytest.mark.parametrize(("text", "status"), NOT_TRAINERS)
async def test_callers_without_a_key_do_not_read_what_other_services_answer(text: bytes, status: int) -> None:
    async with raw_trainer(answer(text, status)) as service, opened(**STRANGERS) as server:
        told = await outcomes(server, service.url)
    assert len(service.requests) >= 4
    assert CANARY not in told
    assert str(status) in told


async def test_who_is_known_reads_them() -> None:
    async with raw_trainer(answer(WORDS, 403)) as service, opened() as server:
        assert (await outcomes(server, service.url)).count(CANARY) >= 4


async def test_a_trainer_that_has_answered_is_quoted_to_everybody() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    first = json.loads(COMPLETION) | {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    acts = (answer(json.dumps(first).encode()), answer(WORDS, 403))
    async with raw_trainer(*acts) as trainer, opened(**STRANGERS) as server:
        answered = (await server.http.post("/rollout", json=body("r", trainer.url))).json()
    assert CANARY in answered["error_message"]


# Defaults.


def test_every_listener_listens_on_loopback_unless_told_otherwise() -> None:
    assert Settings(_env_file=None).host == "127.0.0.1"
    assert GatewayOptions(_env_file=None, servers=("a:1",)).host == "127.0.0.1"  # type: ignore[call-arg]
    assert Listening().host == "127.0.0.1"


def reached(address: str, port: int) -> bool:
    """Whether a socket listens there."""
    try:
        socket.create_connection((address, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["", "0.0.0.0"])
async def test_rollout_serve_is_reached_where_it_was_told_to_listen(tmp_path: Path, host: str) -> None:
    """A socket bound to 127.0.0.1 is not reachable at 127.0.0.2; one bound to all addresses is."""
    metrics = random.randint(10_000, 30_000)  # outside the range of ephemeral ports, which other tests use
    env = environment(ROLLOUT_METRICS_PORT=str(metrics), **({"ROLLOUT_SERVER_HOST": host} if host else {}))
    async with started(Serving, "serve", "--http-port", "0", "--grpc-port", "0", cwd=tmp_path, env=env) as serving:
        for port in (serving.http_port, serving.grpc_port, metrics):
            assert reached("127.0.0.1", port)
            assert reached("127.0.0.2", port) is (host == "0.0.0.0")


# Keys.

OPEN_PATHS = {"/health", "/healthz", "/readyz"}
OPEN_PAGES = ("/", "/docs", "/openapi.json")  # not in the description themselves
OPEN_CALLS = {"GetServerInfo"}


async def _code(channel: grpc.aio.Channel, method: MethodDescriptor) -> grpc.StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        # If a message is written while the response arrives, grpc.aio reports INTERNAL instead of the status.
        return await channel.stream_stream(path)().code()
    return await (channel.unary_stream if method.server_streaming else channel.unary_unary)(path)(b"").code()


async def test_with_keys_every_route_and_every_call_demands_one() -> None:
    async with opened(api_key=new_key()) as server:
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        routes = [(method, path) for path, methods in paths.items() for method in methods if path not in OPEN_PATHS]
        assert {("post", "/rollout"), ("get", "/tools"), ("post", "/v1/rollout/init"), ("get", "/metrics")} <= set(
            routes
        )
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": ""}):
                sent = {} if method == "get" else {"json": {}}
                answered = await server.http.request(method, re.sub(r"\{\w+\}", "x", path), headers=headers, **sent)
                # Clients of a model endpoint repeat requests after 401 for minutes.
                expected = 403 if path.startswith("/r/") else 401
                assert answered.status_code == expected, (method, path, headers, answered.text)
        assert not paths.keys() & set(OPEN_PAGES)
        for path in OPEN_PAGES:
            assert (await server.http.get(path)).status_code == 200, path
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.server.grpc_port}")
        services = [pb.DESCRIPTOR.services_by_name["RolloutService"]]
        services += [trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"]]
        async with channel:
            for method in (each for service in services for each in service.methods if each.name not in OPEN_CALLS):
                assert await _code(channel, method) is grpc.StatusCode.UNAUTHENTICATED, method.full_name
            for method in agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].methods:
                assert await _code(channel, method) is grpc.StatusCode.PERMISSION_DENIED, method.full_name


async def test_the_synchronous_api_goes_without_a_key_only_where_that_is_set() -> None:
    async with raw_trainer(answer()) as trainer:
        for needed, status in ((True, 401), (False, 200)):
            async with opened(api_key=new_key(), synchronous_needs_key=needed) as server:
                assert (await server.http.get("/tools")).status_code == status
                answered = await server.http.post("/rollout", json=body("r", trainer.url))
                assert answered.status_code == status
                assert (await server.http.get("/v1/rollouts")).status_code == 401
        assert len(trainer.requests) == 1


# The startup report.

GRPC = "open without an API key on {}: gRPC, which starts"
SYNCHRONOUS = "open without an API key on {}: POST /rollout and GET /tools"
ASYNCHRONOUS = "open without an API key on {}: POST /v1/rollout/init"
PLAIN = "open without an API key on {}: /v1/rollouts"
METRICS = "open without an API key on {}: GET /metrics over HTTP"
METRICS_PORT = "open without an API key on {}: GET /metrics on the port"
HEALTH = "open without an API key on {}: GET /health"
DOCS = "open without an API key on {}: the API documentation (GET /, /docs, /openapi.json)"
INFO = "open without an API key on {}: health, reflection and GetServerInfo"
TARGETS = "allowed targets: "
WITHOUT_KEYS = [GRPC, SYNCHRONOUS, ASYNCHRONOUS, PLAIN, METRICS]


@pytest.mark.parametrize(
    ("changes", "warned", "told"),
    [
        ({}, [], []),
        ({"host": "localhost", "api_key": "k" * 20}, [], []),
        ({"api_key": "k" * 20, "synchronous_needs_key": False}, [SYNCHRONOUS], []),
        ({"host": "0.0.0.0"}, WITHOUT_KEYS, [INFO, HEALTH, DOCS, f"{TARGETS}all but loopback"]),
        (
            {"host": "0.0.0.0", "http": False, "targets": ("10.0.0.0/8", "a.example")},
            [GRPC],
            [INFO, f"{TARGETS}10.0.0.0/8, a.example"],
        ),
        ({"host": "0.0.0.0", "api_key": "k" * 20, "metrics_port": 0}, [], [INFO, HEALTH, DOCS, METRICS_PORT, TARGETS]),
        (
            {"host": "0.0.0.0", "api_key": "k" * 20, "synchronous_needs_key": False},
            [SYNCHRONOUS],
            [INFO, HEALTH, DOCS, TARGETS],
        ),
    ],
)
async def test_a_start_says_in_one_line_each_what_is_open(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], warned: list[str], told: list[str]
) -> None:
    with caplog.at_level(logging.INFO, "rollout_server.network_exposure"):
        async with opened(**changes):
            pass
    host = changes.get("host", "127.0.0.1")
    records = [record for record in caplog.records if record.name == "rollout_server.network_exposure"]
    for level, expected in ((logging.WARNING, warned), (logging.INFO, told)):
        lines = [record.getMessage() for record in records if record.levelno == level]
        assert len(lines) == len(expected), lines
        assert all(line.startswith(each.format(host)) for line, each in zip(lines, expected, strict=True)), lines
    assert all(record.getMessage().isprintable() for record in records)


def test_who_needs_a_client_certificate_is_no_stranger(caplog: pytest.LogCaptureFixture) -> None:
    chosen = settings(host="::", tls_client_ca=Path("clients.pem"))
    with caplog.at_level(logging.INFO, "rollout_server.network_exposure"):
        log_exposure(chosen, Keyring(()))
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert caplog.records[0].getMessage().startswith("open without an API key on :: (with a client certificate): gRPC")
    assert authenticates_callers(chosen)


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "127.8.8.8"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "a.example"}, False),
        *(
            ({"host": "::", name: value}, True)
            for name, value in (("api_key", "k"), ("admin_key", "k"), ("api_keys", "a"))
        ),
        ({"host": "::", "api_keys_file": "keys"}, True),
        ({"host": "::", "api_key": "k", "synchronous_needs_key": False}, False),
        ({"host": "::", "api_key": "k", "synchronous_needs_key": False, "http": False}, True),
    ],
)
def test_who_calls_is_known_on_loopback_and_by_keys(changes: dict[str, Any], known: bool) -> None:
    assert authenticates_callers(settings(**changes)) is known
