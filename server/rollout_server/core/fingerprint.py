"""The fingerprint of a start request, by which a repeated request is recognized (D5)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache

from rollout_server.core.message import JSON, MalformedMessage, Message, json_decoder, parse_json
from rollout_server.core.spec import Dialect, Spec, Target

VERSION = "3"
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


def fingerprint(requested: Spec, settled: Spec, encoder: SpecEncoder | None = None) -> str:
    """Return "3:REQUESTED:SETTLED", with the SHA-256, in hexadecimal, of a normalised spec without and with the server's defaults.

    JSON is compared by value: order of keys and white space do not matter. The fingerprint leaves out credentials and tracing,
    which are not in a spec, `cancel_after_detach`, which does not change the rollout, and `source_json`, which repeats other
    fields. For the asynchronous HTTP API it also leaves out the rollout id: there, a repeated idempotency key finds its rollout
    under any rollout id (docs/design.md, B).

    `encoder`: that of other specs with the same messages and metadata.
    """
    encoder = encoder or SpecEncoder()
    return ":".join((VERSION, encoder.digest(requested), encoder.digest(settled)))


def is_same_payload(first: str, second: str) -> bool:
    """Return whether the requests of two fingerprints have the same payload: as they were sent, or with the server's defaults.

    A repeated request stays the same if the server restarts with other defaults. A request that states a default is the same as
    one that leaves it open. Journals may have fingerprints of version 2, "2:SETTLED".
    """
    first_requested, _, first_settled = first.rpartition(":")
    second_requested, _, second_settled = second.rpartition(":")
    return first_settled == second_settled or (":" in first_requested and first_requested == second_requested)


class SpecEncoder:
    """Encodes specs as canonical JSON, with sorted keys. What the specs share, as those of a group do, is encoded once."""

    def __init__(self) -> None:
        self._text = cache(_encoded_text)
        self._messages: tuple[Sequence[Message], bytes] = ((), b"[]")

    def digest(self, spec: Spec) -> str:
        """Return the SHA-256 of a spec, in hexadecimal."""
        digest = hashlib.sha256()
        for number, (name, encoded) in enumerate(sorted(self._members(spec).items())):
            digest.update(b'%s"%s":' % (b"," if number else b"{", name.encode("ascii")))
            digest.update(encoded)
        digest.update(b"}")
        return digest.hexdigest()

    def _members(self, spec: Spec) -> Mapping[str, bytes]:
        sampling, tokenizer = spec.sampling, spec.tokenizer
        numbers = _number(sampling.temperature), _number(sampling.top_p), sampling.max_tokens
        options = _with_last([*numbers, list(sampling.stop), sampling.logprobs], self._text(sampling.extra_json))
        named = b"null"
        if tokenizer is not None:
            named = _with_last([tokenizer.name, tokenizer.revision], self._text(tokenizer.template_kwargs_json))
        return {
            **{name: _encoded(value) for name, value in _plain_members(spec).items()},
            "messages": self._encoded_messages(spec.messages),
            "metadata": self._text(spec.metadata_json),
            "sampling": options,
            "tokenizer": named,
        }

    def _encoded_messages(self, messages: Sequence[Message]) -> bytes:
        known, encoded = self._messages
        if known is not messages:
            encoded = b"[%s]" % b",".join(_encoded_text(message.text) for message in messages)
            self._messages = messages, encoded
        return encoded


def _plain_members(spec: Spec) -> Mapping[str, JSON]:
    """Return the members of a spec without JSON texts."""
    limits = spec.limits
    indexed: dict[str, JSON] = {} if spec.group_index is None else {"group_index": spec.group_index}
    trained = {} if spec.train_on is None else {"train_on": sorted(each.value for each in spec.train_on)}
    models = {name: _target(target) for name, target in spec.models.items()}
    aged = {} if spec.staleness is None else {"staleness": [spec.staleness.max_lag, spec.staleness.action.value]}
    return {
        **indexed,
        **trained,
        **aged,
        "rollout_id": None if spec.completions.dialect is Dialect.HTTP_PLAIN else spec.rollout_id,
        "group_id": spec.group_id,
        "agent": spec.agent,
        "targets": [_target(t) for t in (spec.completions, spec.outcome, spec.tools)],
        "limits": [
            limits.turns,
            limits.generated_tokens,
            _number(limits.seconds),
            limits.calls_per_turn,
            limits.tool_turns,
            limits.bytes,
        ],
        "modes": [spec.typed, spec.on_drift and spec.on_drift.value, spec.on_interrupt, spec.token_mode, spec.priority],
        "labels": dict(spec.labels),
        **({"models": models} if models else {}),
    }


def _encoded(value: JSON) -> bytes:
    return _encode(value).encode("ascii")


def _encoded_text(text: str) -> bytes:
    return _encoded(_json(text))


def _with_last(values: Sequence[JSON], last: bytes) -> bytes:
    """Return a JSON list of values and one that is encoded already."""
    return b"%s,%s]" % (_encoded([*values])[:-1], last)


def _number(value: float | None) -> JSON:
    """Convert to float: 5 and 5.0 mean the same in a spec."""
    return None if value is None else float(value)


def _target(target: Target | None) -> JSON:
    if target is None:
        return None
    parts: list[JSON] = [target.url, target.dialect.value, target.replays_turn_keys]
    return [*parts, target.model] if target.model else parts


def _json(text: str) -> JSON:
    if not text:
        return None
    value = parse_json(text, _AS_WRITTEN)
    if not isinstance(value, Mapping) or "object" not in value:
        raise MalformedMessage("a JSON object is needed")
    return value


def _number_as_written(number: str) -> JSON:
    """Keep a number as its text, because Python's float and int may round or refuse it.

    Objects are tagged as well (`_pairs`), so no other JSON value can equal this dictionary.
    """
    return {"number": number}


def _pairs(pairs: list[tuple[str, JSON]]) -> JSON:
    """Sort an object's pairs by key. A duplicate key stays: such an object differs from one with a single key."""
    return {"object": [list(pair) for pair in sorted(pairs, key=lambda pair: pair[0])]}


_AS_WRITTEN = json_decoder(_number_as_written, _number_as_written, _pairs)
