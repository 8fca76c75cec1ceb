"""The fingerprint of a start request, which is equal for equal payloads (D5)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from rollout_server.core.message import JSON, MalformedMessage, Message, json_decoder, parse_json
from rollout_server.core.spec import Dialect, Spec, Target, TokenizerName

VERSION = "2"


def fingerprint(spec: Spec) -> str:
    """Return a versioned SHA-256, in hexadecimal, of the normalised spec.

    JSON is compared by value: order of keys and white space do not matter. The fingerprint leaves out credentials and tracing,
    which are not in a spec, `cancel_after_detach`, which does not change the rollout, and `source_json`, which repeats other
    fields. For the asynchronous HTTP API it also leaves out the rollout id: there, a repeated idempotency key finds its rollout
    under any rollout id (docs/design.md, B).
    """
    text = json.dumps(_canonical_spec(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{VERSION}:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def _canonical_spec(spec: Spec) -> JSON:
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
        "messages": [_message(m) for m in spec.messages],
        "targets": [_target(t) for t in (spec.completions, spec.outcome, spec.tools)],
        "sampling": [
            _number(sampling.temperature),
            _number(sampling.top_p),
            sampling.max_tokens,
            list(sampling.stop),
            sampling.logprobs,
            _json(sampling.extra_json),
        ],
        "limits": [
            limits.turns,
            limits.generated_tokens,
            _number(limits.seconds),
            limits.calls_per_turn,
            limits.tool_turns,
            limits.bytes,
        ],
        "tokenizer": _tokenizer(tokenizer),
        "modes": [spec.typed, spec.on_drift and spec.on_drift.value, spec.on_interrupt, spec.token_mode, spec.priority],
        "metadata": _json(spec.metadata_json),
        "labels": dict(spec.labels),
        **({"models": models} if models else {}),
    }


def _number(value: float | None) -> JSON:
    """Convert to float: 5 and 5.0 mean the same in a spec."""
    return None if value is None else float(value)


def _message(message: Message) -> JSON:
    return _json(message.text)


def _target(target: Target | None) -> JSON:
    if target is None:
        return None
    parts: list[JSON] = [target.url, target.dialect.value, target.replays_turn_keys]
    return [*parts, target.model] if target.model else parts


def _tokenizer(name: TokenizerName | None) -> JSON:
    return None if name is None else [name.name, name.revision, _json(name.template_kwargs_json)]


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
