"""Which columns of a dataset are prompt, images, system prompt and ground truth: found by name, or named by `--column`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollout_server.authoring.author_traceback import AuthorError

_MISSING: Final = object()
_PROMPTS: Final = ("user_prompt", "prompt", "question", "messages")
_GROUND_TRUTHS: Final = ("ground_truth", "answer", "reward_model.ground_truth")
_IMAGES: Final = ("images", "image")
_SAME: Final = {"prompt": "prompt", "user_prompt": "prompt", "messages": "prompt"}
COLUMNS: Final = (*_SAME, "images", "system_prompt", "ground_truth")
"""The standard columns that `--column` maps. `prompt`, `user_prompt` and `messages` all name the prompt."""


@dataclass(frozen=True, slots=True)
class DatasetColumns:
    """Names of the columns that rows are made of; empty for none. A dotted name is a path into objects.

    Args:
        prompt: a text or a list of messages.
        parsed: a text in the prompt's column is a list of messages as JSON.
        doubtful: a text in the prompt's column looks like one, but is used as a text.
        images: a list of images for the prompt, or one image.
    """

    prompt: str
    images: str = ""
    system_prompt: str = ""
    ground_truth: str = ""
    parsed: bool = False
    doubtful: bool = False

    @classmethod
    def detect(cls, row: Mapping[str, Any], names: Mapping[str, str]) -> DatasetColumns:
        """Return the columns of a dataset.

        Args:
            row: the first row of the dataset.
            names: names by standard column, from `column_names`; they win over what is found.

        Raises:
            AuthorError: the row has no prompt, or not the columns of `names`.
        """
        mapped = {_SAME.get(column, column): name for column, name in names.items()}
        absent = [f"{column}={name}" for column, name in names.items() if name and not has_value(row, name)]
        if absent:
            raise AuthorError(f"--column {absent[0]}: the row has no such column ({_listed(row)})")
        candidates = {
            "prompt": _PROMPTS,
            # A text may name a container.
            "images": tuple(name for name in _IMAGES if not isinstance(row.get(name), str)),
            "system_prompt": ("system_prompt",),
            "ground_truth": _GROUND_TRUTHS,
        }
        found = {
            role: mapped[role] if role in mapped else next((name for name in options if has_value(row, name)), "")
            for role, options in candidates.items()
        }
        if not found["prompt"]:
            wanted = f"{', '.join(_PROMPTS[:-1])} or {_PROMPTS[-1]}"
            raise AuthorError(f"there is no prompt: no column {wanted} ({_listed(row)}); use --column prompt=NAME")
        chat = "prompt" not in mapped and _is_chat_text(value_at(row, found["prompt"]))
        parsed = "messages" in names or (chat and found["prompt"] == "messages")
        return cls(**found, parsed=parsed, doubtful=chat and not parsed)

    def description(self) -> str:
        """Describe which column each part of a row comes from."""
        parts = ((part, getattr(self, part)) for part in ("prompt", "images", "system_prompt", "ground_truth"))
        named = {part: f"{part} from {name!r}" for part, name in parts if name}
        if self.doubtful:
            named["prompt"] += f" (as text; if it is a list of messages as JSON, use --column messages={self.prompt})"
        return ", ".join(named.values())


def column_names(pairs: Iterable[str]) -> dict[str, str]:
    """Parse COLUMN=NAME pairs into a dictionary of a dataset's names by standard column. Raises `AuthorError`."""
    names: dict[str, str] = {}
    for pair in pairs:
        column, sign, name = pair.partition("=")
        if not sign or column not in COLUMNS:
            raise AuthorError(f"--column {pair!r} must be COLUMN=NAME, with COLUMN one of {', '.join(COLUMNS)}")
        role = _SAME.get(column, column)
        if any(_SAME.get(other, other) == role for other in names):
            raise AuthorError(f"--column {pair}: the {role} is mapped twice; remove one")
        if not name and role == "prompt":
            raise AuthorError(f"--column {pair}: every row needs a prompt; give the name of its column")
        names[column] = name
    return names


def has_value(row: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has the column or the path."""
    return _find(row, name) is not _MISSING


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column or a path; None if there is none, and for an empty name."""
    value = _find(row, name) if name else None
    return None if value is _MISSING else value


def _find(row: Mapping[str, Any], name: str) -> object:
    if name in row:
        return row[name]
    value: object = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _is_chat_text(value: object) -> bool:
    """Return whether a text is a list of messages as JSON, which a CSV file cannot have in another form."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return bool(found) and all(isinstance(each, dict) and "role" in each for each in found)


def _listed(row: Mapping[str, Any]) -> str:
    return f"columns: {', '.join(map(str, row)) or 'none'}"
