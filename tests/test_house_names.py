"""Rules for names: a class name stands for one class, folders are small, and private words are forbidden."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from osmosis.rollout.v1 import event_pb2

from tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server/rollout_server", "server/pytest_rollout", "gateway/rollout_gateway", "gateway/rollout_client")
# The earlier SDK determines these names.
SDK = ROOT / "server/rollout_server/sdk"

MODULES_OF_A_FOLDER = 15
GATEWAY_LINES = 6980

PRIVATE_WORDS = frozenset(
    re.findall(
        r"\w+",
        """wish errand ask asks asked place places known kept course surroundings terms patience desk seat hands talk
        workbench stage judgement told said parcel receipt whereabouts strangers complaint complaints remark remarks
        saying words answer answers answered""",
    )
)
# The contract determines the names of records and events; users type the other ones.
CONTRACT = frozenset(event_pb2.DESCRIPTOR.message_types_by_name) | {"_apply_asked", "_apply_answered"}
PUBLIC = frozenset({"answer", "answers"})  # FinishedRollout.answer, ScriptedModel.answers


def modules(package: str) -> dict[Path, ast.Module]:
    return {path: syntax_tree(path) for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def all_modules() -> dict[str, dict[Path, ast.Module]]:
    return {package: modules(package) for package in PACKAGES}


def definitions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}


def test_a_class_name_stands_for_one_class() -> None:
    for package, trees in all_modules().items():
        found = defaultdict(list)
        for path, tree in trees.items():
            if SDK not in path.parents:
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
        assert {name: where for name, where in found.items() if len(where) > 1} == {}, package


def test_a_folder_is_one_page() -> None:
    folders = defaultdict(int)
    for trees in all_modules().values():
        for path in trees:
            folders[path.parent] += path.name != "__init__.py"
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MODULES_OF_A_FOLDER} == {}


def test_names_are_words_of_the_field() -> None:
    wrong = set()
    for trees in all_modules().values():
        for path, tree in trees.items():
            if SDK in path.parents:
                continue
            names = {node.name for node in definitions(tree)} | {path.stem}
            wrong |= {
                f"{path.relative_to(ROOT)}: {name}" for name in names - CONTRACT - PUBLIC if words(name) & PRIVATE_WORDS
            }
    assert wrong == set()


def test_the_gateway_is_small() -> None:
    assert (
        sum(len(path.read_text(encoding="utf-8").splitlines()) for path in all_modules()["gateway/rollout_gateway"])
        <= GATEWAY_LINES
    )


def imports(path: Path, tree: ast.Module, package: str) -> Iterator[str]:
    """Modules that a module imports at import time or for its types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_have_no_cycle() -> None:
    for package, trees in all_modules().items():
        top = (ROOT / package).parent
        names = {}
        for path in trees:
            parts = path.relative_to(top).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        graph = {
            name: {
                to for to in imports(path, trees[path], path.relative_to(top).parts[0]) if to in names and to != name
            }
            for name, path in names.items()
            if path.name != "__init__.py"
        }
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
