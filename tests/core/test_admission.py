"""Admission of rollouts: what each trainer protocol allows, and which defaults the server fills in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.core.spec_validation import HTTP_ROLES, MAX_SECONDS, Bounds, settle, violations

USER = Message.parse('{"role": "user", "content": "5 + 3?"}')
ODD = Message.parse('{"role": "critic", "content": null, "vendor": 1}')
PLAIN = Spec("r", (USER,), Target("http://trainer:8081", Dialect.HTTP_PLAIN))
MASKED = replace(
    PLAIN, completions=Target("http://trainer:8081", Dialect.HTTP_MASKED), tokenizer=TokenizerName("Qwen/Qwen3-8B")
)
GRPC = replace(PLAIN, completions=Target("grpc://trainer:50051", Dialect.GRPC))
SPECS = {"grpc": GRPC, "masked": MASKED, "plain": PLAIN}


def wrong(spec: Spec) -> dict[str, str]:
    """Violations of a spec, by field."""
    return {violation.field: violation.description for violation in violations(spec, Bounds())}


@pytest.mark.parametrize("dialect", SPECS)
def test_an_ordinary_request_of_each_dialect_is_right(dialect: str) -> None:
    assert wrong(SPECS[dialect]) == {}


class TestConversation:
    def test_only_the_asynchronous_dialect_takes_one_without_messages(self) -> None:
        empty = {name: wrong(replace(spec, messages=())) for name, spec in SPECS.items()}
        refused = {"spec.messages": "needs at least one message"}
        assert empty == {"grpc": refused, "masked": refused, "plain": {}}

    def test_only_the_synchronous_dialect_knows_which_roles_there_are(self) -> None:
        odd = {name: wrong(replace(spec, messages=(USER, ODD))) for name, spec in SPECS.items()}
        refused = {"spec.messages[1].role": f"must be one of {', '.join(HTTP_ROLES)}"}
        assert odd == {"grpc": {}, "masked": refused, "plain": {}}


MCP = Target("https://tools/mcp", Dialect.MCP)
SERVICE = Target("grpcs://tools:1", Dialect.GRPC)


class TestTools:
    @pytest.mark.parametrize("tools", [MCP, SERVICE], ids=["mcp", "service"])
    def test_the_synchronous_dialect_has_none_and_the_text_says_what_to_do(self, tools: Target) -> None:
        found = {name: wrong(replace(spec, tools=tools)) for name, spec in SPECS.items()}
        assert (found["grpc"], found["plain"], [*found["masked"]]) == ({}, {}, ["spec.tools"])
        assert "use another protocol" in found["masked"]["spec.tools"]

    @pytest.mark.parametrize("dialect", [each for each in Dialect if each not in (Dialect.MCP, Dialect.GRPC)])
    def test_they_are_of_a_tool_service_or_an_mcp_server(self, dialect: Dialect) -> None:
        assert [*wrong(replace(PLAIN, tools=Target("http://tools", dialect)))] == ["spec.tools.dialect"]

    def test_an_mcp_server_is_nothing_else(self) -> None:
        assert [*wrong(replace(PLAIN, completions=MCP))] == ["spec.completions.dialect"]
        assert [*wrong(replace(PLAIN, outcome=MCP))] == ["spec.outcome.dialect"]
        assert [*wrong(replace(PLAIN, models={"judge": replace(MCP, model="m")}))] == ["spec.models[judge].dialect"]

    def test_the_scheme_is_that_of_the_protocol(self) -> None:
        for url, dialect in (("grpc://tools", Dialect.MCP), ("http://tools", Dialect.GRPC)):
            assert [*wrong(replace(PLAIN, tools=Target(url, dialect)))] == ["spec.tools.url"]


class TestLimits:
    @pytest.mark.parametrize("name", ["turns", "generated_tokens"])
    def test_only_the_asynchronous_dialect_may_ask_for_nothing(self, name: str) -> None:
        none = {d: wrong(replace(spec, limits=Limits(**{name: 0}))) for d, spec in SPECS.items()}
        refused = {f"spec.limits.{name}": "must be at least 1"}
        assert none == {"grpc": refused, "masked": refused, "plain": {}}

    @pytest.mark.parametrize("name", ["turns", "generated_tokens"])
    @pytest.mark.parametrize("value", [-1, -(2**40)])
    def test_none_may_ask_for_less(self, name: str, value: int) -> None:
        for spec in SPECS.values():
            assert list(wrong(replace(spec, limits=Limits(**{name: value})))) == [f"spec.limits.{name}"]
        assert wrong(replace(PLAIN, limits=Limits(**{name: value}))) == {f"spec.limits.{name}": "must be at least 0"}

    @pytest.mark.parametrize("value", [1, 10**6, 2**40])
    def test_turns_have_no_upper_bound(self, value: int) -> None:
        assert wrong(replace(PLAIN, limits=Limits(turns=value))) == {}

    @pytest.mark.parametrize("name", ["calls_per_turn", "bytes"])
    def test_other_limits_of_0_are_refused_in_every_dialect(self, name: str) -> None:
        for spec in SPECS.values():
            limits = Limits(**{name: 0})
            assert wrong(replace(spec, limits=limits)) == {f"spec.limits.{name}": "must be at least 1"}

    @pytest.mark.parametrize(
        ("seconds", "right"),
        [(0.001, True), (MAX_SECONDS, True), (0, False), (-1, False), (MAX_SECONDS + 1, False), (float("nan"), False)],
    )
    def test_time_is_positive_and_finite(self, seconds: float, right: bool) -> None:
        for spec in SPECS.values():
            assert ("spec.limits.time" not in wrong(replace(spec, limits=Limits(seconds=seconds)))) is right


class TestTargets:
    def test_the_synchronous_dialect_has_no_callback_for_outcomes(self) -> None:
        for spec in SPECS.values():
            refused = wrong(replace(spec, outcome=MASKED.completions))
            assert list(refused) == ["spec.outcome.dialect"]
            assert "HTTP_PLAIN or GRPC" in refused["spec.outcome.dialect"]

    @pytest.mark.parametrize("outcome", [PLAIN.completions, GRPC.completions])
    def test_a_rollout_of_any_dialect_may_tell_a_receiver_of_another(self, outcome: Target) -> None:
        for spec in SPECS.values():
            assert wrong(replace(spec, outcome=outcome)) == {}

    @pytest.mark.parametrize("field", ["completions", "outcome", "tools"])
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "trainer:8081",
            "//trainer:8081",
            "http:trainer",
            " http://trainer",
            "grpc://hunter2@trainer:8081",
            "file:///etc/hunter2",
        ],
    )
    def test_a_url_without_a_scheme_of_its_dialect_is_named_by_its_field_and_not_repeated(
        self, field: str, url: str
    ) -> None:
        dialect = Dialect.MCP if field == "tools" else Dialect.HTTP_PLAIN
        refused = wrong(replace(PLAIN, **{field: Target(url, dialect)}))  # type: ignore[arg-type]
        assert list(refused) == [f"spec.{field}.url"]
        assert "hunter2" not in refused[f"spec.{field}.url"]

    @pytest.mark.parametrize("url", ["http://t", "https://t/prefix", "HTTP://10.0.0.1:8081", "http://[::1]:8081"])
    def test_http_urls_with_a_host_are_right(self, url: str) -> None:
        assert wrong(replace(PLAIN, completions=Target(url, Dialect.HTTP_PLAIN))) == {}


def test_only_the_synchronous_dialect_needs_a_tokenizer() -> None:
    without = {name: wrong(replace(spec, tokenizer=None)) for name, spec in SPECS.items()}
    assert {name: list(fields) for name, fields in without.items()} == {
        "grpc": [],
        "masked": ["spec.tokenizer"],
        "plain": [],
    }


def test_only_the_synchronous_dialect_bounds_the_tokens_of_one_answer() -> None:
    many = {name: list(wrong(replace(spec, sampling=Sampling(max_tokens=32_769)))) for name, spec in SPECS.items()}
    assert many == {"grpc": [], "masked": ["spec.sampling.max_tokens"], "plain": []}


def test_every_wrong_field_is_told_of() -> None:
    spec = replace(
        PLAIN,
        rollout_id="\t",
        limits=Limits(turns=-1, seconds=0),
        metadata_json="[]",
        outcome=MASKED.completions,
    )
    assert list(wrong(spec)) == [
        "spec.rollout_id",
        "spec.outcome.dialect",
        "spec.limits.turns",
        "spec.limits.time",
        "spec.metadata_json",
    ]


def test_metadata_are_measured_in_bytes_and_may_be_exactly_as_large_as_allowed() -> None:
    text = '{"a": "ü"}'
    for most, right in ((11, True), (10, False)):
        found = [v.field for v in violations(replace(PLAIN, metadata_json=text), Bounds(metadata_bytes=most))]
        assert found == ([] if right else ["spec.metadata_json"])


def test_a_limit_of_0_stays_the_lower_one() -> None:
    settled = settle(replace(PLAIN, limits=Limits(turns=0)), "agent", Limits(turns=8, generated_tokens=0), Bounds())
    assert (settled.limits.turns, settled.limits.generated_tokens) == (0, 0)


def test_the_default_time_is_the_dialects_and_the_longest_time_without_one() -> None:
    bounds = Bounds(seconds=1000, default_seconds={Dialect.HTTP_MASKED: 600, Dialect.HTTP_PLAIN: 5000})
    seconds = [settle(spec, "agent", Limits(), bounds).limits.seconds for spec in SPECS.values()]
    assert seconds == [1000, 600, 1000]
