"""Codes such as `D8` or `R6a` in the sources are explained in docs/design.md, and pages that they name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = set(re.findall(r"\*\*([DR]\d+a?)\.? ", (ROOT / "docs" / "design.md").read_text(encoding="utf-8")))
CODE = re.compile(r"(?<![\w.-])(?:[DR][1-9]\d?[a-z]?|R0)(?![\w-])")
PAGE = re.compile(r"(?<![\w/.-])(?:docs/)?([a-z][\w-]*\.md)\b")


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "server/**.py", "gateway/**.py", "tests/**.py", "bench/**.py", "protos/**.proto"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_every_code_is_explained() -> None:
    unknown = {
        f"{path.relative_to(ROOT)}: {code}"
        for path in sources()
        for code in CODE.findall(path.read_text(encoding="utf-8"))
        if code not in EXPLAINED
    }
    assert unknown == set()
    assert {"D1", "D8", "R1", "R6a"} <= EXPLAINED


def test_every_page_that_is_named_exists() -> None:
    there = {path.name for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
    missing = {
        f"{path.relative_to(ROOT)}: {page}"
        for path in sources()
        for page in PAGE.findall(path.read_text(encoding="utf-8"))
        if page not in there
    }
    assert missing == set()
