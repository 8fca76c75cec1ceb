"""Rules of prose that a program can check: phrases that were replaced, empty docstrings, one word for one thing, linked pages."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

# Sentences that readers had to read twice, by their distinctive words. None may come back.
REPLACED = (
    "Training wants GPUs",
    "agents want tools, sandboxes",
    "own tokens part from ours",
    "Dare to expose it",
    "lead to the same rollouts",
    "is seen, watched and cancelled on the others",
    "put a mask wrong",
    "with grpcio and protobuf, nothing heavy",
    "A trainer that renders for itself",
    "is counted for exactly",
    "its drift is told",
    "Models owe nobody that",
    "rendering the *parsed* answer gives exactly",
    "at the index where the two part",
    "it wins, and a difference is",
    "What goes wrong, and how one hears of it",
    "how one hears of it",
    '"5" is no number',
    "reads what was wrong and what is wanted",
    "So it does of a",
    "of any other exception its text",
    "who does for 0.1 s",
    "is named in the log, with the line",
    "that the model is told of must be one",
    "one that it may send",
    "that no schema can tell",
    "the only agent there is",
    "plays what is not there",
    "what went wrong, and rows that have changed",
    "results of another agent, endpoint or sampling",
    "is without bias",
    "gives up a rollout says so",
    "the server's last word",
    "ends whatever is still generated",
    "The same of one caller",
    "Tools that are plain functions and run",
    "that were given up and never returned",
    "came to their end",
    "Most tokens that a rollout generates",
    "What is spoken there",
    "returned while a task that it had started went on",
)

EMPTY = re.compile(
    r"""(?: Nothing | (?:The|It\ is\ the)\ same(?:\ (?:of|for|as)(?:\ [\w-]+){1,3})? | As\ (?:above|before) | See\ above | Likewise
      | It\ is\ so | That\ is\ (?:all|it) | (?:What|Who|Where|How\ many|How\ much)\ (?:it|they|there|this|that)\ (?:is|are|was|were)
      )[.:]?""",
    re.VERBOSE | re.IGNORECASE,
)


def is_empty(docstring: str) -> bool:
    """The docstring says nothing: it has fewer than two words, or it is one of the texts above."""
    return " " not in docstring or EMPTY.fullmatch(docstring) is not None


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def running_text(text: str) -> str:
    """Join wrapped comments, string literals and lines, so that a phrase is found across line ends."""
    text = re.sub(r"""["']\s*\n\s*[rbf]?["']""", "", text)
    text = re.sub(r"^\s*(?:#:?|//|\*|>)\s+", " ", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", text).casefold()


def test_replaced_phrases_do_not_come_back() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in files("server", "gateway", "docs", "README.md", "protos/**.proto", "examples")
        if path.suffix in {".py", ".md", ".proto", ".json", ".jinja", ".txt", ".toml"}
        for text in [running_text(path.read_text(encoding="utf-8"))]
        for phrase in REPLACED
        if phrase.casefold() in text
    }
    assert sorted(found) == []
    assert len(REPLACED) >= 30


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes: every string that stands as a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split())


def test_every_docstring_has_content() -> None:
    """In tests and examples one word is enough: many of their docstrings are descriptions of tools, which are data."""
    empty = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files("server/**.py", "gateway/**.py", "bench/**.py", "examples/**.py", "tests/**.py")
        for line, text in docstrings(syntax_tree(path))
        if (EMPTY.fullmatch(text) if path.relative_to(ROOT).parts[0] in ("tests", "examples") else is_empty(text))
    ]
    assert empty == []


@pytest.mark.parametrize("text", ["Nothing.", "The same.", "What they are.", "How many there are.", "Tokens."])
def test_empty_docstrings_are_recognized(text: str) -> None:
    assert is_empty(text)
    assert not is_empty(f"Return {text}")


def prose(page: Path) -> str:
    """Text of a page without code blocks, inline code and link targets."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)


def test_dialect_is_only_the_name_of_an_enum_and_a_field() -> None:
    """Pages say which HTTP API or trainer protocol they mean."""
    wrong = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in PAGES
        for line in prose(page).splitlines()
        if re.search(r"dialect", line, re.IGNORECASE)
    ]
    assert wrong == []


def links(page: Path) -> set[Path]:
    """Files of the repository that a page links to."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8")))
    local = {target.partition("#")[0] for target in targets if "://" not in target}
    return {(page.parent / target).resolve() for target in local if target}


def test_every_page_is_linked() -> None:
    linked = {target for page in PAGES for target in links(page) - {page}}
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and page not in linked] == []


def test_links_lead_to_files() -> None:
    missing = {f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in links(page) if not link.exists()}
    assert missing == set()
