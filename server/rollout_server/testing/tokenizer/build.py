"""Builds the toy tokenizer: ``python -m rollout_server.testing.tokenizer.build [DIRECTORY]``.

The same corpus produces the same bytes on every machine. Three properties make the tokenizer suitable for testing masks:

* It can encode every text: the alphabet is the 256 bytes, no token is unknown, and texts are not normalized.
* A line break and a digit are always separate tokens, and added tokens never merge. Therefore encoding is compositional at
  each boundary of the chat template: ``encode(prompt + completion) == encode(prompt) + encode(completion)``.
* The tags of thinking and of tool calls are added tokens but not special tokens, as in real models that have them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout_server.testing.tokenizer import TOY_TOKENIZER

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TRAINED_TOKENS: Final = 791
BYTES: Final = 256

_CONFIG: Final = {
    "add_bos_token": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def build(directory: Path, trained_tokens: int = TRAINED_TOKENS) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`, which is created if needed.

    `trained_tokens` counts the 256 bytes and the merges, not the nine added tokens. With 256 every byte is a token, which
    yields a second tokenizer with different token counts. Raises ValueError for fewer than 256.
    """
    if trained_tokens < BYTES:
        raise ValueError(f"trained_tokens is {trained_tokens}, but at least the {BYTES} bytes are needed")
    directory.mkdir(parents=True, exist_ok=True)
    trained = _train((TOY_TOKENIZER / "corpus.txt").read_text(encoding="utf-8"), trained_tokens)
    _write(directory / "tokenizer.json", json.loads(trained.to_str()))
    _write(directory / "tokenizer_config.json", _CONFIG)
    template = directory / "chat_template.jinja"
    if template.resolve() != (TOY_TOKENIZER / template.name).resolve():
        shutil.copyfile(TOY_TOKENIZER / template.name, template)


def _train(corpus: str, trained_tokens: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    alone = pre_tokenizers.Split(Regex(r"\n|\p{N}"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=trained_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    return tokenizer


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else TOY_TOKENIZER)
