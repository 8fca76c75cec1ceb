"""The fingerprint of a start request, by which a repeated request is recognized (D5)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache

from rollout_server.core.message import JSON, MalformedMessage, json_decoder, parse_json
from rollout_server.core.spec import Dialect, Spec, Target

VERSION = "3"
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


def fingerprint(requested: Spec, settled: Spec) -> str:
    """Return "3:REQUESTED:SETTLED", with the SHA-256, in hexadecimal, of a normalised spec without and with the server's defaults.

    JSON is compared by value: order of keys and white space do not matter. The fingerprint leaves out credentials and tracing,
    which are not in a spec, `cancel_after_detach`, which does not change the rollout, and `source_json`, which repeats other
    fields. For the asynchronous HTTP API it also leaves out the rollout id: there, a repeated idempotency key finds its rollout
    under any rollout id (docs/design.md, B).
    """
    parsed = cache(_json)  # both specs have the same texts
    digests = (hashlib.sha256(_encode(_canonical_spec(spec, parsed)).encode("ascii")) for spec in (requested, settled))
    return ":".join((VERSION, *(digest.hexdigest() for digest in digests)))


def is_same_payload(first: str, second: str) -> bool:
    """Return whether the requests of two fingerprints have the same payload: as they were sent, or with the server's defaults.

    A repeated request stays the same if the server restarts with other defaults. A request that states a default is the same as
    one that leaves it open. Journals may have fingerprints of version 2, "2:SETTLED".
    """
    first_requested, _, first_settled = first.rpartition(":")
    second_requested, _, second_settled = second.rpartition(":")
    return first_settled == second_settled or (":" in first_requested and first_requested == second_requested)


def _canonical_spec(spec: Spec, parsed: Callable[[str], JSON]) -> JSON:
    limits, sampling, tokenizer = spec.limits, spec.sampling, spec.tokenizer
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
        "messages": [parsed(message.text) for message in spec.messages],
        "targets": [_target(t) for t in (spec.completions, spec.outcome, spec.tools)],
        "sampling": [
            _number(sampling.temperature),
            _number(sampling.top_p),
            sampling.max_tokens,
            list(sampling.stop),
            sampling.logprobs,
            parsed(sampling.extra_json),
        ],
        "limits": [
            limits.turns,
            limits.generated_tokens,
            _number(limits.seconds),
            limits.calls_per_turn,
            limits.tool_turns,
            limits.bytes,
        ],
        "tokenizer": None
        if tokenizer is None
        else [tokenizer.name, tokenizer.revision, parsed(tokenizer.template_kwargs_json)],
        "modes": [spec.typed, spec.on_drift and spec.on_drift.value, spec.on_interrupt, spec.token_mode, spec.priority],
        "metadata": parsed(spec.metadata_json),
        "labels": dict(spec.labels),
        **({"models": models} if models else {}),
    }


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
