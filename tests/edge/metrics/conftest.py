"""Metrics are counted on a loop whose time jumps: latencies are exact, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tests.support.jumping_loop import JumpingLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of the tests beside this file."""
    return {"jumping": JumpingLoop}
