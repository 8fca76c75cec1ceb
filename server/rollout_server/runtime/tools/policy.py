"""How calls of one tool are executed: the options that its author passes to `@tool(...)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MEMORY_BYTES = 2 * 1024**3
CPU_SECONDS = 300.0
"""Default limits of a tool's process."""


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """Execution options of one tool. Raises TypeError or ValueError with the option's name for invalid values.

    Args:
        timeout: seconds for one call, including retries but not the wait for a slot; None: no limit but the rollout's. On a
            timeout the model gets an error, and work that ignores its cancellation is abandoned (D18).
        retries: attempts after the first if the tool raises an exception other than `ToolError`. Idempotent tools only.
        concurrency: concurrent calls in one rollout; further calls wait. None: no limit.
        server_concurrency: concurrent calls in all rollouts of the server.
        idempotent: a repeated call with the same arguments is harmless and returns the same result.
        max_output_tokens: results are truncated to this many tokens, plus a note about the missing part. Counted with the
            rollout's tokenizer, or as four characters per token if it has none.
        cache: cache results by arguments, for the whole server. Idempotent tools only.
        cache_seconds: lifetime of a cached result; None: until it is evicted.
        process: run in a separate process, which is killed when a call is cancelled. "fresh" starts a new process for each
            call, so no state is left from earlier calls. Only for functions that can be imported.
        memory_bytes: address space that the process may use in addition to what it uses after importing the tool. Applies to
            each process that it starts, too. None: `MEMORY_BYTES`.
        cpu_seconds: processor time of one call in the process, rounded up to whole seconds; None: `CPU_SECONDS`.
        environment: names of environment variables that the process inherits, in addition to basic ones such as PATH.
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
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.process not in (True, False, "fresh"):
            raise TypeError(f'process must be True, False or "fresh", not {self.process!r}')
        if self.retries and not self.idempotent:
            raise ValueError("retries need a tool that may be called again: set idempotent=True, or remove retries")
        if self.cache and not self.idempotent:
            raise ValueError(
                "cache needs a tool that returns the same result again: set idempotent=True, or remove cache"
            )
        if self.cache_seconds is not None and not self.cache:
            raise ValueError("cache_seconds needs cache=True")
        if not self.process and (self.memory_bytes is not None or self.cpu_seconds is not None):
            raise ValueError("memory_bytes and cpu_seconds limit a process: set process=True")
        if not isinstance(self.environment, tuple) or not all(isinstance(name, str) for name in self.environment):
            raise TypeError(f"environment must be a tuple of names, not {self.environment!r}")
        if self.environment and not self.process:
            raise ValueError("environment needs a process: set process=True")


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")


def _check_count(name: str, value: object, *, least: int) -> None:
    if value is None and least:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
