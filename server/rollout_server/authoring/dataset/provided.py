"""Datasets that agents provide: the method `dataset` is the author's code, so any exception may occur."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterable, Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_server.agent import Agent
from rollout_server.authoring.author_traceback import AuthorError, author_error
from rollout_server.authoring.dataset.row import SourceRow


def provided_dataset(agent: Agent, split: str) -> Path | Iterator[SourceRow]:
    """Call `dataset` of an agent. Return the path of its dataset, or its rows, which are read as they are iterated over.

    It must not be called while an event loop runs in this thread.

    Raises:
        AuthorError: the agent has no `dataset`, it raised an exception, or its result is neither rows nor a path. Iterating raises
            it too.
    """
    source = f"dataset() of agent {agent.name}"
    if not agent.overrides("dataset"):
        raise AuthorError(
            f"DATASET is missing, and agent {agent.name} provides none; name a file or a directory, or define"
            " `def dataset(self, split)` in the agent"
        )
    with _author_errors(source):
        found = agent.dataset(split)
        if inspect.isawaitable(found):
            found = asyncio.run(_wait_for(found))
    if isinstance(found, str | os.PathLike):
        return Path(found)
    if isinstance(found, AsyncIterable):
        return _check_rows(_iterate(found), source)
    if isinstance(found, Mapping | bytes) or not isinstance(found, Iterable):
        kind = type(found).__name__
        raise AuthorError(f"{source} must return rows (dictionaries) or the path of a dataset, not {kind}")
    return _check_rows(found, source)


def _check_rows(rows: Iterable[Any], source: str) -> Iterator[SourceRow]:
    number = 0
    with _author_errors(source):
        for number, fields in enumerate(rows, start=1):
            if not isinstance(fields, Mapping):
                raise AuthorError(f"row {number}: must be a dictionary, not {type(fields).__name__}", source)
            yield SourceRow(source, 0, number, fields)


@contextmanager
def _author_errors(source: str) -> Iterator[None]:
    try:
        yield
    except AuthorError:
        raise
    except (Exception, SystemExit) as error:
        raise author_error(error, source) from None


def _iterate(rows: AsyncIterable[Any]) -> Iterator[Any]:
    """Iterate over an asynchronous iterable, in an event loop that runs for one step at a time."""
    iterator, end = aiter(rows), object()

    async def step() -> Any:
        return await anext(iterator, end)

    with asyncio.Runner() as runner:
        while (row := runner.run(step())) is not end:
            yield row


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value
