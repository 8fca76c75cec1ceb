"""Random training samples as a trainer that counts tokens would write them, and files of each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.loader import LoaderSettings, read_tokenizer
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.verification.shapes import SampleShape
from rollout_server.verification.token_rules import TokenRules, token_rules
from rollout_server.verification.verify import SampleVerifier, VerifiedFiles

from tests.support.tokenizers import tokenizer_of

WORDS: Final = (
    "the",
    "sum",
    "five",
    "and",
    "three",
    "is",
    "eight",
    "multiply",
    "it",
    "by",
    "two",
    "add",
    "more",
    "please",
)
STOP, GENERATION_PROMPT = "<|im_end|>", "<|im_start|>assistant\n"


@dataclass
class Row:
    """One row. Faults are planted by changing its lists."""

    prompt: list[Any]
    response: list[Any]
    mask: list[Any]
    logprobs: Any
    uid: str = ""
    group: str = ""
    reward: Any = None
    more: dict[str, Any] = field(default_factory=dict)

    def spans(self) -> list[tuple[int, int]]:
        """Start and stop of each completion."""
        trains = [value == 1 for value in self.mask]
        edges = [i for i, (a, b) in enumerate(zip([False, *trains], [*trains, False], strict=True)) if a != b]
        return list(zip(edges[::2], edges[1::2], strict=True))


def encode(text: str) -> list[int]:
    """The ids of a text in the toy tokenizer."""
    found: list[int] = tokenizer_of(TOY_TOKENIZER).encode(text, add_special_tokens=False)
    return found


def sentence(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(2, 9))) + f" {random.randint(0, 10**9)}"


def row(random: Random, turns: int, *, uid: str = "", group: str = "", reward: float | None = None) -> Row:
    """A rollout with tool results between its completions."""
    made = Row(
        encode(f"<|im_start|>user\n{sentence(random)}{STOP}\n{GENERATION_PROMPT}"), [], [], [], uid, group, reward
    )
    for turn in range(turns):
        if turn:
            result = (
                f"\n<|im_start|>user\n<tool_response>\n{sentence(random)}\n</tool_response>{STOP}\n{GENERATION_PROMPT}"
            )
            add(made, encode(result), random, trains=False)
        add(made, encode(f"{sentence(random)}{STOP}"), random, trains=True)
    return made


def add(made: Row, ids: Sequence[int], random: Random, *, trains: bool) -> None:
    made.response += ids
    made.mask += [int(trains)] * len(ids)
    made.logprobs += [-random.uniform(0.001, 5) if trains else 0.0 for _ in ids]


def rows(random: Random, groups: int = 2, each: int = 3) -> list[Row]:
    """Groups of rollouts with different rewards, of two to four turns."""
    return [
        row(random, random.randint(2, 4), uid=f"u{g}-{n}", group=f"g{g}", reward=n / each)
        for g in range(groups)
        for n in range(each)
    ]


def generic(made: Row) -> dict[str, Any]:
    return {
        "prompt_token_ids": made.prompt,
        "completion_ids": made.response,
        "loss_mask": made.mask,
        "rollout_log_probs": made.logprobs,
        "uid": made.uid,
        "group_id": made.group,
        "reward": made.reward,
        **made.more,
    }


def verl(made: Row) -> dict[str, Any]:
    return {
        "prompt_ids": made.prompt,
        "response_ids": made.response,
        "response_mask": made.mask,
        "response_logprobs": made.logprobs,
        "reward_score": made.reward,
        "num_turns": 2 * max(1, len(made.spans())),
        "extra_fields": {"rollout_sample": {"uid": made.uid, "group_id": made.group}},
        **made.more,
    }


def ours(made: Row) -> dict[str, Any]:
    """A row of this project, as an older server without spans sends it."""
    return {
        "segment_id": "0",
        "prompt_ids": made.prompt,
        "response_ids": made.response,
        "response_mask": made.mask,
        "logprobs": made.logprobs,
        "uid": made.uid,
        "group_id": made.group,
        "reward": made.reward,
        **made.more,
    }


def lines(make: Callable[[Row], dict[str, Any]]) -> Callable[[Sequence[Row]], str]:
    return lambda made: "".join(json.dumps(make(each)) + "\n" for each in made)


def trl(made: Sequence[Row]) -> str:
    """One dictionary with all rows, over several lines."""
    columns: dict[str, Any] = {
        "prompt_ids": [each.prompt for each in made],
        "completion_ids": [each.response for each in made],
        "env_mask": [each.mask for each in made],
        "logprobs": [each.logprobs for each in made],
        "rollout_uid": [each.uid for each in made],
        "group_id": [each.group for each in made],
        "rollout_reward": [each.reward for each in made],
    }
    return json.dumps(columns, indent=1)


def trace(made: Row) -> dict[str, Any]:
    """An OpenEnv trace with a turn for each completion."""
    turns = []
    for number, (start, stop) in enumerate(made.spans()):
        prompt, completion = [*made.prompt, *made.response[:start]], made.response[start:stop]
        turns.append(
            {
                "node_id": f"n{number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": completion,
                "per_token_logps": made.logprobs[start:stop],
                "loss_mask": [0] * len(prompt) + [1] * len(completion),
            }
        )
    return {"schema_version": 1, "turns": turns}


FORMATS: Final[dict[SampleShape, Callable[[Sequence[Row]], str]]] = {
    SampleShape.ROLLOUT: lines(ours),
    SampleShape.TRL: trl,
    SampleShape.VERL: lines(verl),
    SampleShape.GENERIC: lines(generic),
}
NAMES: Final = {
    SampleShape.ROLLOUT: ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward"),
    SampleShape.TRL: ("prompt_ids", "completion_ids", "env_mask", "logprobs", "rollout_reward"),
    SampleShape.VERL: ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score"),
    SampleShape.GENERIC: ("prompt_token_ids", "completion_ids", "loss_mask", "rollout_log_probs", "reward"),
}
PARTS: Final = ("prompt", "response", "mask", "logprobs", "reward")


def field_path(shape: SampleShape, number: int, part: str) -> tuple[int, str]:
    """The line and the field of a part of a row, as findings name them."""
    name = NAMES[shape][PARTS.index(part)]
    return (1, f"{name}[{number}]") if shape is SampleShape.TRL else (number + 1, name)


def verified(path: Path, content: str | bytes, **options: Any) -> VerifiedFiles:
    """The report about a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return SampleVerifier(1000, **options).verify([path])


def codes(report: VerifiedFiles) -> dict[str, int]:
    """The number of findings by the code of their kind."""
    return {kind.code: count for kind, count in report.log.counts.items()}


def toy_rules() -> TokenRules:
    settings = LoaderSettings(directories={"toy": TOY_TOKENIZER})
    return token_rules("toy", read_tokenizer(TokenizerName("toy"), settings))
