"""The final callback over HTTP: which responses acknowledge, are final or are retried; all attempts are equal."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import time
from collections.abc import AsyncIterator

import pytest
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.outcome.http import HttpCourier
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.trainer.http_client import HttpClient, HttpSettings
from rollout_server.runtime.outcome_delivery import (
    DeliveryAcknowledged,
    DeliveryRefused,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)

from tests.support.http_trainer import Act, answer, closed, endless, head, raw_trainer, reset, silence

SECRET = "sk-outcome-0123456789abcdef"
BODY = '{"rollout_id": "r/1", "final_messages": ["ü", 1.10, 18446744073709551617]}'.encode()


def parcel(url: str, credential: str = "") -> PackedOutcome:
    return PackedOutcome(Target(url, Dialect.HTTP_PLAIN), "u1/outcome", BODY, credential)


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(HttpSettings(timeout=20, max_answer_bytes=2**20))
    yield client
    await client.close()


@pytest.fixture
def courier(client: HttpClient) -> HttpCourier:
    return HttpCourier(client, timeout=20)


async def met(courier: HttpCourier, *acts: Act) -> list[Receipt]:
    """The receipts of these attempts, which must be identical requests."""
    async with raw_trainer(*acts) as receiver:
        receipts = [await courier.deliver(parcel(receiver.url, SECRET)) for _ in acts]
        came = receiver.requests
    assert [each.target for each in came] == ["/v1/rollout/completed"] * len(acts)
    assert {each.body for each in came} == {BODY}
    assert {each.headers["idempotency-key"] for each in came} == {"u1/outcome"}
    assert {each.headers["authorization"] for each in came} == {f"Bearer {SECRET}"}
    assert {each.headers["content-type"] for each in came} == {"application/json"}
    return receipts


@pytest.mark.parametrize("status", [200, 201, 202, 203, 204, 205, 206, 226, 299])
async def test_any_2xx_acknowledges_whatever_it_says(courier: HttpCourier, status: int) -> None:
    body = b"" if status in (204, 205) else b"not { JSON"
    assert await met(courier, answer(body, status)) == [DeliveryAcknowledged()]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 413, 415, 422, 451, 499])
async def test_a_refusal_is_final(courier: HttpCourier, status: int) -> None:
    (receipt,) = await met(courier, answer(b'{"detail": "I do not like it"}', status, retry_after="1"))
    assert isinstance(receipt, DeliveryRefused)
    assert str(status) in receipt.text
    assert "I do not like it" in receipt.text


@pytest.mark.parametrize("status", [301, 302, 303, 304, 307, 308])
async def test_redirects_are_final_and_not_followed(courier: HttpCourier, status: int) -> None:
    async with raw_trainer() as elsewhere:
        (receipt,) = await met(courier, answer(b"", status, location=f"{elsewhere.url}/v1/rollout/completed"))
        assert elsewhere.connections == 0
    assert isinstance(receipt, DeliveryRefused)
    assert str(status) in receipt.text


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 507, 599])
async def test_what_may_pass_is_to_be_tried_again(courier: HttpCourier, status: int) -> None:
    receipts = await met(courier, answer(b"later", status), answer(b"later", status), answer(b"", 200))
    assert isinstance(receipts[0], DeliveryUnsettled)
    assert receipts[0] == receipts[1]
    assert receipts[0].retry_after is None
    assert str(status) in receipts[0].text
    assert receipts[2] == DeliveryAcknowledged()


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_passed_on(courier: HttpCourier, status: int) -> None:
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    said = ["7", "0", in_a_minute, "soon", "-1", "9" * 40]
    receipts = await met(courier, *(answer(b"", status, retry_after=each) for each in said))
    waits = [receipt.retry_after for receipt in receipts if isinstance(receipt, DeliveryUnsettled)]
    assert waits[:2] == [7.0, 0.0]
    assert waits[2] is not None
    assert 0 < waits[2] <= 60
    assert waits[3:5] == [None, None]
    assert waits[5] == 999_999_999.0


BROKEN: dict[str, Act] = {
    "reset": reset(),
    "closed": closed(),
    "half_a_head": closed(b"HTTP/1.1 20"),
    "half_a_body": closed(head(200, 100) + b"{"),
    "no_http": closed(b"220 mail.example ESMTP\r\n"),
    "endless": endless(b" " * 2**16),
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=BROKEN.keys())
async def test_a_lost_acknowledgement_is_to_be_tried_again(courier: HttpCourier, act: Act) -> None:
    first, second = await met(courier, act, answer(b"{}"))
    assert isinstance(first, DeliveryUnsettled)
    assert first.text
    assert second == DeliveryAcknowledged()


async def test_silence_has_an_end(client: HttpClient) -> None:
    """The timeout of a delivery applies, not that of a completion."""
    (receipt,) = await met(HttpCourier(client, timeout=0.3), silence())
    assert isinstance(receipt, DeliveryUnsettled)
    assert "0.3 s" in receipt.text


async def test_nobody_there_is_to_be_tried_again(courier: HttpCourier) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        receipt = await courier.deliver(parcel(f"http://127.0.0.1:{bound.getsockname()[1]}"))
    assert isinstance(receipt, DeliveryUnsettled)
    assert "could not be reached" in receipt.text


async def test_a_receiver_that_the_rules_do_not_allow_is_final_and_not_asked() -> None:
    lookup = CheckedLookup(TargetRules.parse("10.0.0.0/8"))
    client = HttpClient(HttpSettings(resolver=lookup))
    async with raw_trainer() as receiver:
        port = receiver.url.rpartition(":")[2]
        receipt = await HttpCourier(client).deliver(parcel(f"http://localhost:{port}", SECRET))
        assert receiver.connections == 0
    assert isinstance(receipt, DeliveryRefused)
    assert "ROLLOUT_TARGETS" in receipt.text
    await client.close()
    await lookup.close()


async def test_without_a_credential_no_header(courier: HttpCourier) -> None:
    async with raw_trainer() as receiver:
        await courier.deliver(parcel(receiver.url))
        assert "authorization" not in receiver.requests[0].headers


@pytest.mark.parametrize("status", [400, 401, 429, 500])
@pytest.mark.parametrize("echo", [f"no such key: {SECRET}", f'{{"headers": {{"authorization": "Bearer {SECRET}"}}}}'])
async def test_an_echo_of_the_credential_is_taken_out(courier: HttpCourier, status: int, echo: str) -> None:
    (receipt,) = await met(courier, answer((echo * 20).encode(), status))
    assert isinstance(receipt, DeliveryRefused | DeliveryUnsettled)
    assert SECRET[:14] not in receipt.text
    assert len(receipt.text) < 600


async def test_no_repr_shows_the_credential_or_the_body() -> None:
    shown = repr(parcel("http://receiver", SECRET))
    assert SECRET not in shown
    assert "final_messages" not in shown


async def test_many_at_once_wait_for_each_other_nowhere(courier: HttpCourier) -> None:
    arrived, all_there = list[int](), asyncio.Event()

    async def wait_for_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(1)
        if len(arrived) == 100:
            all_there.set()
        await all_there.wait()
        await answer(b"", 204)(reader, writer)

    async with raw_trainer(wait_for_all) as receiver:
        receipts = await asyncio.gather(*(courier.deliver(parcel(receiver.url)) for _ in range(100)))
    assert set(receipts) == {DeliveryAcknowledged()}
