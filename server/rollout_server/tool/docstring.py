"""Extraction of a tool's description, and of its parameters' descriptions, from a docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# A line that may begin a section on parameters. A cheap test before griffe is imported, which then parses the sections.
_SECTIONS = re.compile(r"^\s*((keyword |other )?(arg|param)\w*:?\s*$|:\w)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """A tool's description, and the descriptions of its parameters by name."""

    text: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


def read_docstring(function: Callable[..., object]) -> ToolDescription:
    """Parse a docstring in Google, NumPy or Sphinx style. The sections on parameters are removed from the text.

    The style that finds most of the function's parameters is used.
    """
    text = inspect.getdoc(function) or ""
    if not _SECTIONS.search(text):
        return ToolDescription(text)
    from griffe import Docstring, Parser  # the import takes 0.1 s, so only docstrings with sections pay for it

    names = inspect.signature(function).parameters.keys()
    best = ToolDescription(text)
    for style in (Parser.google, Parser.numpy, Parser.sphinx):
        sections = Docstring(text).parse(style, warnings=False)
        found = {name: description for name, description in _parameters(sections) if name in names and description}
        if len(found) > len(best.parameters):
            best = ToolDescription("\n\n".join(filter(None, map(_text, sections))), found)
    return best


def _parameters(sections: list[Any]) -> Iterator[tuple[str, str]]:
    for section in sections:
        if section.kind.value in ("parameters", "other parameters"):
            for parameter in section.value:
                yield parameter.name, " ".join(parameter.description.split())


def _text(section: Any) -> str:
    """Return the text of a section for the model; empty for sections on parameters and exceptions."""
    match section.kind.value:
        case "text":
            return str(section.value)
        case "returns" | "yields":
            description = " ".join(" ".join(item.description.split()) for item in section.value)
            return f"Returns: {description}" if description else ""
        case "examples":
            return "Examples:\n" + "\n".join(str(text) for _, text in section.value)
        case "admonition":
            return f"{section.title or section.value.kind}: {section.value.description}"
    return ""
