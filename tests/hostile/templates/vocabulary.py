"""Small real tokenizers: byte-level BPE with the control tokens of a framing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARIES = ("gpt2", "isolated", "nfc", "lstrip")
"""The kinds: line breaks that merge with their neighbours; line breaks and digits as single tokens; normalized text; special
tokens that strip the space before them.
"""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special, in every vocabulary."""

CALL_TOKENS = ("<|call_begin|>", "<|call_end|>", "<|calls_begin|>", "<|calls_end|>")
"""Special tokens around calls, in every vocabulary. None of them ends a completion."""

PAD, EOS, BOS = "<|pad|>", "<|endoftext|>", "<|begin|>"
_MERGES = 400
_CORPUS = (
    "The user asks a question and the assistant answers. What is five plus three? Five plus three is eight.\n"
    '{"name": "add", "arguments": {"a": 5, "b": 3}}\n{"type": "function", "function": {"name": "look"}}\n'
    "You are a helpful assistant. Today is 3 February 2026. Remember to be brief.\n\nThank you. Result 1 of 2: seen.\n"
    "é è ü 漢字 😀 system tool user assistant reminder message messages number\n"
)


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary's tokens besides text: special tokens, those that strip the space after them, and the end token."""

    special: tuple[str, ...]
    stripping: frozenset[str] = frozenset()
    eos: str = EOS

    @property
    def every(self) -> tuple[str, ...]:
        """All special tokens, including the shared ones."""
        return tuple(dict.fromkeys((PAD, BOS, EOS, self.eos, *self.special, *CALL_TOKENS)))


@cache
def tokenizer(kind: str, words: Words) -> Any:
    """A transformers tokenizer without a template. It is cached: copy it before setting one."""
    backend = Tokenizer.from_str(_trained(kind))
    special = words.every
    backend.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True, rstrip=text in words.stripping, lstrip=kind == "lstrip")
            for text in special
        ]
    )
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=words.eos,
        bos_token=BOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def single(vocabulary: Any, texts: Iterable[str]) -> dict[str, int]:
    """The ids of texts that are one token each."""
    return {text: vocabulary.convert_tokens_to_ids(text) for text in texts}


@cache
def _trained(kind: str) -> str:
    backend = Tokenizer(models.BPE())
    if kind == "nfc":
        backend.normalizer = normalizers.NFC()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "isolated")
    if kind == "isolated":
        alone = pre_tokenizers.Split(Regex(r"\n|\p{N}"), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([alone, whole])
    else:
        backend.pre_tokenizer = whole
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + _MERGES, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS.splitlines(keepends=True) * 4, trainer)
    return json.dumps(json.loads(backend.to_str()))
