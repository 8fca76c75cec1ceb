"""Metrics are tested on a loop with virtual time: latencies are exact and tests do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tests.support.jumping_loop import JumpingLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop for the tests in this folder."""
    return {"jumping": JumpingLoop}
