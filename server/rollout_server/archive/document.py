"""One HTML file with rollouts, as a gateway shows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import httpx
import msgspec
from rollout_gateway.page.standalone import standalone_document

from rollout_server.archive.archive import Unreadable

MOST_BYTES: Final = 128 << 20
"""Size of the rollouts in a document. Browsers take seconds to open a larger one."""
_TEXTS: Final = 4096
_PAGE: Final = 1000


async def document_of(
    client: httpx.AsyncClient, uids: Sequence[str] = (), report: Callable[[str], None] = print
) -> tuple[bytes, int]:
    """Return the document with rollouts of a gateway, and their number.

    Args:
        client: a client with the gateway's URL as base.
        uids: uids of the rollouts; none: all that can be read, newest first.
        report: receives the reason why a rollout is left out.

    Raises:
        Unreadable: the gateway refuses or cannot be reached, or the rollouts are more than `MOST_BYTES`.
    """
    found: list[bytes] = []
    size = 0
    try:
        async for uid in _listed(client, uids):
            try:
                found.append(await _saved(client, uid))
            except Unreadable as error:
                if uids:
                    raise
                report(f"left out: {error}")
                continue
            size += len(found[-1])
            if size > MOST_BYTES:
                text = f"more than {MOST_BYTES >> 20} MiB, which browsers cannot open well"
                raise Unreadable(f"the document would have {text}: choose rollouts with --uid")
    except httpx.HTTPError as error:
        raise Unreadable(f"{client.base_url} cannot be reached: {error or type(error).__name__}") from None
    return standalone_document(b'{"rollouts":[' + b",".join(found) + b"]}"), len(found)


async def _listed(client: httpx.AsyncClient, uids: Sequence[str]) -> AsyncIterator[str]:
    """Yield the uids of the rollouts to write."""
    for uid in uids:
        yield uid
    token = None if uids else ""
    while token is not None:
        page = msgspec.json.decode(await _get(client, "v1/rollouts", page_size=_PAGE, page_token=token))
        for each in page["rollouts"]:
            yield each["uid"]
        token = page["next_page_token"] or None


async def _saved(client: httpx.AsyncClient, uid: str) -> bytes:
    """Return the JSON of a rollout with its events so far, and the texts of its tokens if there is a tokenizer."""
    text = await _get(client, f"v1/rollouts/{uid}", view="full")
    rollout = msgspec.json.decode(text)
    events = [each async for each in _events(client, uid, rollout["last_sequence"])]
    texts = {}
    for segment, length in _lengths(rollout, events).items():
        if (written := await _texts(client, uid, segment, length)) is not None:
            texts[segment] = written
    return msgspec.json.encode({"rollout": msgspec.Raw(text), "events": [*map(msgspec.Raw, events)], "texts": texts})


async def _events(client: httpx.AsyncClient, uid: str, last: int) -> AsyncIterator[bytes]:
    """Yield the JSON of the events up to a sequence number: the stream of a running rollout does not end."""
    if not last:
        return
    async with client.stream("GET", f"v1/rollouts/{uid}/events", params={"detail": "full"}) as response:
        await _check(response)
        sequence = 0
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                sequence = int(value)
            elif name == "data":
                yield value.encode()
            elif not line and sequence >= last:
                return


def _lengths(rollout: dict[str, Any], events: Sequence[bytes]) -> dict[str, int]:
    """Return the numbers of tokens by segment, of a rollout that has not finished by its events."""
    lengths: dict[str, int] = {}
    if rollout["outcome"] is not None:
        segments = rollout["outcome"]["segments"]
        return {each["id"]: sum(len(span["token_ids"]) for span in each["spans"]) for each in segments}
    opened: dict[int, str] = {}
    for event in map(msgspec.json.decode, events):
        if event["event"] == "segment_opened":
            opened[event["turn"]] = event["segment_id"]
        for span in event.get("spans", ()):
            name = opened.get(event["turn"], event["segment_id"])
            lengths[name] = lengths.get(name, 0) + len(span["token_ids"])
    return lengths


async def _texts(client: httpx.AsyncClient, uid: str, segment: str, length: int) -> list[msgspec.Raw] | None:
    """Return the texts of a segment's tokens; None if there is no tokenizer for them."""
    found: list[msgspec.Raw] = []
    for start in range(0, length, _TEXTS):
        path = f"v1/rollouts/{uid}/segments/{segment}/tokens"
        response = await client.get(path, params={"start": start, "stop": min(length, start + _TEXTS)})
        if response.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND):
            return None
        await _check(response)
        found += msgspec.json.decode(response.content, type=_Texts).texts
    return found


class _Texts(msgspec.Struct):
    texts: list[msgspec.Raw]


async def _get(client: httpx.AsyncClient, path: str, **parameters: str | int) -> bytes:
    response = await client.get(path, params={name: value for name, value in parameters.items() if value != ""})
    await _check(response)
    return response.content


async def _check(response: httpx.Response) -> None:
    """Raise `Unreadable` with the gateway's own text for an error."""
    if response.is_success:
        return
    try:
        text = msgspec.json.decode(await response.aread())["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        text = f"{response.status_code} {response.reason_phrase}"
    hint = "; set ROLLOUT_API_KEY to your API key" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    raise Unreadable(f"{response.url.copy_with(query=None)}: {text}{hint}")
