"""The toy tokenizer that ships with the testing tools: byte-level BPE with an append-only ChatML template.

It is small enough to be committed and loads offline with ``AutoTokenizer.from_pretrained(TOY_TOKENIZER)``. `build`
made it and makes it again, byte for byte.
"""

from pathlib import Path
from typing import Final

TOY_TOKENIZER: Final[Path] = Path(__file__).parent
"""The directory to load it from."""
