"""Only requests that provably were not processed are retried."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpSettings
from rollout_server.edge.trainer.retry import CompletionFetch, Fetched, fetch_once
from rollout_server.runtime.errors import RolloutFailed

from tests.support.http_trainer import COMPLETION, Act, answer, closed, endless, head, raw_trainer, reset, silence

Connect = Callable[[HttpSettings], HttpClient]
TAKEN = "may have been generated"
TWICE = re.compile(r"could not be reached \(\w+\) in 2 attempts")


async def fetch(client: HttpClient, url: str) -> Fetched:
    request = HttpRequest(f"{url}/v1/chat/completions", b"{}", {"idempotency-key": "u/0/3"})
    return await fetch_once(client, CompletionFetch(request, 3))


async def failure(client: HttpClient, url: str) -> Failure:
    with pytest.raises(RolloutFailed) as caught:
        await fetch(client, url)
    found = caught.value.failure
    assert found.turn == 3
    assert "turn 3" in found.message
    return found


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


async def test_a_refused_connection_is_tried_again_until_the_trainer_is_up(connect: Connect) -> None:
    client = connect(HttpSettings(connect_attempts=8))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nothing listens yet
        asking = asyncio.create_task(fetch(client, f"http://127.0.0.1:{port_of(bound)}"))
        await asyncio.sleep(0.1)
        assert not asking.done()
        async with raw_trainer(listener=bound) as trainer:
            got = await asking
            assert (got.response.status, got.response.body) == (200, COMPLETION)
            assert 2 <= got.attempts <= 8
            assert len(trainer.requests) == 1


async def test_a_trainer_that_stays_away_is_named_with_the_number_of_attempts(connect: Connect) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = port_of(bound)
        found = await failure(connect(HttpSettings(connect_attempts=2)), f"http://127.0.0.1:{port}")
    assert found.category is Category.NETWORK
    assert f"the trainer at 127.0.0.1:{port}" in found.message
    assert TWICE.search(found.message)
    assert TAKEN not in found.message


async def test_an_unknown_host_is_not_reached(connect: Connect) -> None:
    found = await failure(connect(HttpSettings(connect_attempts=2)), "http://trainer.invalid:8081")
    assert found.category is Category.NETWORK
    assert "the trainer at trainer.invalid:8081" in found.message
    assert TWICE.search(found.message)
    assert TAKEN not in found.message


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".test", "xn--a", "a.xn--"])
async def test_a_host_that_is_no_name_is_not_reached_either(connect: Connect, host: str) -> None:
    found = await failure(connect(HttpSettings(connect_attempts=1)), f"http://{host}:8081")
    assert found.category is Category.NETWORK
    assert f"the trainer at {host}:8081 could not be reached" in found.message
    assert TAKEN not in found.message


async def test_an_address_of_ipv6_has_brackets_in_messages(connect: Connect) -> None:
    found = await failure(connect(HttpSettings(connect_attempts=1)), "http://[::1]:1")
    assert "the trainer at [::1]:1 could not be reached" in found.message


BROKEN: dict[str, Act] = {
    "reset_before_the_answer": reset(),
    "reset_in_the_head": reset(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "reset_in_the_body": reset(head(200, len(COMPLETION)) + COMPLETION[:20]),
    "closed_before_the_answer": closed(),
    "closed_in_the_head": closed(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "truncated_body": closed(head(200, len(COMPLETION)) + COMPLETION[:-1]),
    "truncated_chunks": closed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}   \r\n"),
    "no_http_at_all": closed(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "corrupt_gzip": answer(b"not gzip", content_encoding="gzip"),
    "two_lengths": closed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} "),
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_answer_is_never_asked_for_again(client: HttpClient, act: Act) -> None:
    async with raw_trainer(act) as trainer:
        found = await failure(client, trainer.url)
        assert found.category is Category.NETWORK
        assert TAKEN in found.message
        assert len(trainer.requests) == trainer.connections == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_whose_body_breaks_is_not_an_answer(client: HttpClient, status: int) -> None:
    async with raw_trainer(closed(head(status, 100, {"retry-after": "0"}) + b"{")) as trainer:
        assert (await failure(client, trainer.url)).category is Category.NETWORK
        assert len(trainer.requests) == 1


SLOW: dict[str, Act] = {
    "no_answer": silence(),
    "no_end": endless(b" ", seconds=0.02),
}


@pytest.mark.parametrize("act", SLOW.values(), ids=SLOW.keys())
async def test_a_timeout_counts_the_whole_answer_and_is_final(connect: Connect, act: Act) -> None:
    async with raw_trainer(act) as trainer:
        found = await failure(connect(HttpSettings(timeout=0.4)), trainer.url)
        assert found.category is Category.NETWORK  # as in the reference implementation
        assert "timeout" in found.message
        assert "0.4 s (HTTP_CLIENT_TIMEOUT)" in found.message
        assert TAKEN in found.message
        assert len(trainer.requests) == trainer.connections == 1


@pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 422, 425, 429, 500, 502, 503, 504])
async def test_a_refusal_without_retry_after_is_asked_for_once(client: HttpClient, status: int) -> None:
    async with raw_trainer(answer(b"no", status), answer()) as trainer:
        got = await fetch(client, trainer.url)
        assert (got.response.status, got.response.body, got.attempts) == (status, b"no", 1)
        assert len(trainer.requests) == 1


async def test_tls_with_somebody_who_speaks_none_is_not_reached(connect: Connect) -> None:
    client = connect(HttpSettings(connect_attempts=2))

    async def speak_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello.append(await reader.read(100))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    hello: list[bytes] = []
    async with await asyncio.start_server(speak_plainly, "127.0.0.1", 0) as server:
        found = await failure(client, f"https://127.0.0.1:{port_of(server.sockets[0])}")
    assert found.category is Category.NETWORK
    assert TWICE.search(found.message)
    assert TAKEN not in found.message
    assert [bytes(each[:1]) for each in hello] == [b"\x16", b"\x16"]  # handshakes, no requests


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is needed to make a certificate")
async def test_a_certificate_that_nobody_vouches_for_gets_no_request(connect: Connect, tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(await self_signed(tmp_path))
    came: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(100))
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0, ssl=context) as server:
        found = await failure(
            connect(HttpSettings(connect_attempts=2)), f"https://127.0.0.1:{port_of(server.sockets[0])}"
        )
    assert found.category is Category.NETWORK
    assert re.search(r"could not be reached .*Certificate", found.message)
    assert b"".join(came) == b""


async def self_signed(directory: Path) -> Path:
    """A key and a certificate for 127.0.0.1, in one file."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    made = await asyncio.create_subprocess_exec(
        *command.split(), cwd=directory, stderr=asyncio.subprocess.DEVNULL, stdin=asyncio.subprocess.DEVNULL
    )
    assert await made.wait() == 0
    pem = directory / "both.pem"
    pem.write_text((directory / "key.pem").read_text() + (directory / "cert.pem").read_text())
    return pem
