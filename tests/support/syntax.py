"""Syntax trees of source files."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off.

    If it runs while CPython 3.11 builds a syntax tree, the finalizers that it calls may let another thread or frame in, and
    `ast.parse` then fails with "SystemError: AST constructor recursion depth mismatch".
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def syntax_tree(path: Path) -> ast.Module:
    """Parse a source file."""
    with without_collector():
        return ast.parse(path.read_text(encoding="utf-8"))
