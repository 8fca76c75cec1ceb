"""What the client never does: follow redirects, keep cookies, use a proxy, read without limit, or send on a closed connection."""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpSettings
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.retry import CompletionFetch, fetch_once
from rollout_server.runtime.errors import RolloutFailed

from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import COMPLETION, Act, answer, closed, endless, raw_trainer, silence

Connect = Callable[[HttpSettings], HttpClient]


def request(url: str) -> HttpRequest:
    return HttpRequest(f"{url}/v1/chat/completions", b"{}", {})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(trainers: MaskedTrainers, status: int) -> None:
    async with raw_trainer() as elsewhere, raw_trainer(answer(b"", status, location=elsewhere.url)) as trainer:
        failure = await Asking(trainers, trainer.url, credential="sk-1").failure()
        assert (failure.category, failure.http_status) == (Category.VALIDATION, status)
        assert "redirects are not followed" in failure.message
        assert len(trainer.requests) == 1
        assert elsewhere.connections == 0


async def test_cookies_are_not_kept(client: HttpClient) -> None:
    async with raw_trainer(answer(set_cookie="id=secret; Path=/; Max-Age=3600")) as trainer:
        for _ in range(2):
            await client.post(request(trainer.url))
        assert len(trainer.requests) == 2
        assert not any("cookie" in each.headers for each in trainer.requests)


POST = """
import asyncio, sys
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpSettings

async def post():
    client = HttpClient(HttpSettings(timeout=20))
    answer = await client.post(HttpRequest(sys.argv[1], b"{}", {}))
    await client.close()
    print(answer.status)

asyncio.run(post())
"""


async def test_neither_proxies_nor_passwords_are_taken_from_the_environment(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret\n")
    netrc.chmod(0o600)
    async with raw_trainer() as proxy, raw_trainer() as trainer:
        names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        env = {**os.environ, **dict.fromkeys(names, proxy.url), "NETRC": str(netrc), "no_proxy": "", "NO_PROXY": ""}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", POST, trainer.url, env=env, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        assert (process.returncode, said.strip()) == (0, b"200")
        assert proxy.connections == 0
        assert "authorization" not in trainer.requests[0].headers


async def oversized(connect: Connect, act: Act) -> str:
    """How a response over 1 MiB fails. Afterwards the client has closed the connection."""
    client = connect(HttpSettings(timeout=20, max_answer_bytes=2**20))
    async with raw_trainer(act) as trainer:
        with pytest.raises(RolloutFailed) as caught:
            await fetch_once(client, CompletionFetch(request(trainer.url), 1))
        assert len(trainer.requests) == 1
        return caught.value.failure.message


OVERSIZED: dict[str, Act] = {
    "declared": answer(b" " * (2**20 + 1)),
    "endless": endless(b" " * 2**16),
    "compressed": answer(gzip.compress(b" " * 2**26), content_encoding="gzip"),
}


@pytest.mark.parametrize("act", OVERSIZED.values(), ids=OVERSIZED.keys())
async def test_an_answer_without_end_is_given_up(connect: Connect, act: Act) -> None:
    assert "turn 1" in await oversized(connect, act)


@pytest.mark.parametrize("act", OVERSIZED.values(), ids=OVERSIZED.keys())
async def test_the_failure_says_that_the_answer_was_too_large(connect: Connect, act: Act) -> None:
    assert "1048576 bytes" in await oversized(connect, act)


async def test_an_answer_of_just_the_limit_is_read(connect: Connect) -> None:
    async with raw_trainer(answer(b" " * 2**20)) as trainer:
        got = await connect(HttpSettings(max_answer_bytes=2**20)).post(request(trainer.url))
        assert len(got.body) == 2**20


async def test_a_compressed_answer_is_read(client: HttpClient) -> None:
    async with raw_trainer(answer(gzip.compress(COMPLETION), content_encoding="gzip")) as trainer:
        assert (await client.post(request(trainer.url))).body == COMPLETION


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (answer(content_encoding="gzip"), "the response's body is not in its Content-Encoding"),
        (closed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), "is not valid HTTP"),
        (closed(b"HTTP/1.1 200 OK\r\nno header: 1\r\nContent-Length: 2\r\n\r\n{}"), "is not valid HTTP"),
        (closed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{"), "the response was incomplete (ClientPayloadError)"),
    ],
)
async def test_what_is_wrong_with_a_response_is_told(trainers: MaskedTrainers, act: Act, said: str) -> None:
    async with raw_trainer(act) as trainer:
        assert said in (await Asking(trainers, trainer.url).failure()).message


async def test_many_turns_at_once_wait_for_each_other_nowhere(connect: Connect) -> None:
    """No pool limit delays requests: all of them arrive before the first response."""
    client, count = connect(HttpSettings(timeout=60)), 300
    arrived, all_there = list[int](), asyncio.Event()

    async def wait_for_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(1)
        if len(arrived) == count:
            all_there.set()
        await all_there.wait()
        await answer()(reader, writer)

    async with raw_trainer(wait_for_all) as trainer:
        answers = await asyncio.gather(*(client.post(request(trainer.url)) for _ in range(count)))
    assert {each.status for each in answers} == {200}


async def test_a_turn_that_is_cancelled_lets_go_of_its_connection(client: HttpClient) -> None:
    asked = asyncio.Event()

    async def wait_until_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await silence()(reader, writer)

    async with raw_trainer(wait_until_gone) as trainer:
        asking = asyncio.create_task(client.post(request(trainer.url)))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(trainer.left(), 20)
