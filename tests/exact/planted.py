"""A copy of the renderer with a planted fault, imported under another name."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollout_server.edge.tokens

_SOURCES = Path(rollout_server.edge.tokens.__file__).parent
_NAME = "rollout_server.edge.tokens"


@dataclass(frozen=True, slots=True)
class Fault:
    """One change to one module: a text that occurs exactly once, and its replacement."""

    name: str
    module: str
    right: str
    wrong: str


@dataclass(frozen=True, slots=True)
class Copy:
    """The modules of a copy by name, and threads to render in."""

    modules: Mapping[str, Any]
    executor: ThreadPoolExecutor

    def loaded(self, tokenizer: Any) -> Any:
        """The copy's `LoadedTokenizer`."""
        return self.modules["tokenizer"].LoadedTokenizer("copy", tokenizer, self.executor)

    def renderer(self, tokenizer: Any, tools: Any = (), **options: Any) -> Any:
        """The copy's `Renderer`."""
        return self.modules["renderer"].Renderer(self.loaded(tokenizer), list(tools), {}, **options)


@contextmanager
def copied(at: Path, fault: Fault | None) -> Iterator[Copy]:
    """Copy the renderer's modules with the fault planted, or unchanged without one."""
    name = f"tokens_copy_{at.name}"
    package = at / name
    shutil.copytree(_SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if fault is not None and path.stem == fault.module:
            assert text.count(fault.right) == 1, (
                f"{fault.module} does not contain the code of fault {fault.name!r} once: update the fault"
            )
            text = text.replace(fault.right, fault.wrong)
        path.write_text(text.replace(_NAME, name), encoding="utf-8")
    sys.path.insert(0, str(at))
    try:
        stems = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
        with ThreadPoolExecutor(1) as executor:
            yield Copy({stem: importlib.import_module(f"{name}.{stem}") for stem in stems}, executor)
    finally:
        sys.path.remove(str(at))
        for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[module]
