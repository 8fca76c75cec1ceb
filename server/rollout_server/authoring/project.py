"""The project that `rollout new` creates."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from pathlib import Path

from rollout_server.authoring.author_traceback import AuthorError

NEXT = ("python -m pytest", "rollout eval agent.py dataset.jsonl --script scripted.py")
"""Commands to run in a new project."""

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_IMPORTED = frozenset({"Agent", "Limits", "Run"})
_LONGEST = 64
_TEMPLATES = ".jinja"


def make_project(name: str, inside: Path) -> list[Path]:
    """Write a project into a new folder. Return its files, relative to the folder.

    Args:
        name: name of project, folder and agent, such as letter-counter.
        inside: the parent folder.

    Raises:
        AuthorError: for an invalid name, or a folder that is not empty.
        OSError: if a file cannot be written.
    """
    _check_name(name)
    folder = inside / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise AuthorError(
            f"{folder} {what}, and `rollout new` overwrites nothing; choose another name, or another folder with --in"
        )
    files = dict(_render(name))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return sorted(files)


def class_name(name: str) -> str:
    """Return the class name of an agent: LetterCounter for letter-counter, or MyRun for run, which the file imports."""
    made = "".join(part.capitalize() for part in re.split("[_-]", name))
    return f"My{made}" if made in _IMPORTED else made


def _check_name(name: str) -> None:
    if len(name) > _LONGEST or not _NAME.fullmatch(name):
        text = f"use lower-case letters, digits and single - or _ between them, at most {_LONGEST} characters"
        raise AuthorError(f"{name!r} is not a valid project name: {text}, such as letter-counter")
    if keyword.iskeyword(name) or keyword.iskeyword(class_name(name)):
        raise AuthorError(f"{name!r} is a Python keyword; choose another name, such as {name}-agent")


def _render(name: str) -> list[tuple[Path, str]]:
    from jinja2 import Environment, StrictUndefined

    # No escaping: the output is source code, not HTML, and `_check_name` allows no special characters.
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    variables = {"name": name, "class_name": class_name(name), "commands": NEXT}
    root = resources.files("rollout_server.authoring") / "project"
    found = sorted(each.name for each in root.iterdir() if each.name.endswith(_TEMPLATES))
    texts = {
        name: environment.from_string((root / name).read_text(encoding="utf-8")).render(variables) for name in found
    }
    # The templates are in one folder; test_agent.py.jinja becomes tests/test_agent.py.
    return [(_target_path(each.removesuffix(_TEMPLATES)), text) for each, text in texts.items()]


def _target_path(name: str) -> Path:
    return Path("tests", name) if name.startswith("test_") else Path(name.replace("gitignore", ".gitignore"))
