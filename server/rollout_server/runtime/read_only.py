"""Parsed JSON that an agent or a tool may read but not modify."""

from __future__ import annotations

from typing import Any, NoReturn

from rollout_server.runtime.errors import AgentMistake


def _refuse(self: ReadList | ReadDict, *_arguments: object, **_named: object) -> NoReturn:
    raise AgentMistake(self.advice)


class ReadList(list[Any]):
    """A list that raises `AgentMistake` with its class's `advice` when it is modified. Its copies are plain lists."""

    __slots__ = ()
    advice = "this list is read-only; modify a copy"
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _protocol: object) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, ([*self],)


class ReadDict(dict[str, Any]):
    """A dict that raises `AgentMistake` with its class's `advice` when it is modified. Its copies are plain dicts."""

    __slots__ = ()
    advice = "this dict is read-only; modify a copy"
    update = setdefault = pop = popitem = clear = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def __reduce_ex__(self, _protocol: object) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({**self},)


_MESSAGES = (
    "run.messages is read-only, because the history cannot change. Use `await run.append(...)` to add messages, `await "
    'run.fork([...], kind="compaction")` to continue with another history, or `[*run.messages]` for a copy'
)


class MessageList(ReadList):
    """A list in `run.messages`."""

    __slots__ = ()
    advice = _MESSAGES


class MessageDict(ReadDict):
    """A dict in `run.messages`."""

    __slots__ = ()
    advice = _MESSAGES


def read_only(value: Any, dicts: type[ReadDict] = MessageDict, lists: type[ReadList] = MessageList) -> Any:
    """Return parsed JSON with the dicts and lists of these classes, which raise `AgentMistake` when they are modified."""
    if isinstance(value, dict):
        return dicts({key: read_only(item, dicts, lists) for key, item in value.items()})
    if isinstance(value, list):
        return lists([read_only(item, dicts, lists) for item in value])
    return value
