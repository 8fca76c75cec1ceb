"""Equal payloads have equal fingerprints; different payloads have different ones."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core import fingerprint as fingerprints
from rollout_server.core.fingerprint import VERSION, is_same_payload
from rollout_server.core.limits import Limits
from rollout_server.core.message import MalformedMessage, Message
from rollout_server.core.outcome import FailureClass
from rollout_server.core.spec import Dialect, DriftPolicy, Sampling, Spec, StaleAction, Staleness, Target, TokenizerName

USER = Message.parse('{"role": "user", "content": "5 + 3?"}')
SYSTEM = Message.parse('{"role": "system", "content": "Be brief."}')
PLAIN = Spec("r1", (USER,), Target("http://t", Dialect.HTTP_MASKED))
FULL = Spec(
    rollout_id="r1",
    messages=(SYSTEM, USER),
    completions=Target("http://t", Dialect.HTTP_MASKED),
    group_id="g",
    agent="calculator",
    typed=False,
    outcome=Target("http://o", Dialect.HTTP_PLAIN),
    tools=Target("grpc://x", Dialect.GRPC),
    sampling=Sampling(0.5, 0.9, 16, ("a", "b"), True, '{"k": [1, {"x": 2, "y": 3}]}'),
    limits=Limits(1, 2, 3.0, 4, 5, 6),
    tokenizer=TokenizerName("Qwen/Qwen3-8B", "main", '{"enable_thinking": false, "x": 1}'),
    on_drift=DriftPolicy.WARN,
    on_interrupt=1,
    token_mode=1,
    cancel_after_detach=10.0,
    priority=1,
    metadata_json='{"a": {"b": 1, "c": 2}, "d": null}',
    labels={"team": "x", "run": "y"},
)
ASYNCHRONOUS = replace(FULL, completions=Target("http://t", Dialect.HTTP_PLAIN))


def fingerprint(spec: Spec) -> str:
    """The fingerprint of a spec that leaves nothing open."""
    return fingerprints.fingerprint(spec, spec)


# For each field in a spec, other values that must change the fingerprint.
OTHERS: dict[str, list[object]] = {
    "rollout_id": ["r2", "R1", " r1", "r1\u0000"],
    "messages": [(USER,), (USER, SYSTEM), (SYSTEM, USER, USER), ()],
    "completions.url": ["http://u", "http://t/v1"],
    "completions.dialect": [Dialect.HTTP_PLAIN, Dialect.GRPC],
    "completions.replays_turn_keys": [True],
    "completions.model": ["m", "M"],
    "group_id": ["", "h"],
    "agent": ["", "other"],
    "typed": [True],
    "outcome": [None],
    "outcome.url": ["http://p"],
    "outcome.dialect": [Dialect.GRPC],
    "outcome.replays_turn_keys": [True],
    "outcome.model": ["m"],
    "tools": [None],
    "tools.url": ["grpc://y"],
    "tools.dialect": [Dialect.HTTP_PLAIN],
    "tools.replays_turn_keys": [True],
    "tools.model": ["m"],
    "sampling.temperature": [None, 0.0, 0.9, 0.5000000000000001],
    "sampling.top_p": [None, 0.0, 0.5],
    "sampling.max_tokens": [None, 0, 17],
    "sampling.stop": [(), ("a",), ("b", "a"), ("ab",), ("a", "b", "")],
    "sampling.logprobs": [None, False],
    "sampling.extra_json": ["", "{}", '{"k": [{"x": 2, "y": 3}, 1]}', '{"k": [1, {"x": 2, "y": "3"}]}'],
    "limits.turns": [None, 0, 2],
    "limits.generated_tokens": [None, 0, 1],
    "limits.seconds": [None, 0.5, 3.5],
    "limits.calls_per_turn": [None, 0, 5],
    "limits.tool_turns": [None, 0, 6],
    "limits.bytes": [None, 0, 7],
    "tokenizer": [None],
    "tokenizer.name": ["", "Qwen/Qwen3-4B"],
    "tokenizer.revision": ["", "v2"],
    "tokenizer.template_kwargs_json": ["", "{}", '{"enable_thinking": true, "x": 1}', '{"enable_thinking": 0, "x": 1}'],
    "on_drift": [None, DriftPolicy.FAIL],
    "on_interrupt": [0, 2],
    "token_mode": [0, 2],
    "priority": [0, -1],
    "group_index": [0, 1],
    "metadata_json": [
        "",
        "{}",
        '{"a": {"b": 1, "c": 2}}',
        '{"a": {"b": 1, "c": 2.5}, "d": null}',
        '{"a": {"b": 1}, "c": 2, "d": null}',
    ],
    "train_on": [frozenset(), frozenset({FailureClass.POLICY}), frozenset(FailureClass)],
    "models": [
        {"judge": Target("http://j", Dialect.OPENAI, model="m")},
        {"user": Target("http://j", Dialect.OPENAI, model="m")},
        {"judge": Target("http://j", Dialect.VLLM, model="m")},
        {"judge": Target("http://j", Dialect.OPENAI, model="n")},
    ],
    "staleness": [
        Staleness(0),
        Staleness(1),
        Staleness(1, StaleAction.CANCEL),
        Staleness(1, StaleAction.MASK),
        Staleness(1, StaleAction.SPLIT),
    ],
    "labels": [{}, {"team": "x"}, {"team": "y", "run": "x"}, {"team": "x", "run": "y", "z": ""}],
}
WITHOUT_EFFECT = {"cancel_after_detach", "source_json"}


def changed(spec: Spec, path: str, value: object) -> Spec:
    name, _, rest = path.partition(".")
    return replace(spec, **{name: replace(getattr(spec, name), **{rest: value}) if rest else value})  # type: ignore[arg-type]


def paths(value: object, prefix: str = "") -> set[str]:
    """The fields of a spec, including nested ones."""
    found: set[str] = set()
    assert is_dataclass(value)
    for field in fields(value):
        inner, path = getattr(value, field.name), prefix + field.name
        found |= paths(inner, path + ".") if is_dataclass(inner) else {path}
    return found


def test_every_field_of_a_spec_is_among_those_tried() -> None:
    assert paths(FULL) <= set(OTHERS) | WITHOUT_EFFECT


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in OTHERS.items() for value in values])
def test_another_value_in_any_field_is_another_fingerprint(path: str, value: object) -> None:
    other = changed(FULL, path, value)
    assert other != FULL
    assert fingerprint(other) != fingerprint(FULL)


def test_all_these_are_different_from_each_other() -> None:
    others = [changed(FULL, path, value) for path, values in OTHERS.items() for value in values]
    assert len({fingerprint(spec) for spec in (FULL, *others)}) == len(others) + 1


@pytest.mark.parametrize("value", [None, 0.0, 5.0])
def test_what_only_concerns_the_waiting_is_left_out(value: float | None) -> None:
    assert fingerprint(replace(FULL, cancel_after_detach=value)) == fingerprint(FULL)


def test_what_repeats_the_rest_is_left_out() -> None:
    assert fingerprint(replace(FULL, source_json='{"idempotency_key": "another"}')) == fingerprint(FULL)


@pytest.mark.parametrize("rollout_id", OTHERS["rollout_id"])
def test_in_the_asynchronous_dialect_the_rollout_id_is_left_out(rollout_id: str) -> None:
    assert fingerprint(replace(ASYNCHRONOUS, rollout_id=rollout_id)) == fingerprint(ASYNCHRONOUS)


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in OTHERS.items() for value in values if path != "rollout_id"]
)
def test_in_the_asynchronous_dialect_every_other_field_counts(path: str, value: object) -> None:
    other = changed(ASYNCHRONOUS, path, value)
    assert (fingerprint(other) == fingerprint(ASYNCHRONOUS)) is (other == ASYNCHRONOUS)


def test_targets_are_not_mistaken_for_each_other() -> None:
    target = Target("http://o", Dialect.GRPC)
    specs = [PLAIN, replace(PLAIN, outcome=target), replace(PLAIN, tools=target)]
    assert len({fingerprint(spec) for spec in specs}) == 3


def test_it_is_two_sha_256_with_a_version() -> None:
    assert re.fullmatch(rf"{VERSION}(:[0-9a-f]{{64}}){{2}}", fingerprint(FULL))


DIGESTS = (
    (PLAIN, "e4615bd171e5ecc47f5d0d7490eac2f9e1e3c16e89993d89bf348f0e0eaa5a5a"),
    (FULL, "17e101de558aac4f57b5b5486dc2881ad6174935b859e8ee29f36b662d43d2c2"),
    (ASYNCHRONOUS, "ef9c892012fbc76f9d490318a7ccd5c4b5d03686f0448833cac754b699fa1081"),
)


def test_it_stays_the_same_from_release_to_release() -> None:
    """Journals store fingerprints. A change of these values requires a new VERSION."""
    for requested, digest in DIGESTS:
        for settled, other in DIGESTS:
            assert fingerprints.fingerprint(requested, settled) == f"3:{digest}:{other}"


def test_a_payload_is_the_same_as_it_was_sent_or_with_the_defaults() -> None:
    open_, stated = replace(PLAIN, limits=Limits()), replace(PLAIN, limits=Limits(turns=8))
    settled = [replace(PLAIN, limits=Limits(turns=turns)) for turns in (8, 9)]
    known = fingerprints.fingerprint(open_, settled[0])
    assert is_same_payload(known, fingerprints.fingerprint(open_, settled[1]))
    assert is_same_payload(known, fingerprints.fingerprint(stated, settled[0]))
    assert not is_same_payload(known, fingerprints.fingerprint(settled[1], settled[1]))
    assert not is_same_payload(known, fingerprints.fingerprint(settled[0], settled[1]))


def test_fingerprints_of_version_2_have_only_the_defaults() -> None:
    for spec, digest in DIGESTS:
        for other, _ in DIGESTS:
            assert is_same_payload(f"2:{digest}", fingerprints.fingerprint(PLAIN, other)) is (spec is other)
            assert is_same_payload(f"2:{digest}", fingerprints.fingerprint(spec, other)) is (spec is other)


def rewritten(text: str) -> str:
    """The same JSON with other white space and escapes, and reversed keys."""
    if not text:
        return text

    def turned(value: object) -> object:
        if isinstance(value, dict):
            return {key: turned(inner) for key, inner in reversed(value.items())}
        return [turned(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(turned(json.loads(text)), indent=1, ensure_ascii=True)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=3), values, max_size=4)


@given(objects, objects, objects, objects)
def test_how_json_is_written_does_not_matter(
    extra: dict[str, object], kwargs: dict[str, object], metadata: dict[str, object], fields: dict[str, object]
) -> None:
    texts = [json.dumps(each, ensure_ascii=False) for each in (extra, kwargs, metadata)]
    message = json.dumps({"role": "user", **fields, "content": "ü"}, ensure_ascii=False)

    def spec(texts: list[str], message: str) -> Spec:
        return replace(
            FULL,
            messages=(Message(message, "user"),),
            sampling=replace(FULL.sampling, extra_json=texts[0]),
            tokenizer=TokenizerName("n", "", texts[1]),
            metadata_json=texts[2],
        )

    assert fingerprint(spec(texts, message)) == fingerprint(spec([rewritten(t) for t in texts], rewritten(message)))


@given(objects, objects)
def test_what_json_says_does(a: dict[str, object], b: dict[str, object]) -> None:
    left, right = (fingerprint(replace(PLAIN, metadata_json=json.dumps(each))) for each in (a, b))
    assert (left == right) is (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


def test_labels_have_no_order() -> None:
    assert fingerprint(replace(FULL, labels={"run": "y", "team": "x"})) == fingerprint(FULL)


@pytest.mark.parametrize("text", ["{", "nonsense", "[" * 100_000, "[]", "null", "1", '{"a": NaN}'])
def test_what_is_no_json_object_is_malformed(text: str) -> None:
    with pytest.raises(MalformedMessage):
        fingerprint(replace(PLAIN, metadata_json=text))


def test_half_a_surrogate_pair_has_a_fingerprint() -> None:
    assert fingerprint(replace(PLAIN, rollout_id="\ud800")) != fingerprint(replace(PLAIN, rollout_id="\ud801"))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (replace(PLAIN, limits=Limits(seconds=5)), replace(PLAIN, limits=Limits(seconds=5.0))),
        (replace(PLAIN, sampling=Sampling(temperature=1)), replace(PLAIN, sampling=Sampling(temperature=1.0))),
    ],
)
def test_equal_specs_have_equal_fingerprints(a: Spec, b: Spec) -> None:
    assert a == b
    assert fingerprint(a) == fingerprint(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1e400", "1e500"),
        ("1" + "0" * 5_000, "2" + "0" * 5_000),
        ("1e400", "1" + "0" * 5_000),
        ("0.1", "0.10000000000000000001"),
        ("1", '"1"'),
        ("1", '["number", "1"]'),
    ],
)
def test_what_messages_carry_verbatim_is_told_apart(a: str, b: str) -> None:
    left, right = (Message.parse(f'{{"role": "user", "n": {value}}}') for value in (a, b))
    assert fingerprint(replace(PLAIN, messages=(left,))) != fingerprint(replace(PLAIN, messages=(right,)))
