"""Syntax trees of source files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from rollout_server.runtime.aio.collector import collector_paused


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Parse a source file, once per process. Callers must not change the tree.

    If the garbage collector runs while CPython 3.11 builds a syntax tree, `ast.parse` may fail with "SystemError: AST constructor
    recursion depth mismatch".
    """
    with collector_paused():
        return ast.parse(path.read_text(encoding="utf-8"))
