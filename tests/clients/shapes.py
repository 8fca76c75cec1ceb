"""The shapes of what clients send: recorded requests whose texts are replaced by ones of this repository.

Kept are the structure, roles, types, names of tools and parameters, which strings are equal, the ids that the server gave, and the
texts of the task and of the model, which are this repository's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_server.core.capture.rules import CaptureOptions

from tests.clients.recording import Exchange
from tests.clients.responses import ids, parsed, wrote

FOLDER = Path(__file__).parent / "recorded"
_WORD = re.compile(r"[A-Za-z0-9_.:/+$#-]{1,64}")
_STRUCTURE = frozenset({"role", "type", "name", "status", "tool_choice", "effort", "required", "summary", "include"})
_HEADERS = re.compile(r"x-(?:claude-code|codex|session|parent|stainless-retry|rollout)")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}")
_DROPPED = frozenset({"metadata", "client_metadata"})
_SCHEMAS = frozenset({"input_schema", "parameters"})


@dataclass
class Texts:
    """Replace texts: equal ones by equal ones, with the whitespace around them."""

    own: frozenset[str]
    kept: tuple[re.Pattern[str], ...]
    given: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def replaced(self, text: str) -> str:
        bare = text.strip()
        if bare in self.given:
            return text.replace(bare, self.given[bare])
        if not bare or bare.isdecimal() or bare in self.own or (_canonical(bare) or bare) in self.own:
            return text
        number = self.numbers.setdefault(bare, len(self.numbers) + 1)
        marks = [found[0] for pattern in self.kept if (found := pattern.search(bare))]
        return text.replace(bare, " ".join([*marks[:1], f"text {number}"]))

    def walk(self, value: Any, name: str = "", *, schema: bool = False) -> Any:
        if isinstance(value, Mapping):
            inside = schema or name in _SCHEMAS
            return {key: self.walk(each, key, schema=inside) for key, each in value.items() if key not in _DROPPED}
        if isinstance(value, list):
            return [self.walk(each, name, schema=schema) for each in value]
        if not isinstance(value, str):
            return value
        structural = name in _STRUCTURE or (not schema and name == "model")
        return value if structural and _WORD.fullmatch(value) and value not in self.given else self.replaced(value)


def _canonical(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else ""


def shapes(exchanges: Iterable[Exchange], own: Iterable[str]) -> list[dict[str, Any]]:
    """The shapes of the requests for completions, each with the text that the model wrote for it."""
    options = CaptureOptions()
    kept = [re.compile(each) for each in options.dropped_instructions]
    kept += [re.compile(rule.system) for rule in options.auxiliary if rule.system]
    texts = Texts(frozenset(own), tuple(kept))
    made = []
    for number, exchange in enumerate(exchanges):
        final = parsed(exchange.response)
        headers = {name: texts.walk(value) for name, value in exchange.headers.items() if _HEADERS.match(name)}
        path = exchange.path.split("/", 3)[3]
        made.append({"path": path, "headers": headers, "body": texts.walk(exchange.body), "wrote": wrote(final)})
        texts.given |= {value: f"@{number}:{name}" for name, value in ids(final).items()}
        texts.own |= set(_pieces(final))
    return made


def _pieces(final: Any) -> Iterable[str]:
    """Texts and arguments in a response, as clients send them back."""
    if isinstance(final, Mapping):
        for name, value in final.items():
            if name == "input":
                yield json.dumps(value, sort_keys=True)
                yield from _pieces(value)
            elif name in ("tools", "instructions"):
                continue
            else:
                yield from _pieces(value)
    elif isinstance(final, list):
        for value in final:
            yield from _pieces(value)
    elif isinstance(final, str):
        yield from filter(None, (final.strip(), _canonical(final)))


def write(path: Path, calls: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Write a session: lists of tools that occur in several requests once, and one line per request."""
    tools: list[Any] = []
    lines = []
    for call in calls:
        given = call["body"].get("tools")
        if given is not None and given not in tools:
            tools.append(given)
        place = {} if given is None else {"tools": tools.index(given)}
        lines.append({**call, "body": {**call["body"], **place}})
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
    fields += [f"{json.dumps(name)}: [\n{_lines(value)}\n]" for name, value in (("tools", tools), ("calls", lines))]
    path.write_text("{" + ",\n".join(fields) + "}\n", encoding="utf-8")


def _lines(values: Iterable[Any]) -> str:
    return ",\n".join(json.dumps(each, separators=(",", ":")) for each in values)


def read(path: Path) -> dict[str, Any]:
    """Read a session. Its requests have their tools again."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for call in found["calls"]:
        if "tools" in call["body"]:
            call["body"]["tools"] = found["tools"][call["body"]["tools"]]
    return found


def filled(value: Any, given: Mapping[str, str]) -> Any:
    """A recorded value with the ids of this run."""
    if isinstance(value, Mapping):
        return {name: filled(each, given) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, given) for each in value]
    return given.get(value, value) if isinstance(value, str) else value
