"""How calls of one tool are run: what its author decides with `@tool(...)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MEMORY_BYTES = 2 * 1024**3
CPU_SECONDS = 300.0
"""Limits of a tool's process whose author names none."""


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """The rules for calls of one tool. Raises TypeError or ValueError, naming the rule, for what makes no sense.

    Args:
        timeout: seconds that a call may take, retries included, the wait for a place not; None: as long as its rollout may.
            The model is told. Work that does not give way is left alone (D18).
        retries: attempts after the first where the tool raises something that is no `ToolError`. Only for idempotent tools.
        concurrency: calls that run at the same time in one rollout; the others wait. None: all of them.
        server_concurrency: the same for all rollouts of the server together.
        idempotent: calling it again with the same arguments does no harm and gives the same result.
        max_output_tokens: a longer result is cut, with a note on what is missing that comes on top. Counted by the rollout's
            tokenizer; where it has none, four characters are taken for a token.
        cache: a result is kept for the next call with the same arguments, on the whole server. Only for idempotent tools.
        cache_seconds: how long it is kept; None: until newer results need the room.
        process: run in a process beside the server, which is killed where a call is given up. "fresh" starts one for each call,
            so that nothing is left behind of the calls before. Only for functions that can be imported.
        memory_bytes: address space that the process may take on top of what it has once the tool is imported, and each process
            that it starts may take; None: `MEMORY_BYTES`.
        cpu_seconds: processor time of a call in it, counted in whole seconds; None: `CPU_SECONDS`.
        environment: names of environment variables of the server that the process gets. It has none but these, and such as PATH.
    """

    timeout: float | None = None
    retries: int = 0
    concurrency: int | None = None
    server_concurrency: int | None = None
    idempotent: bool = False
    max_output_tokens: int | None = None
    cache: bool = False
    cache_seconds: float | None = None
    process: bool | Literal["fresh"] = False
    memory_bytes: int | None = None
    cpu_seconds: float | None = None
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("timeout", "cache_seconds", "cpu_seconds"):
            _check_seconds(name, getattr(self, name))
        for name in ("concurrency", "server_concurrency", "max_output_tokens", "memory_bytes"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("retries", self.retries, least=0)
        for name in ("idempotent", "cache"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is True or False, not {getattr(self, name)!r}")
        if self.process not in (True, False, "fresh"):
            raise TypeError(f'process is True, False or "fresh", not {self.process!r}')
        if self.retries and not self.idempotent:
            raise ValueError("retries are for tools that may be called again: say idempotent=True, or leave them out")
        if self.cache and not self.idempotent:
            raise ValueError("cache is for tools that give the same again: say idempotent=True, or leave it out")
        if self.cache_seconds is not None and not self.cache:
            raise ValueError("cache_seconds needs cache=True")
        if not self.process and (self.memory_bytes is not None or self.cpu_seconds is not None):
            raise ValueError("memory_bytes and cpu_seconds limit a process: say process=True")
        if not isinstance(self.environment, tuple) or not all(isinstance(name, str) for name in self.environment):
            raise TypeError(f"environment is a tuple of names, not {self.environment!r}")
        if self.environment and not self.process:
            raise ValueError("environment is that of a process: say process=True")


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is a positive number of seconds, not {value!r}")


def _check_count(name: str, value: object, *, least: int) -> None:
    if value is None and least:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, not {value}")
