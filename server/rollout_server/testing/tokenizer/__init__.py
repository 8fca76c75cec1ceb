"""The toy tokenizer of the testing tools: byte-level BPE with an append-only ChatML template.

It is small enough for the repository and loads offline with ``AutoTokenizer.from_pretrained(TOY_TOKENIZER)``. `build`
reproduces it byte for byte.
"""

from pathlib import Path
from typing import Final

TOY_TOKENIZER: Final[Path] = Path(__file__).parent
"""The directory that contains it."""
