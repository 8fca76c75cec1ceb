"""The options of a capture: errors that name the field, and patterns that cannot take exponential time."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rollout_server.core.capture.rules import AuxiliaryRule, CaptureOptions, matches, matches_name


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"history": "exact"}, 'CaptureOptions.history: \'exact\' is not possible; choose "restored" or "as_template"'),
        ({"sampling": "agent"}, "CaptureOptions.sampling: 'agent' is not possible"),
        ({"abandoned": "keep"}, "CaptureOptions.abandoned: 'keep' is not possible"),
        ({"hosted_tools": "run"}, "CaptureOptions.hosted_tools: 'run' is not possible"),
        ({"model": " "}, "CaptureOptions.model: needs 1 to 256 characters"),
        ({"model": "x" * 257}, "CaptureOptions.model: needs 1 to 256 characters"),
        ({"dropped_instructions": ["x"]}, "CaptureOptions.dropped_instructions: a tuple is needed, this is list"),
        ({"dropped_instructions": ("x",) * 65}, "CaptureOptions.dropped_instructions: at most 64 are possible"),
        ({"dropped_instructions": ("x", "(")}, "dropped_instructions[1]: '(' is not a regular expression"),
        ({"dropped_instructions": ("",)}, "dropped_instructions[0] is empty, which matches every text"),
        ({"dropped_instructions": (3,)}, "dropped_instructions[0]: a text of at most 1000 characters is needed"),
        ({"dropped_instructions": ("x" * 1001,)}, "dropped_instructions[0]: a text of at most 1000 characters"),
        ({"auxiliary": ("x",)}, "CaptureOptions.auxiliary[0]: an AuxiliaryRule is needed, this is str"),
    ],
)
def test_an_invalid_option_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        CaptureOptions(**fields)


def test_a_rule_must_name_something() -> None:
    with pytest.raises(ValueError, match="system or model must be given"):
        AuxiliaryRule(without_tools=True)
    with pytest.raises(ValueError, match=r"AuxiliaryRule\.model: '\(' is not a regular expression"):
        AuxiliaryRule(model="(")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(?:a|a)*b",
        r"(a{1,9}){1,9}$",
        r"(a+){9}",
        r"a*a*a*b",
        r".*?x.*?y.*z",
        "a?" * 9 + "a" * 9,
        r"([)]+)+",
        r"(\)+)*",
    ],
)
def test_a_pattern_that_could_take_very_long_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="could take very long"):
        CaptureOptions(dropped_instructions=(pattern,))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^x-anthropic-billing-header:",
        r"^Today is .*\.$",
        r"(?i)^(?:current|working) dir(?:ectory)?: .*",
        r"\d{4}-\d{2}-\d{2}",
        r"(?:\d++,)*+\d",
        r"[*+?{]\*\+",
        r"a++b++c++d++",
    ],
)
def test_usual_patterns_are_possible(pattern: str) -> None:
    assert CaptureOptions(dropped_instructions=(pattern,)).dropped_instructions == (pattern,)


def test_the_slowest_pattern_ends() -> None:
    """Two repetitions over 500 characters: millions of steps, not 2^500."""
    CaptureOptions(dropped_instructions=(r"a*a*b",))
    assert not matches(r"a*a*b", "a" * 100_000)


def test_only_the_start_of_a_text_is_searched() -> None:
    assert matches("x", "a" * 499 + "x")
    assert not matches("x", "a" * 500 + "x")
    assert matches_name(r"small-\d++", "small-3")
    assert not matches_name(r"small-\d++", "small-3-large")
