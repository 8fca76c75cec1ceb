"""The conversation as its agent reads it. Whoever changes what he reads changes nothing, so he is told at once."""

from __future__ import annotations

from typing import Any, NoReturn

from rollout_server.runtime.run.context import AgentMistake

_ADVICE = (
    "what was said stays: run.messages is only read. `await run.append(...)` adds to the conversation, and `await run.fork([...], "
    'kind="compaction")` goes on with another one in its place; `[*run.messages]` is a list of your own'
)


def _refuse(*_arguments: object, **_named: object) -> NoReturn:
    raise AgentMistake(_ADVICE)


class ReadList(list[Any]):
    """A list for everybody who reads it. Copied, it is a plain one."""

    __slots__ = ()
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _protocol: object) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, ([*self],)


class ReadDict(dict[str, Any]):
    """A dictionary for everybody who reads it. Copied, it is a plain one."""

    __slots__ = ()
    update = setdefault = pop = popitem = clear = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def __reduce_ex__(self, _protocol: object) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({**self},)


def only_read(value: Any) -> Any:
    """JSON as it is parsed, whose lists and dictionaries raise `AgentMistake` where somebody changes them."""
    if isinstance(value, dict):
        return ReadDict({key: only_read(item) for key, item in value.items()})
    if isinstance(value, list):
        return ReadList([only_read(item) for item in value])
    return value
