"""Spans as text, and the golden texts of `golden/`.

`UPDATE_GOLDEN=1` writes them anew.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan

GOLDEN = Path(__file__).parent / "golden"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID, SPAN_ID = (int(part, 16) for part in CALLER.split("-")[1:3])
VARIES = {"rollout.uid": "UID", "gen_ai.conversation.id": "UID", "server.port": "PORT", "rollout.queue_ms": "MS"}


def tree(spans: Iterable[ReadableSpan]) -> str:
    """Names, kinds, parents, attributes, events and links of spans, without ids and times. Siblings in the order of their begin."""
    children = defaultdict(list)
    ordered = sorted(spans, key=lambda span: span.start_time or 0)
    ids = {span.context.span_id for span in ordered}
    for span in ordered:
        children[span.parent.span_id if span.parent and span.parent.span_id in ids else None].append(span)
    return "\n".join(line for root in children[None] for line in _lines(root, children)) + "\n"


def check(name: str, spans: Iterable[ReadableSpan]) -> None:
    """Compare spans with a golden tree."""
    path, found = GOLDEN / f"{name}.txt", tree(spans)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def _lines(span: ReadableSpan, children: Mapping[int | None, list[ReadableSpan]], indent: str = "") -> Iterator[str]:
    failed = "" if span.status.is_ok or span.status.is_unset else " ERROR"
    yield f"{indent}{span.name} [{span.kind.name}]{failed}{_parent(span) if not indent else ''}"
    yield from (
        f"{indent}    {name} = {_shown(name, value)}" for name, value in sorted((span.attributes or {}).items())
    )
    for event in span.events:
        given = ", ".join(f"{name}={value}" for name, value in (event.attributes or {}).items())
        yield f"{indent}    * {event.name}: {given}"
    for link in span.links:
        assert (link.context.trace_id, link.context.span_id) == (TRACE_ID, SPAN_ID)
        yield f"{indent}    ~ the caller's span: {dict(link.attributes or {})}"
    for child in children[span.context.span_id]:
        yield from _lines(child, children, indent + "  ")


def _parent(span: ReadableSpan) -> str:
    if span.parent is None:
        return " of nobody"
    return (
        " of the caller" if (span.parent.trace_id, span.parent.span_id) == (TRACE_ID, SPAN_ID) else " of another span"
    )


def _shown(name: str, value: object) -> object:
    return VARIES.get(name, list(value) if isinstance(value, tuple) else value)
