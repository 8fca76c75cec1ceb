"""Training samples computed with plain lists from a trainer's prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from osmosis.rollout.v1 import token_pb2


@dataclass(slots=True)
class Record:
    """A stretch in which every prompt starts with the previous prompt and its completion."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def holds(self) -> list[int]:
        """All of its tokens."""
        return self.prompt + self.response

    def settled(self) -> Record:
        """Tokens up to the last one of the model, which ends the trajectory."""
        end = max((index + 1 for index, bit in enumerate(self.mask) if bit), default=0)
        return Record(self.prompt, self.response[:end], self.mask[:end], self.logprobs[:end])

    def add(self, tokens: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        """Append tokens of one author."""
        self.response += tokens
        self.mask += [mask] * len(tokens)
        self.logprobs += logprobs


def records(turns: Sequence[tuple[list[int], list[int], list[float]]]) -> list[Record]:
    """Samples of turns; a turn is a prompt, a completion and its logprobs."""
    found: list[Record] = []
    for prompt, answer, logprobs in turns:
        held = found[-1].holds() if found else []
        if not found or prompt[: len(held)] != held:
            found.append(Record(prompt))
        else:
            added = prompt[len(held) :]
            found[-1].add(added, 0, [0.0] * len(added))
        found[-1].add(answer, 1, logprobs)
    return [record.settled() for record in found]


def assert_samples(samples: Sequence[token_pb2.Sample], expected: Sequence[Record]) -> None:
    """Compare element by element, segment by segment."""
    assert len(samples) == len(expected)
    for sample, record in zip(samples, expected, strict=True):
        assert list(sample.prompt_ids) == record.prompt
        assert list(sample.response_ids) == record.response
        assert list(sample.response_mask) == record.mask
        assert list(sample.logprobs.values) == record.logprobs


def assert_segments(segments: Sequence[token_pb2.Segment], expected: Sequence[Record]) -> None:
    """Assert that concatenated spans equal the sample, and that each span has the expected author."""
    assert len(segments) == len(expected)
    for segment, record in zip(segments, expected, strict=True):
        assert segment.verified
        ids = [token for span in segment.spans for token in span.token_ids]
        models = [span.author == token_pb2.AUTHOR_MODEL for span in segment.spans for _ in span.token_ids]
        assert ids == record.holds()
        assert models == [False] * len(record.prompt) + [bool(bit) for bit in record.mask]
        turns = [span.turn for span in segment.spans]
        assert turns == sorted(turns)
