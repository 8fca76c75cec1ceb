"""Rollouts that a real server has run, its journal, and the gateway over what was saved of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_server.archive.archive import Archive
from rollout_server.archive.saved import open_archive
from rollout_server.archive.server import archive_app, listening
from rollout_server.archive.service import ArchiveService
from rollout_server.assembly import tokenizer_settings
from rollout_server.calculator import Calculator
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.settings import load
from rollout_server.testing.script import Fault, FaultKind, Script

from tests.page.rollouts import TOUR, Tour, begin, events, finished, play
from tests.support.bodies import TOKENIZER
from tests.system.conftest import open_world

TOKEN = "a-secret-token-of-the-trainer"


@dataclass(frozen=True)
class Recorded:
    """What a server returned for its rollouts, in the order of their starts, and its journal after it has stopped."""

    journal: Path
    rollouts: list[dict[str, Any]]
    events: list[list[dict[str, Any]]]


@pytest.fixture
async def recorded(tmp_path: Path) -> Recorded:
    """A rollout with drift, forks and masks, one that failed, and two of a group."""
    async with AsyncExitStack() as stack:
        world = await open_world(stack, agents=[Tour(), Calculator()], journal=str(tmp_path / "journal"))
        fault = Script(lines=(TOUR[0], Fault(kind=FaultKind.STATUS, status=400)))
        target = {"url": f"grpc://{world.trainer.grpc_target}", "bearer": TOKEN}
        uids = [
            await play(world, "tour", Script(lines=TOUR), completions=target, labels={"split": "train"}),
            await play(world, "fails", fault),
            await begin(world, "one", "calculator", "What is 1 + 1?", group_id="sums", group_index=0),
            await begin(world, "two", "calculator", "What is 2 + 2?", group_id="sums", group_index=1),
        ]
        rollouts = [await finished(world, uid) for uid in uids]
        return Recorded(tmp_path / "journal", rollouts, [await events(world, uid) for uid in uids])


@asynccontextmanager
async def gateway_over(archive: Archive) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway over an archive."""
    tokenizers = Tokenizers(tokenizer_settings(load(tokenizers={TOKENIZER: "toy"}, tokenizers_offline=True)))
    service = ArchiveService(archive, "1", tokenizers)
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(archive_app(service))
        url = await stack.enter_async_context(listening(app, 0))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
    await tokenizers.close()


OpenSaved = Callable[..., Any]


@pytest.fixture
async def open_saved() -> AsyncIterator[OpenSaved]:
    """`await open_saved(*paths)`: a client of the gateway over files and directories."""
    async with AsyncExitStack() as stack:

        async def opened(*paths: Path) -> httpx.AsyncClient:
            archive = stack.enter_context(open_archive(paths, lambda text: None))
            return await stack.enter_async_context(gateway_over(archive))

        yield opened
