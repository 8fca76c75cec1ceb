"""The sandbox of chat templates, remembering what it decided.

At each `message.role` in a template Jinja's sandbox looks for an attribute of that name first, and decides anew whether the
template may see what it found; that is most of what rendering a long conversation costs. For the values that conversations
are made of it depends on nothing but their type and the name, so it is asked once for each of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

Environment: TypeAlias = Any
"""A `jinja2.Environment`. Jinja is not imported before a tokenizer is loaded."""

_KEY: Final = 1  # dictionaries have no such attribute, so it names one of their keys
_MEMBER: Final = 2  # an attribute of all values of this type, which is shown as it is
_STATE: Final = 3  # a loop or a namespace may be asked for it; what is found there has to be looked at
_ASK: Final = 4
_PLAIN: Final = (dict, list, str)
_HARMLESS: Final = frozenset({str, int, float, bool, type(None), dict, list, tuple})
_NAMES: Final = 1000
"""More are not remembered: a template that formats texts of others with `str.format` looks up names that they wrote."""
_NOTHING: Final = object()


def remember(environment: Environment) -> None:
    """Makes a sandbox remember. One that decides in a way of its own is left as it is."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

    decides = ("getattr", "is_safe_attribute")
    if all(getattr(type(environment), name, None) is getattr(Sandbox, name) for name in decides):
        environment.getattr = _look_up(environment)


def _look_up(environment: Environment) -> Callable[[Any, str], Any]:
    """`environment.getattr`, with a memory."""
    ask, undefined = environment.getattr, environment.undefined
    known: dict[tuple[type, str], int] = {}
    keys: set[str] = set()

    def look_up(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name in keys:
            return value[name] if name in value else undefined(obj=value, name=name)
        answer = known.get((kind, name))
        if answer == _MEMBER:
            return getattr(value, name)
        if answer == _STATE:
            found = getattr(value, name, _NOTHING)
            if type(found) in _HARMLESS:
                return found
        found = ask(value, name)
        if answer is None and len(known) < _NAMES:
            known[kind, name] = decided = _decided(environment, value, name, found)
            if decided == _KEY:
                keys.add(name)
        return found

    return look_up


def _decided(environment: Environment, value: Any, name: str, found: Any) -> int:
    """How the sandbox came to what it `found`, if that is the same for all values of the type."""
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    if type(value) in _PLAIN:
        if not hasattr(value, name):
            return _KEY if type(value) is dict else _ASK
        member = getattr(value, name)
        return _MEMBER if type(found) is type(member) and found == member else _ASK
    asked = isinstance(value, LoopContext | Namespace) and environment.is_safe_attribute(value, name, None)
    return _STATE if asked else _ASK
