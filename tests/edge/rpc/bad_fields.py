"""Specs with one invalid field each: the change to a valid spec, and the field that the refusal must name."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from osmosis.rollout.v1 import message_pb2, spec_pb2

from tests.support.start_requests import chat, json_message, seconds, target

Changes: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[message_pb2.Message]
METADATA_BYTES = 1000
"""The maximum metadata size of the server under test."""

FAR = seconds(2**63 - 1)

IDENTITY: list[tuple[Changes, str]] = [
    ({"rollout_id": ""}, "spec.rollout_id"),
    ({"rollout_id": " \n\t\u2003"}, "spec.rollout_id"),
    ({"rollout_id": "x" * 257}, "spec.rollout_id"),
    ({"group_id": "x" * 257}, "spec.group_id"),
    ({"agent": "x" * 257}, "spec.agent"),
    ({"labels": {str(n): "" for n in range(65)}}, "spec.labels"),
    ({"labels": {"x" * 257: ""}}, "spec.labels"),
    ({"labels": {"x": "y" * 257}}, "spec.labels"),
]
_PLAIN: Changes = {"completions": target(dialect=spec_pb2.DIALECT_HTTP_PLAIN)}
TARGETS: list[tuple[Changes, str]] = [
    ({"completions": None}, "spec.completions"),
    *(
        ({"completions": target(url)}, "spec.completions.url")
        for url in (
            "ftp://trainer:1",
            "trainer:8081",
            "//trainer:8081",
            "http:trainer",
            "http://trainer:0",
            "http://trainer:99999",
            "http://trainer:x",
            "http://[::1",
            "http://trainer/a b",
            "http://trainer\x7f /",
            "http://trainer\n",
            "http://trainer/?secret=1",
            "http://trainer/#part",
            "http://:8081",
            "http://",
            "http:///v1",
        )
    ),
    *(
        ({**_PLAIN, "tools": target(url)}, "spec.tools.url")
        for url in ("ftp://t", "t:1", "http://t/?a=1", "grpc://n:p@t")
    ),
    *(
        ({**_PLAIN, "tools": target("http://t", dialect=dialect)}, "spec.tools.dialect")
        for dialect in (spec_pb2.DIALECT_HTTP_MASKED, spec_pb2.DIALECT_HTTP_PLAIN, spec_pb2.DIALECT_STREAM)
    ),
    ({**_PLAIN, "tools": target("grpc://t", dialect=spec_pb2.DIALECT_MCP)}, "spec.tools.url"),
    ({**_PLAIN, "tools": target("grpc://t", model="m")}, "spec.tools.model"),
    ({**_PLAIN, "outcome": target("http://t", dialect=spec_pb2.DIALECT_MCP)}, "spec.outcome.dialect"),
    ({"completions": target(dialect=spec_pb2.DIALECT_MCP)}, "spec.completions.dialect"),
    ({"tools": target()}, "spec.tools"),
]
MESSAGES: list[tuple[Messages, str]] = [
    ([], "spec.messages"),
    ([json_message(), message_pb2.Message()], "spec.messages[1]"),
    ([json_message(), chat("user", "x")], "spec.messages"),
    *(
        ([json_message(), json_message(text)], "spec.messages[1]")
        for text in (
            "",
            "[]",
            '"user"',
            "null",
            "{",
            '{"role": "user"',
            '{"role": "user"} {}',
            '{"role": "user",}',
            "{'role': 'user'}",
            "\ufeff" + '{"role": "user"}',
            "{}",
            '{"content": "x"}',
            '{"role": null}',
            '{"role": 1}',
            '{"role": ""}',
            '{"role": " "}',
            '{"role": "user", "x": NaN}',
            '{"role": "user", "x": [-Infinity]}',
            '{"role": "user", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        )
    ),
    *(
        ([json_message(), json_message(f'{{"role": "{role}"}}')], "spec.messages[1].role")
        for role in ("developer", "User", "user ")
    ),
    *(
        ([chat("user", "x"), bad], "spec.messages[1]")
        for bad in (
            chat(""),
            chat(" "),
            chat("user", message_pb2.ContentPart()),
            chat("user", message_pb2.ContentPart(blob=message_pb2.Blob(media_type="image/png"))),
            chat("user", message_pb2.ContentPart(json="[]")),
            chat("user", message_pb2.ContentPart(json='{"x": NaN}')),
            chat("user", message_pb2.ContentPart(json='{"x": 1}, {"y": 2}')),
        )
    ),
    ([chat("user", "x"), chat("narrator", "x")], "spec.messages[1].role"),
]
NUMBERS: list[tuple[Changes, str]] = [
    *(({"sampling": {"temperature": value}}, "spec.sampling.temperature") for value in (-0.1, 2.1, math.inf, math.nan)),
    *(({"sampling": {"top_p": value}}, "spec.sampling.top_p") for value in (-0.1, 1.1, -math.inf, math.nan)),
    *(({"sampling": {"max_tokens": value}}, "spec.sampling.max_tokens") for value in (0, 32_769, 2**32 - 1)),
    ({"sampling": {"stop": [str(n) for n in range(65)]}}, "spec.sampling.stop"),
    *(
        ({"limits": {name: 0}}, f"spec.limits.{name}")
        for name in ("turns", "generated_tokens", "calls_per_turn", "bytes")
    ),
    *(({"limits": {"time": value}}, "spec.limits.time") for value in (seconds(0), seconds(-0.5), seconds(-3))),
    ({"limits": {"time": FAR}}, "spec.limits.time"),
    ({"staleness": spec_pb2.Staleness(max_lag=2**63)}, "spec.staleness.max_lag"),
    *(({"cancel_after_detach": value}, "spec.cancel_after_detach") for value in (seconds(-0.25), seconds(-1), FAR)),
]
WORDS: list[tuple[Changes, str]] = [
    ({"completions": target(dialect=99)}, "spec.completions.dialect"),
    ({"outcome": target(dialect=99)}, "spec.outcome.dialect"),
    ({"on_drift": 99}, "spec.on_drift"),
    ({"on_interrupt": 99}, "spec.on_interrupt"),
    ({"token_mode": -1}, "spec.token_mode"),
    ({"staleness": spec_pb2.Staleness(max_lag=1, action=99)}, "spec.staleness.action"),  # type: ignore[arg-type]
]
OBJECTS: list[tuple[Changes, str]] = [
    ({"metadata_json": '{"x": "' + "ü" * (METADATA_BYTES // 2) + '"}'}, "spec.metadata_json"),
    *(({"metadata_json": text}, "spec.metadata_json") for text in ("[]", "1", "null", "{", '{"x": NaN}', " ")),
    *(({"sampling": {"extra_json": text}}, "spec.sampling.extra_json") for text in ("[]", "{'x': 1}")),
    ({"tokenizer": None}, "spec.tokenizer"),
    ({"tokenizer": spec_pb2.Tokenizer()}, "spec.tokenizer.name"),
    ({"tokenizer": spec_pb2.Tokenizer(name=" ")}, "spec.tokenizer.name"),
    ({"tokenizer": spec_pb2.Tokenizer(name="x" * 257)}, "spec.tokenizer.name"),
    ({"tokenizer": spec_pb2.Tokenizer(name="toy", revision="x" * 257)}, "spec.tokenizer.revision"),
    (
        {"tokenizer": spec_pb2.Tokenizer(name="toy", template_kwargs_json="[]")},
        "spec.tokenizer.template_kwargs_json",
    ),
]
