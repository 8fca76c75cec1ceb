"""Connections of aiohttp go only to the addresses that were checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from rollout_server.edge.targets.resolver import CheckedLookup, refusal_of
from rollout_server.edge.targets.rules import TargetRefused, TargetRules
from yarl import URL

from tests.support.resolver import Table


@asynccontextmanager
async def server() -> AsyncIterator[tuple[int, list[str]]]:
    """An HTTP server that records the Host headers."""
    hosts: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        hosts.append(request.headers["host"])
        return web.Response(text="here")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], hosts
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client(rules: TargetRules, table: Table, **connector: object) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client like the trainer client's, without keep-alive: each request resolves again unless the cache has the name."""
    made = aiohttp.TCPConnector(resolver=CheckedLookup(rules, table), force_close=True, **connector)  # type: ignore[arg-type]
    async with aiohttp.ClientSession(connector=made) as session:
        yield session


async def get(session: aiohttp.ClientSession, url: str) -> str:
    """The text of the response."""
    async with session.get(URL(url, encoded=True), allow_redirects=False) as response:
        return await response.text()


async def refused(session: aiohttp.ClientSession, url: str) -> TargetRefused:
    """The refusal of a request."""
    with pytest.raises(aiohttp.ClientConnectorDNSError) as caught:
        await get(session, url)
    refusal = refusal_of(caught.value)
    assert refusal is not None
    return refusal


async def test_a_name_is_called_at_its_address_under_its_own_name() -> None:
    table = Table({"trainer.internal": [["127.0.0.1"]]})
    async with server() as (port, hosts), client(TargetRules.parse("trainer.internal"), table) as session:
        assert await get(session, f"http://trainer.internal:{port}/v1") == "here"
    assert hosts == [f"trainer.internal:{port}"]


async def test_a_name_that_resolves_elsewhere_is_not_called() -> None:
    table = Table({"b.example": [["127.0.0.1"]]})
    async with server() as (port, hosts), client(TargetRules.parse("10.0.0.0/8"), table) as session:
        refusal = await refused(session, f"http://b.example:{port}/v1")
    assert "b.example resolves to 127.0.0.1" in str(refusal)
    assert hosts == []


async def test_a_name_that_no_rule_could_allow_is_not_even_looked_up() -> None:
    table = Table({"b.example": [["127.0.0.1"]]})
    async with client(TargetRules.parse("trainer.internal"), table) as session:
        await refused(session, "http://b.example/v1")
    assert table.asked == []


@pytest.mark.parametrize(
    "answers", [["10.0.0.1", "127.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["127.0.0.1", "::ffff:10.0.0.1"]]
)
async def test_one_wrong_answer_spoils_the_others(answers: Sequence[str]) -> None:
    table = Table({"b.example": [answers]})
    async with server() as (port, hosts), client(TargetRules.parse("127.0.0.0/8"), table) as session:
        await refused(session, f"http://b.example:{port}/v1")
    assert hosts == []


@pytest.mark.parametrize("cached", [True, False])
async def test_rebinding_wins_nothing(cached: bool) -> None:
    """DNS rebinding: the first result is allowed and the second is not. The connection goes to the checked one."""
    table = Table({"b.example": [["127.0.0.1"], ["169.254.169.254"], ["127.0.0.1"]]})
    async with server() as (port, hosts), client(TargetRules(), table, use_dns_cache=cached) as session:
        url = f"http://b.example:{port}/v1"
        assert await get(session, url) == "here"
        if cached:
            assert await get(session, url) == "here"
        else:
            assert "169.254.169.254" in str(await refused(session, url))
            assert await get(session, url) == "here"
    assert len(table.asked) == (1 if cached else 3)
    assert hosts == [f"b.example:{port}"] * 2


async def test_many_requests_at_once_are_all_refused() -> None:
    """They share one lookup."""
    table = Table({"b.example": [["169.254.169.254"]]})
    async with client(TargetRules(), table) as session:
        refusals = await asyncio.gather(*(refused(session, "http://b.example/v1") for _ in range(20)))
    assert {str(refusal) for refusal in refusals} == {str(refusals[0])}


async def test_a_name_that_does_not_exist_is_no_refusal() -> None:
    async with client(TargetRules(), Table({})) as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await get(session, "http://b.example/v1")
    assert refusal_of(caught.value) is None


async def test_a_name_without_addresses_is_one_that_does_not_exist() -> None:
    async with client(TargetRules(), Table({"b.example": [[]]})) as session:
        with pytest.raises(aiohttp.ClientConnectorDNSError) as caught:
            await get(session, "http://b.example/v1")
    assert refusal_of(caught.value) is None


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "localhost.",
            "LOCALHOST",
            "127.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "0.0.0.0",
            "[::]",
        ),
        *(
            "0",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.1",
            "017700000001",
            "127.0.0.1.",
            "[::1%25lo]",
            "[::1%lo]",
        ),
        *("127。0。0。1", "１２７.0.0.1", "①②⑦.0.0.1", "٣.0.0.1", "a..b", "x%00y"),
    ],
)
async def test_what_aiohttp_connects_to_was_checked_here(host: str) -> None:
    """aiohttp resolves no host that it parses as an address. The rules must have refused every such host."""
    rules = TargetRules.parse("10.0.0.0/8")
    table = Table({"localhost": [["127.0.0.1"]], "localhost.": [["127.0.0.1"]], "LOCALHOST": [["127.0.0.1"]]})
    async with server() as (port, hosts), client(rules, table) as session:
        url = f"http://{host}:{port}/v1"
        if next(rules.violations(url, "url"), None) is None:
            assert "resolves to 127.0.0.1" in str(await refused(session, url))
            assert table.asked == [host]
        else:
            assert host.lower().rstrip(".") != "localhost"
    assert hosts == []


async def test_the_machines_own_resolver_is_used_where_none_is_given() -> None:
    lookup = CheckedLookup(TargetRules.parse("127.0.0.0/8,::1"))
    assert {answer["host"] for answer in await lookup.resolve("localhost", 80)} <= {"127.0.0.1", "::1"}
    refusing = CheckedLookup(TargetRules.parse("10.0.0.0/8"))
    with pytest.raises(TargetRefused):
        await refusing.resolve("localhost", 80)
    await lookup.close()
    await refusing.close()


async def test_closing_closes_the_resolver() -> None:
    table = Table({})
    await CheckedLookup(TargetRules(), table).close()
    assert table.closed


@pytest.mark.parametrize("error", [OSError("x"), aiohttp.ClientError("x"), ValueError("x"), TimeoutError()])
def test_other_errors_are_no_refusals(error: Exception) -> None:
    assert refusal_of(error) is None


def test_a_refusal_is_itself() -> None:
    refusal = TargetRefused("no")
    assert refusal_of(refusal) is refusal
