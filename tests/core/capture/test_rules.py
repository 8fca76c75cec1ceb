"""The options of a capture: errors that name the field, and where patterns are searched."""

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
        ({"dropped_instructions": ("x", "(")}, "dropped_instructions[1]: '(' is not a regular expression"),
        ({"dropped_instructions": ("",)}, "dropped_instructions[0] is empty, which matches every text"),
        ({"dropped_instructions": (3,)}, "dropped_instructions[0]: a text is needed, this is int"),
        ({"auxiliary_reply": None}, "CaptureOptions.auxiliary_reply: a text is needed, this is NoneType"),
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


def test_only_the_start_of_a_text_is_searched() -> None:
    assert matches("x", "a" * 499 + "x")
    assert not matches("x", "a" * 500 + "x")
    assert matches_name(r"small-\d+", "small-3")
    assert not matches_name(r"small-\d+", "small-3-large")
