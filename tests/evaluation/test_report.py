"""The HTML report: one file without network access or scripts; texts of models are escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from rollout_server.authoring.rollout_result import Times, Tokens
from rollout_server.evaluation.report import MOST_TRANSCRIPTS, report
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
    return report({"agent": HOSTILE, "endpoint": {"name": HOSTILE}}, summary_of(results, 1.0, labels), results)


def test_hostile_texts_are_texts() -> None:
    page = made([hostile(1), hostile(2, end="stop", reason="stop")])
    tags = read(page)
    assert {tag for tag, _ in tags.seen}.isdisjoint({"script", "img", "link", "iframe", "object", "form", "base"})
    assert not any(name.startswith("on") for _, attributes in tags.seen for name in attributes)
    assert "49" not in re.sub(r"[\d.]*49[\d.]+", "", tags.text)
    assert "{{ 7 * 7 }}" in tags.text
    assert not set("\x1b\u202e\x00") & set(page)
    assert "␛[2J⟨U+202E⟩" in tags.text


def test_it_needs_no_network_and_is_told_to_have_none() -> None:
    tags = read(made([hostile(1)]))
    assert not any({"src", "href", "srcset", "action"} & set(attributes) for _, attributes in tags.seen)
    [policy] = [attributes["content"] for tag, attributes in tags.seen if attributes.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_plots_can_be_read_without_seeing_them() -> None:
    results = [hostile(row, end="stop", reason="stop", reward=row / 20) for row in range(1, 21)]
    tags = read(made(results))
    plots = [attributes for tag, attributes in tags.seen if tag == "svg"]
    assert len(plots) >= 4
    assert all(plot["role"] == "img" and ":" in str(plot["aria-label"]) for plot in plots)
    [reward] = [str(plot["aria-label"]) for plot in plots if str(plot["aria-label"]).startswith("Reward")]
    counts = [int(number) for number in re.findall(r" (\d+)(?:, |$)", reward)]
    assert sum(counts) == 20


def test_what_did_not_pass_does_not_look_as_if_it_had() -> None:
    ends: list[dict[str, Any]] = [{"reward": 1.0}, {"reward": 0.5}, {"reward": None}]
    results = [hostile(row, end="stop", reason="stop", **each) for row, each in enumerate(ends, 1)]
    tags = read(made([*results, hostile(4)]))
    marks = [
        str(attributes["class"]).split() for tag, attributes in tags.seen if tag == "span" and "class" in attributes
    ]
    assert [mark for mark in marks if mark != ["dim"]] == [["failed"], ["not-passed"], ["no-reward"], ["passed"]]


def test_what_a_rollout_came_to_reads_as_a_sentence() -> None:
    tokens = Tokens(1, 2, 1)
    results = [
        RowResult("a", end="stop", reason="stop", reward=1.0, turns=1, tokens=tokens, ms=Times(10.0), row=1),
        RowResult("a", end="stop", reason="stop", reward=None, turns=2, tokens=Tokens(), ms=Times(10.0), row=2),
    ]
    text = " ".join(read(made(results)).text.split())
    assert f"row 1, rollout 1: passed, reward 1, stop, 1 turn, {tokens.generated} token" in text
    assert "row 2, rollout 1: no reward, stop, 2 turns, 0 tokens, 0.01 s" in text


def test_a_rollout_shows_its_row_and_its_scores() -> None:
    fields: dict[str, Any] = {
        "ground_truth": 42,
        "metadata": {"level": "hard", "info": {"a": [1]}},
        "scores": {"style": 0.25},
        "warnings": [],
    }
    [refused] = [
        hostile(1, end="refused", messages=[], prompt=[{"role": "user", "content": "What is 6 * 7?"}], **fields)
    ]
    text = " ".join(read(made([refused])).words)
    assert 'score style 0.25 ground truth 42 level hard info {"a": [1]} user What is 6 * 7?' in text


def test_every_score_has_its_error_and_failures_come_first() -> None:
    scored: list[dict[str, Any]] = [{"scores": {"style": style}, "reward": style} for style in (0.0, 0.5, 1.0)]
    passed = [hostile(row, end="stop", reason="stop", **each) for row, each in enumerate(scored, 1)]
    failures = [
        hostile(row, failure_class="engine", reason="engine_server", message="503", reward=None) for row in (4, 5)
    ]
    text = " ".join(read(made([*passed, *failures])).words)
    assert "engine engine_server 2 503" in text
    assert "reward 0.5 ± 0.29 3 style 0.5 ± 0.29 3" in text
    rows = [int(row) for row in re.findall(r"row (\d), rollout", text)]
    assert rows == [4, 5, 1, 2, 3]


def test_a_message_without_text_is_shown_as_one() -> None:
    messages = [{"role": "tool", "content": "", "tool_call_id": "c"}, {"role": "assistant", "content": None}]
    text = read(made([hostile(1, messages=messages)])).text
    assert text.count("⟨empty⟩") == 2


def luminance(colour: str) -> float:
    """Relative luminance, as defined in WCAG 2.2."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_colour_can_be_read_in_light_and_in_dark() -> None:
    schemes = [dict(re.findall(r"--(\w+): #(\w+);", block)) for block in re.findall(r":root \{(.*?)\}", made([]))]
    assert len(schemes) == 2
    for scheme in schemes:
        for name, least in {
            "ink": 4.5,
            "dim": 4.5,
            "good": 4.5,
            "bad": 4.5,
            "bar": 3.0,
        }.items():  # contrast thresholds of WCAG 1.4.3 and 1.4.11
            for behind in ("paper", "box"):
                dark, light = sorted((luminance(scheme[name]), luminance(scheme[behind])))
                assert (light + 0.05) / (dark + 0.05) >= least, (name, behind)


def test_of_very_many_rollouts_those_that_went_wrong_are_shown() -> None:
    right = [hostile(row, end="stop", reason="stop", reward=1.0, messages=[]) for row in range(1, MOST_TRANSCRIPTS + 1)]
    wrong = hostile(MOST_TRANSCRIPTS + 1)
    page = made([*right, wrong])
    assert "The results file has 1 more rollout. This page shows" in page
    assert f"row {wrong.row}, rollout 1" in page
    assert page.count("<details>\n<summary>row ") == MOST_TRANSCRIPTS


def test_a_long_text_is_cut_and_says_so() -> None:
    page = made([hostile(1, messages=[{"role": "user", "content": "x" * 50_000}])])
    assert "(30000 characters more)" in page


def test_nothing_was_played_is_a_report_too() -> None:
    assert "0 of 0" in read(made([])).text
