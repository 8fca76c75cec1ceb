"""All texts of the server's sources, with `…` for inserted values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.deploy.files import ROOT

ANY = "…"


@cache
def texts() -> frozenset[str]:
    """Texts of server and gateway."""
    found = set()
    for folder in ("server/rollout_server", "gateway/rollout_gateway"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= {re.sub(f"{ANY}+", ANY, text) for text in _texts(ast.parse(path.read_text()))}
    return frozenset(found)


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def said(quote: str) -> bool:
    """Whether the server can produce this text. An inserted value may be one of its texts; then the pieces must match."""
    if any(quote in text for text in texts()):
        return True
    pieces = [piece.strip() for piece in quote.split(ANY) if piece.strip()]
    return len(pieces) > 1 and all(any(piece in text for text in texts()) for piece in pieces)
