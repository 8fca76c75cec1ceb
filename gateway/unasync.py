"""Writes the client for threads, `rollout_client._sync`, from the one for event loops, `rollout_client._async`: `make sync-client`.

Each module is translated by the tables below and formatted with ruff. What the two clients cannot share is in
`rollout_client/channels.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).with_name("rollout_client")
SOURCE: Final = PACKAGE / "_async"
TARGET: Final = PACKAGE / "_sync"
HEADER: Final = "# Generated from {} by gateway/unasync.py. Change that file, then run `make sync-client`.\n"

#: Sentences of docstrings. Each must occur, so that none is left behind when a docstring changes.
SENTENCES: Final = {
    "Client and event streams for asyncio.": "Client and event streams for synchronous code.",
    " `gateway/unasync.py` generates `rollout_client._sync` from this package.": "",
    "Client for asyncio.": "Client for synchronous code.",
    "Unary calls of the client for asyncio, and its end.": "Unary calls of the client for synchronous code, and its end.",
    "Client of a rollout server, bound to the event loop that uses it first.": (
        "Client of a rollout server for synchronous code."
    ),
    "It has the methods of `Client` as coroutines; iterate over `list`, `run`, `watch` and `watch_group` with\n    `async for`.": (
        "Threads may share it. It does not survive a fork: make one in each process."
    ),
    "Event streams as asynchronous iterators.": "Event streams as iterators.",
    "End the iteration and detach from the rollout.": (
        "End the iteration and detach from the rollout. May be called from any thread."
    ),
}
#: Regular expressions of code, applied in order.
WORDS: Final = (
    (r"\bAsyncChannel\b", "SyncChannel"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\basync (?=def|for|with)", ""),
    (r"\bawait ", ""),
    (r"\b__a(?=(iter|next|enter|exit)__)", "__"),
    (r"\baclose\b", "close"),
    (r"\bgrpc\.aio\b", "grpc"),
    (r"\b_async\b", "_sync"),
)


def translate(texts: dict[str, str]) -> dict[str, str]:
    """The modules for threads, by the names of the files, from those for event loops. Raises ValueError for an unused sentence."""
    unused = [sentence for sentence in SENTENCES if not any(sentence in text for text in texts.values())]
    if unused:
        raise ValueError(f"gateway/unasync.py: no module has {unused[0]!r}; correct or remove it")
    return {name: _format(_translate(name, text), TARGET / name) for name, text in texts.items()}


def source_texts() -> dict[str, str]:
    """The modules for event loops, by the names of the files."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.py"))}


def _translate(name: str, text: str) -> str:
    for sentence, other in SENTENCES.items():
        text = text.replace(sentence, other)
    for pattern, other in WORDS:
        text = re.sub(pattern, other, text)
    return HEADER.format(f"rollout_client/_async/{name}") + text


def _format(text: str, path: Path) -> str:
    """Sorts imports and breaks lines as everywhere in the repository."""
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout  # noqa: S603 - of fixed words
    return text


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    (TARGET / "__init__.py").touch()  # ruff sorts the imports of a package by it
    for each, written in translate(source_texts()).items():
        (TARGET / each).write_text(written, encoding="utf-8")
