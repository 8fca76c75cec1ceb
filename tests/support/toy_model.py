"""A scripted model that generates ids of the toy tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout_client.trainer import Generated, SamplingParams
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from tokenizers import Tokenizer

TOKENIZER: Tokenizer = Tokenizer.from_file(f"{TOY_TOKENIZER}/tokenizer.json")
END = int(TOKENIZER.token_to_id("<|im_end|>") or -1)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'


def encode(text: str) -> list[int]:
    """Encode a text without special tokens."""
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: Sequence[int]) -> str:
    """Decode ids, special tokens included."""
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=False)
    return text


def by_turns(*texts: str) -> Callable[[str], str]:
    """Return the n-th text in the n-th turn; the last one repeats."""
    return lambda prompt: texts[min(prompt.count("<|im_start|>assistant"), len(texts)) - 1]


ADDS = by_turns("Let me add.\n" + CALL, "It is 8.")


async def until(holds: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    for _ in range(20_000):  # at least 20 s
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition never held")


@dataclass
class ToyModel:
    """Generate the text that `says` returns for the decoded prompt. Set `gate` to delay it, `cut` to omit end tokens."""

    says: Callable[[str], str] = ADDS
    gate: asyncio.Event | None = None
    version: str = "policy-1"
    cut: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[SamplingParams] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    at_once: int = 0
    most_at_once: int = 0

    async def __call__(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        """Generate one completion, with a logprob per token that depends only on its position."""
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.begun.set()
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
            else:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        ids = [*encode(self.says(decode(prompt_ids))), *([] if self.cut else [END])]
        logprobs = [-0.1 * (1 + (len(prompt_ids) + at) % 7) for at in range(len(ids))]
        return Generated(ids, logprobs, "length" if self.cut else "stop", self.version)
