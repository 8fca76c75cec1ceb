"""Scripted rollouts for the adapters of frameworks, and the rows that must come of them. It needs `tokenizers`, no framework.

A test passes `Script.generate` as the model, or calls `Script.complete` from the framework's own sampler. The script finds the
scenario in the prompt's text. It records every completion, and `Script.expected` gives the rows by position: what follows the first
prompt of a segment is the response, and a token has mask 1 exactly if it is part of a completion.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollout_client.trainer import Generated, Turn
from tokenizers import Tokenizer

ROOT: Final = Path(__file__).resolve().parents[2]
TOY: Final = ROOT / "server/rollout_server/testing/tokenizer"
"""The toy tokenizer, as a directory that transformers can load."""
TOKENIZER: Final[Tokenizer] = Tokenizer.from_file(str(TOY / "tokenizer.json"))
END: Final = int(TOKENIZER.token_to_id("<|im_end|>"))
ROLLOUTS: Final = int(os.environ.get("ADAPTER_ROLLOUTS", "80"))
"""Number of random rollouts per adapter: a multiple of 40."""
_ASSISTANT: Final = "<|im_start|>assistant\n"
_NAMED: Final = re.compile(r"Scenario (\w+) (\d+)\.")


def encode(text: str) -> list[int]:
    """Encode a text without further special tokens."""
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: Sequence[int]) -> str:
    """Decode ids, special tokens included."""
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=False)
    return text


def call(name: str, **arguments: int) -> str:
    """The text of a tool call."""
    given = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{given}}}}}\n</tool_call>'


def results(*texts: str) -> str:
    """The template's text from the stop token of a completion with tool calls to the next completion."""
    return (
        "\n<|im_start|>user"
        + "".join(f"\n<tool_response>\n{each}\n</tool_response>" for each in texts)
        + "<|im_end|>\n"
        + _ASSISTANT
    )


def follows(text: str) -> str:
    """The template's text from the stop token of a completion to the next one, with a user message between them."""
    return f"\n<|im_start|>user\n{text}<|im_end|>\n{_ASSISTANT}"


_END: Final = "<|im_end|>"
BOTH: Final = "I add and multiply.\n" + call("add", a=5, b=3) + "\n" + call("multiply", a=2, b=4)
AGAIN: Final = call("add", a=8, b=8)

Piece = tuple[int, str]


@dataclass(frozen=True)
class Scenario:
    """A scripted rollout.

    Args:
        agent: name of the agent that plays it.
        completions: texts of the completions, by the number of completions before them in their prompt; the last one repeats.
        rows: the expected responses in the order of segments, each as (mask, text) pieces. The text of a cut completion is the
            whole one here; it is cut to `max_tokens`.
        end: how the rollout ends.
        failure_class: who has to act, if it fails.
    """

    agent: str
    completions: tuple[str, ...]
    rows: tuple[tuple[Piece, ...], ...]
    end: str = "stop"
    failure_class: str = ""

    def responses(self) -> list[tuple[list[int], list[int]]]:
        """The expected responses, as ids and masks of equal length."""
        found = []
        for row in self.rows:
            pieces = [(mask, encode(text)) for mask, text in row]
            found.append(([each for _, ids in pieces for each in ids], [mask for mask, ids in pieces for _ in ids]))
        return found


TRUNCATED_TOKENS: Final = 6
SCENARIOS: Final[dict[str, Scenario]] = {
    "parallel": Scenario(
        "scenarios",
        (BOTH, AGAIN, "It is 16."),
        (
            (
                (1, BOTH + _END),
                (0, results("8", "8")),
                (1, AGAIN + _END),
                (0, results("16")),
                (1, "It is 16." + _END),
            ),
        ),
    ),
    # The client rewrites its system prompt before the second call, so its history does not extend the first one.
    "drift": Scenario("drifting", ("First.", "Second."), (((1, "First." + _END),), ((1, "Second." + _END),))),
    # A branch after the first completion, beside the second one: its prompt includes the first completion, with mask 0.
    "fork": Scenario(
        "scenarios",
        ("One.", "Two."),
        (((1, "One." + _END), (0, follows("Go on.")), (1, "Two." + _END)), ((1, "Two." + _END),)),
    ),
    "failed": Scenario(
        "scenarios", ("It breaks.",), (((1, "It breaks." + _END),),), end="failure", failure_class="environment"
    ),
    "failed_early": Scenario("scenarios", ("Never.",), (), end="failure", failure_class="environment"),
    "truncated": Scenario("scenarios", ("This completion is cut by the limit of tokens.",), ()),
    # It samples once and then sleeps until it is cancelled.
    "cancelled": Scenario(
        "scenarios", ("Waiting.",), (((1, "Waiting." + _END),),), end="cancellation", failure_class="cancelled"
    ),
}


def messages(name: str, seed: int = 0) -> list[dict[str, str]]:
    """The prompt of a scenario: one of `SCENARIOS`, or "random"."""
    return [{"role": "user", "content": f"Scenario {name} {seed}."}]


def metadata(name: str, seed: int = 0) -> dict[str, Any]:
    """The metadata of a scenario, which drive its agent."""
    return {"scenario": name, "seed": seed}


@dataclass(frozen=True)
class Sampled:
    """One completion that the script generated."""

    uid: str
    segment: str
    turn: int
    prompt_ids: tuple[int, ...] = field(repr=False)
    ids: tuple[int, ...]
    version: str


@dataclass(frozen=True)
class Row:
    """The expected ids and mask of one segment, counted from its first prompt."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]


@dataclass
class Script:
    """The scripted model. `version` is the policy version of the next completions; tests may change it between them."""

    version: str = "0"
    sampled: list[Sampled] = field(default_factory=list)

    def generate(self, turn: Turn) -> Generated:
        """Generate a turn and record it."""
        ids, finish = self.complete(turn.ids, turn.sampling.max_tokens, f"{turn.uid}/{turn.turn}")
        self.sampled.append(Sampled(turn.uid, turn.segment_id, turn.turn, tuple(turn.ids), tuple(ids), self.version))
        return Generated(ids, logprobs_of(ids, len(turn.ids)), finish, self.version)

    def complete(self, prompt_ids: Sequence[int], max_tokens: int | None, salt: str = "") -> tuple[list[int], str]:
        """Return the ids of a completion and its finish reason. `salt` distinguishes random completions of equal prompts."""
        text = decode(prompt_ids)
        found = _NAMED.search(text)
        if found is None or found[1] == "random":
            reply = _random_text(random.Random(f"{salt}/{text}"))
        else:
            lines = SCENARIOS[found[1]].completions
            reply = lines[min(text.count(_ASSISTANT), len(lines)) - 1]
        ids = [*encode(reply), END]
        return (ids, "stop") if max_tokens is None or len(ids) <= max_tokens else (ids[:max_tokens], "length")

    def expected(self, uid: str) -> dict[str, Row]:
        """The rows of a rollout by segment: every completion of the segment has mask 1, everything between them 0."""
        segments: dict[str, list[Sampled]] = {}
        for each in self.sampled:
            if each.uid == uid:
                segments.setdefault(each.segment, []).append(each)
        return {name: _row(found) for name, found in segments.items()}


def logprobs_of(ids: Sequence[int], start: int) -> list[float]:
    """The script's logprobs: a number per position in the segment that float32 holds exactly."""
    return [-(1 + (start + at) % 97) / 128 for at in range(len(ids))]


def _row(found: Sequence[Sampled]) -> Row:
    found = sorted(found, key=lambda each: each.turn)
    first, last = found[0], found[-1]
    start = len(first.prompt_ids)
    whole = [*last.prompt_ids, *last.ids]
    mask, logprobs = [0] * len(whole), [0.0] * len(whole)
    for each in found:
        begin, end = len(each.prompt_ids), len(each.prompt_ids) + len(each.ids)
        assert tuple(whole[begin:end]) == each.ids, "a later prompt of the segment has other ids than the completion"
        mask[begin:end] = [1] * len(each.ids)
        logprobs[begin:end] = logprobs_of(each.ids, begin)
    return Row(whole[:start], whole[start:], mask[start:], logprobs[start:])


def _random_text(chance: random.Random) -> str:
    """Text, tool calls, or both; also calls that are no valid ones."""
    parts = [chance.choice(("Well.", "Let me see.", "Äh, ok?", "1, 2, 3", ""))]
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        a, b = chance.randrange(10), chance.randrange(10)
        parts.append(
            chance.choice(
                (
                    call("add", a=a, b=b),
                    call("multiply", a=a, b=b),
                    call("nothing", a=a),
                    "<tool_call>\n{]\n</tool_call>",
                )
            )
        )
    return "\n".join(each for each in parts if each) or "So."
