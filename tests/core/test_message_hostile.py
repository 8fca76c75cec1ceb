"""Deep or long messages, or long numbers, are carried or refused at low cost."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_server.core.message import (
    MAX_DEPTH,
    MalformedMessage,
    Message,
    parse_json,
    parse_object,
)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 2_000, 100_000])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a": ', "}"), ("[", ""), ('{"]": "]", "a": ', "}")])
def test_deep_nesting_is_malformed(depth: int, opens: str, closes: str) -> None:
    with pytest.raises(MalformedMessage):
        Message.parse('{"role": "user", "content": ' + opens * depth + "1" + closes * depth + "}")


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"[": "[", "a": ', "}")])
def test_nesting_up_to_the_limit_is_carried_however_deep_the_caller_is(opens: str, closes: str) -> None:
    text = '{"role": "user", "content": ' + opens * (MAX_DEPTH - 1) + "1" + closes * (MAX_DEPTH - 1) + "}"

    def parse_below(frames: int) -> Message:
        return Message.parse(text) if frames == 0 else parse_below(frames - 1)

    assert parse_below(300).text == text


@pytest.mark.parametrize("content", ['"' + "[" * 1_000 + '"', "[" + "[], " * 1_000 + "1]", '"\\"' + "{" * 1_000 + '"'])
def test_brackets_that_are_many_but_not_deep_are_carried(content: str) -> None:
    text = '{"role": "user", "content": ' + content + "}"
    assert Message.parse(text).text == text


@pytest.mark.parametrize("digits", ["9" * 4_300, "9" * 5_000, "-" + "9" * 5_000, "[" + "9" * 5_000 + "]"])
def test_integers_of_any_size_are_carried(digits: str) -> None:
    text = '{"role": "user", "n": ' + digits + "}"
    assert Message.parse(text) == Message(text, "user")


def test_integers_that_python_does_not_convert_read_as_infinite() -> None:
    nines = "9" * 5_000
    assert parse_object(f'{{"a": {nines}, "b": -{nines}}}') == {"a": math.inf, "b": -math.inf}
    assert parse_object(f'{{"a": {nines[:4_300]}}}') == {"a": int(nines[:4_300])}
    with pytest.raises(MalformedMessage):
        parse_json("9" * 5_000)


MANY_BRACKETS = '{"role": "user", "x": [' + "[], " * 300 + "1], "
HOSTILE = {
    "an open string of quotes": MANY_BRACKETS + '"' + '\\"' * 200_000,
    "a long string": MANY_BRACKETS + '"content": "' + "a" * 8_000_000 + '"}',
    "brackets in strings": MANY_BRACKETS + '"content": "' + "[" * 4_000_000 + '"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_costs_little(name: str, tmp_path: Path) -> None:
    """At most 5 s of one core and 512 MiB for the interpreter; normally a fraction of a second and 200 MiB suffice."""
    (tmp_path / "message").write_text(HOSTILE[name], encoding="utf-8")
    program = f"""
import contextlib, resource
from pathlib import Path
from rollout_server.core.message import MalformedMessage, Message
text = Path({str(tmp_path / "message")!r}).read_text(encoding="utf-8")
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
with contextlib.suppress(MalformedMessage):
    Message.parse(text)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
