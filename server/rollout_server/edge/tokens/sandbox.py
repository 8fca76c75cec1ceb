"""Cache the decisions of the Jinja sandbox that renders chat templates, and the JSON of tools.

Three quarters of the calls in a template are of its own macros and of methods of strings. The sandbox allows all of them, so they
are called without asking it.

For each `message.role` in a template, Jinja's sandbox first looks for an attribute of that name, and then checks whether the
template may access it. In a long conversation this is most of the rendering time. For the JSON types of a conversation the
result depends only on the type of the value and the name, so it is computed once per (type, name).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any, Final, TypeAlias

Environment: TypeAlias = Any
"""A `jinja2.Environment`. Jinja is imported only when a tokenizer is loaded."""

_KEY: Final = 1  # dictionaries have no such attribute, so the name is a key
_MEMBER: Final = 2  # an attribute that all values of this type have and that the sandbox returns unchanged
_STATE: Final = 3  # an allowed attribute of a loop or a namespace; its value differs, so its type is checked each time
_CALL: Final = 4  # not cacheable: call the sandbox each time
_PLAIN: Final = (dict, list, str)
_HARMLESS: Final = frozenset({str, int, float, bool, type(None), dict, list, tuple})
_NAMES: Final = 1000
"""Size limit of the cache: a template that calls `str.format` on message texts looks up names that those texts contain."""
_NOTHING: Final = object()
_MOST_TOOLS: Final = 4096
_MOST_TEXTS: Final = 8
"""Maximum number of texts of one tool: a template writes it with few combinations of arguments."""


class ToolJson:
    """Jinja's filter `tojson` that remembers the text of tools, which is written again in each rendering.

    A tool is recognised by its identity, because to compare two takes as long as to write one. So it must not change, which the
    sandbox does not let a template do. An entry holds its tool: as long as it is there, no other object has that `id`. Shared by
    threads.
    """

    def __init__(self, tojson: Callable[..., str]) -> None:
        self._tojson = tojson
        self._known: dict[int, tuple[object, dict[str, str]]] = {}

    def add(self, tools: Sequence[object]) -> None:
        """Remember the texts of these tools, and of the parts of them that templates write alone."""
        for tool in tools:
            if id(tool) not in self._known:
                if len(self._known) >= _MOST_TOOLS:
                    self._known.clear()
                function = tool.get("function") if isinstance(tool, Mapping) else None
                parameters = function.get("parameters") if isinstance(function, Mapping) else None
                for part in (tool, function, parameters):
                    if isinstance(part, Mapping):
                        self._known[id(part)] = part, {}

    def __call__(self, value: object, *arguments: Any, **named: Any) -> str:
        """Return a value as JSON."""
        known = self._known.get(id(value))
        if known is None or known[0] is not value:
            return self._tojson(value, *arguments, **named)
        # Not the arguments themselves: True equals 1, and a list cannot be a key.
        texts, key = known[1], repr((arguments, named))
        text = texts.get(key)
        if text is None:
            text = self._tojson(value, *arguments, **named)
            if len(texts) < _MOST_TEXTS:
                texts[key] = text
        return text


def remember(environment: Environment) -> None:
    """Cache the decisions of a sandbox. Those that its class makes in another way than Jinja's are left to it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

    def decides_as_jinja(*names: str) -> bool:
        return all(getattr(type(environment), name, None) is getattr(Sandbox, name) for name in names)

    if decides_as_jinja("getattr", "is_safe_attribute"):
        environment.getattr = _look_up(environment)
    if decides_as_jinja("call", "is_safe_callable"):
        environment.call = _calling(environment)


def _calling(environment: Environment) -> Callable[..., Any]:
    """Return a replacement for `environment.call` that calls macros, and methods of strings, lists and dictionaries, directly.

    Nothing can mark these as unsafe: a template sets no attributes on them. Whether it may have a method at all was decided when
    it looked the method up.
    """
    from jinja2.runtime import Macro

    original = environment.call

    def call(context: Any, target: Any, /, *arguments: Any, **named: Any) -> Any:
        is_macro = type(target) is Macro
        if not is_macro and not (type(target) is BuiltinMethodType and type(target.__self__) in _PLAIN):
            return original(context, target, *arguments, **named)
        # Jinja passes these to functions that get the context, and to no others.
        named.pop("_loop_vars", None)
        named.pop("_block_vars", None)
        return target(context.eval_ctx, *arguments, **named) if is_macro else target(*arguments, **named)

    return call


def _look_up(environment: Environment) -> Callable[[Any, str], Any]:
    """Return a caching replacement for `environment.getattr`."""
    original, undefined = environment.getattr, environment.undefined
    known: dict[tuple[type, str], int] = {}
    keys: set[str] = set()

    def look_up(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name in keys:
            return value[name] if name in value else undefined(obj=value, name=name)
        decision = known.get((kind, name))
        if decision == _MEMBER:
            return getattr(value, name)
        if decision == _STATE:
            found = getattr(value, name, _NOTHING)
            if type(found) in _HARMLESS:
                return found
        found = original(value, name)
        if decision is None and len(known) < _NAMES:
            known[kind, name] = decided = _decided(environment, value, name, found)
            if decided == _KEY:
                keys.add(name)
        return found

    return look_up


def _decided(environment: Environment, value: Any, name: str, found: Any) -> int:
    """Classify how the sandbox resolved `found`; `_CALL` unless the decision holds for all values of this type."""
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    if type(value) in _PLAIN:
        if not hasattr(value, name):
            return _KEY if type(value) is dict else _CALL
        member = getattr(value, name)
        return _MEMBER if type(found) is type(member) and found == member else _CALL
    allowed = isinstance(value, LoopContext | Namespace) and environment.is_safe_attribute(value, name, None)
    return _STATE if allowed else _CALL
