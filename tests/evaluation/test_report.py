"""The HTML report: the page over the rollouts below a summary; one file, in which texts of models are texts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rollout_server.authoring.rollout_result import Times, Tokens
from rollout_server.evaluation.report import MOST_ROLLOUTS, report
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.summary import summary_of

HOSTILE = (
    '</pre><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}{% raw %}"\' onload="x\x1b[2J\u202e\x00'
)
VOID = {"meta", "line"}


class Tags(HTMLParser):
    """A parser that checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.words += data.split()


def hostile(row: int, **changes: Any) -> RowResult:
    call = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    fields: dict[str, Any] = {
        "end": "failure",
        "reason": HOSTILE,
        "message": HOSTILE,
        "reward": 0.5,
        "scores": {HOSTILE: 1.0},
        "tool_errors": {HOSTILE: 2},
        "tokens": Tokens(1, 2, 3),
        "ms": Times(10.0),
        "warnings": [HOSTILE],
        "failure_class": HOSTILE,
        "ground_truth": HOSTILE,
        "metadata": {HOSTILE: {HOSTILE: [HOSTILE]}},
        "messages": [
            {"role": HOSTILE, "content": HOSTILE, "reasoning_content": HOSTILE},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": [{"type": "text", "text": HOSTILE}]},
        ],
    }
    return RowResult(HOSTILE, row=row, **(fields | changes))


def read(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def made(results: list[RowResult]) -> str:
    labels = {HOSTILE: {result.row: HOSTILE for result in results}}
    facts = {"agent": HOSTILE, "endpoint": {"name": HOSTILE}}
    return report(facts, summary_of(results, 1.0, labels), results).decode()


def intro(page: str) -> str:
    """The summary, which is above the list of rollouts."""
    return page[page.index('<section id="intro">') : page.index("<main")]


def rollouts(page: str) -> list[dict[str, Any]]:
    """The rollouts in the page."""
    [data] = re.findall(r'<script type="application/json" id="rollouts">(.*)</script>', page)
    return [each["rollout"] for each in json.loads(data)["rollouts"]]


def test_hostile_texts_are_texts() -> None:
    page = made([hostile(1), hostile(2, end="stop", reason="stop")])
    tags = read(intro(page))
    assert {tag for tag, _ in tags.seen}.isdisjoint({"script", "img", "link", "iframe", "object", "form", "base"})
    assert not any(name.startswith("on") for _, attributes in tags.seen for name in attributes)
    assert "49" not in re.sub(r"[\d.]*49[\d.]+", "", tags.text)
    assert "{{ 7 * 7 }}" in tags.text
    assert not set("\x1b\u202e\x00") & set(intro(page))
    assert "␛[2J⟨U+202E⟩" in tags.text
    assert page.count("<script") == 3
    first, second = rollouts(page)
    assert first["outcome"]["messages"][0]["content"] == HOSTILE
    assert first["spec"]["labels"][HOSTILE] == json.dumps({HOSTILE: [HOSTILE]}, ensure_ascii=False)
    assert (first["outcome"]["message"], second["outcome"]["end"]) == (HOSTILE, "stop")


def test_plots_can_be_read_without_seeing_them() -> None:
    results = [hostile(row, end="stop", reason="stop", reward=row / 20) for row in range(1, 21)]
    tags = read(intro(made(results)))
    plots = [attributes for tag, attributes in tags.seen if tag == "svg"]
    assert len(plots) >= 4
    assert all(plot["role"] == "img" and ":" in str(plot["aria-label"]) for plot in plots)
    [reward] = [str(plot["aria-label"]) for plot in plots if str(plot["aria-label"]).startswith("Reward")]
    counts = [int(number) for number in re.findall(r" (\d+)(?:, |$)", reward)]
    assert sum(counts) == 20


def test_a_rollout_shows_its_row_and_its_scores() -> None:
    fields: dict[str, Any] = {
        "ground_truth": 42,
        "metadata": {"level": "hard", "info": {"a": [1]}},
        "scores": {"style": 0.25},
        "warnings": ["short: the answer is short"],
    }
    prompt = [{"role": "user", "content": "What is 6 * 7?"}]
    [refused] = rollouts(made([hostile(1, end="refused", messages=[], prompt=prompt, **fields)]))
    labels = {"ground truth": "42", "level": "hard", "info": '{"a": [1]}', "row": "1", "repetition": "1"}
    assert refused["spec"]["labels"] == labels
    assert refused["outcome"]["scores"] == {"style": 0.25}
    assert refused["outcome"]["messages"] == refused["spec"]["messages"] == prompt
    assert [each["message"] for each in refused["outcome"]["warnings"]] == ["the answer is short"]


def test_every_score_has_its_error_and_failures_come_first() -> None:
    scored: list[dict[str, Any]] = [{"scores": {"style": style}, "reward": style} for style in (0.0, 0.5, 1.0)]
    passed = [hostile(row, end="stop", reason="stop", **each) for row, each in enumerate(scored, 1)]
    failures = [
        hostile(row, failure_class="engine", reason="engine_server", message="503", reward=None) for row in (4, 5)
    ]
    page = made([*passed, *failures])
    text = " ".join(read(intro(page)).words)
    assert "engine engine_server 2 503" in text
    assert "reward 0.5 ± 0.29 3 style 0.5 ± 0.29 3" in text
    assert [each["spec"]["labels"]["row"] for each in rollouts(page)] == ["4", "5", "1", "2", "3"]


def luminance(colour: str) -> float:
    """Relative luminance, as defined in WCAG 2.2."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_colour_can_be_read_in_light_and_in_dark() -> None:
    colours = dict(re.findall(r"--(\w+): light-dark\((#\w+, #\w+)\);", made([])))
    for scheme in (0, 1):
        shade = {name: pair.split(", ")[scheme].removeprefix("#") for name, pair in colours.items()}
        # Contrast of WCAG 1.4.3 for text, and of 1.4.11 for bars.
        for name, least in {"text": 4.5, "quiet": 4.5, "good": 4.5, "bad": 4.5, "warn": 4.5, "accent": 3.0}.items():
            for behind in ("back", "raised"):
                dark, light = sorted((luminance(shade[name]), luminance(shade[behind])))
                assert (light + 0.05) / (dark + 0.05) >= least, (name, behind)


def test_of_very_many_rollouts_those_that_went_wrong_are_shown() -> None:
    right = [hostile(row, end="stop", reason="stop", reward=1.0, messages=[]) for row in range(1, MOST_ROLLOUTS + 1)]
    page = made([*right, hostile(MOST_ROLLOUTS + 1)])
    assert "The results file has 1 more rollout." in intro(page)
    shown = rollouts(page)
    assert (len(shown), shown[0]["spec"]["labels"]["row"]) == (MOST_ROLLOUTS, str(MOST_ROLLOUTS + 1))


def test_its_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.evaluation.report.MOST_BYTES", 10_000)
    page = made([hostile(row) for row in range(1, 100)])
    assert 1 < len(rollouts(page)) < 20
    assert "more rollouts." in intro(page)


def test_nothing_was_played_is_a_report_too() -> None:
    assert "0 of 0" in read(intro(made([]))).text
