"""`python -m bench.lists`: lists of a server that knows 100,000 rollouts: time, and how long the event loop is blocked."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import time
import urllib.request
from typing import Annotated, Any

import typer
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.edge.wire.request import start_request
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Caller
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.programs.loop import new_loop

ME = Caller("anonymous")
_GROUP = 8
_WORDS = "The quick brown fox jumps over the lazy dog. " * 40
QUERIES = {
    "all": "page_size=50",
    "finished": "page_size=50&state=finished",
    "running (none)": "page_size=50&state=running",
    "cancelled (1 in 1,000)": "page_size=50&failure_class=cancelled",
    "class tool (none)": "page_size=50&failure_class=tool",
    "the oldest group": "page_size=50&group_id=group-0",
    "no such group": "page_size=50&group_id=nowhere",
    "no such agent": "page_size=50&agent=nowhere",
    "a label (1 in 10,000)": "page_size=50&label=step%3D7",
    "text that all have": "page_size=50&text=LAZY%20dog",
    "text that none has": "page_size=50&text=unicorn",
    "all, in full": "page_size=50&view=full",
    "1,000 of all": "page_size=1000",
    "1,000, in full": "page_size=1000&view=full",
}


class Short(Agent):
    """Ends at once; some rollouts wait until they are cancelled."""

    name = "short"

    async def play(self, run: Run) -> None:
        """Do nothing, or wait."""
        if run.metadata.get("waits"):
            await asyncio.Event().wait()


class LoopDelay:
    """Measures for how long the event loop was blocked at most, in seconds: by the clock, and by the CPU time of its thread.

    On a busy machine the clock counts the time of other programs, too.
    """

    def __init__(self) -> None:
        self.longest = (0.0, 0.0)

    async def watch(self) -> None:
        """Measure until cancelled."""
        before = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.0005)
            now = time.perf_counter(), time.thread_time()
            self.longest = max(self.longest[0], now[0] - before[0]), max(self.longest[1], now[1] - before[1])
            before = now


async def fill(registry: RolloutRegistry, rollouts: int) -> None:
    """Start rollouts and wait for their ends. One in a thousand is cancelled."""
    for number in range(rollouts):
        waits = number % 1000 == 999
        spec = spec_pb2.RolloutSpec(
            rollout_id=f"rollout-{number}",
            group_id=f"group-{number // _GROUP}",
            messages=[message_pb2.Message(json=json.dumps({"role": "user", "content": f"{number}: {_WORDS}"}))],
            completions=spec_pb2.Target(url="http://127.0.0.1:9"),
            tokenizer=spec_pb2.Tokenizer(name="toy"),
            labels={"step": str(number % 10_000)},
            metadata_json=json.dumps({"waits": waits}),
        )
        request = start_request(pb.StartRolloutRequest(spec=spec), ME)
        rollout, _ = registry.start(registry.admit(request))
        if waits:
            await asyncio.sleep(0)
            registry.cancel(Selection(ME, uids=(rollout.uid,)), "enough")
        if number % 100 == 0:
            while registry.running + registry.queued > 50:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0)
    while registry.running + registry.queued:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def read(port: int, path: str) -> dict[str, Any]:
    """Call the REST API."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        found: dict[str, Any] = json.load(response)
    return found


async def measured(port: int, query: str) -> tuple[list[float], tuple[float, float], dict[str, Any]]:
    """Call a list five times. Returns the seconds of each call, the longest delay of the event loop, and the last page."""
    delay, seconds, page = LoopDelay(), list[float](), dict[str, Any]()
    watching = asyncio.create_task(delay.watch())
    await asyncio.sleep(0.01)
    for _ in range(5):
        began = time.perf_counter()
        page = await asyncio.to_thread(read, port, f"/v1/rollouts?{query}")
        seconds.append(time.perf_counter() - began)
    watching.cancel()
    return seconds, delay.longest, page


async def deep_page(port: int, pages: int) -> str:
    """Return the query of the page of 50 after this many pages of 1,000."""
    token = ""
    for _ in range(pages):
        page = await asyncio.to_thread(read, port, f"/v1/rollouts?page_size=1000&page_token={token}")
        token = page["next_page_token"]
    return f"page_size=50&page_token={token}"


async def compare(rollouts: int) -> None:
    """Print a table of lists."""
    settings = Settings(
        _env_file=None,
        host="127.0.0.1",
        grpc_port=0,
        http_port=0,
        tokenizers={"toy": TOY_TOKENIZER},
        max_records=rollouts,
        max_record_bytes=2**40,
        record_ttl_seconds=10**6,
    )
    async with Server([Short()], settings) as server:
        await fill(server._registry, rollouts)
        gc.collect()
        gc.freeze()
        print(f"{rollouts:,} rollouts, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,} MiB")
        print(
            "| List | Median | Longest | Loop blocked | CPU of that | Rollouts | Further pages |\n|---|---|---|---|---|---|---|"
        )
        deep = {"all, from the middle on": await deep_page(server.http_port, rollouts // 2000)}
        for name, query in (QUERIES | deep).items():
            seconds, longest, page = await measured(server.http_port, query)
            row = (f"{1000 * value:.1f} ms" for value in (sorted(seconds)[2], max(seconds), *longest))
            print(f"| {name} | {' | '.join(row)} | {len(page['rollouts'])} | {bool(page['next_page_token'])} |")
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,} MiB at most")


def main(rollouts: Annotated[int, typer.Argument(help="Number of rollouts.")] = 100_000) -> None:
    """Print a Markdown table: pages of 50 rollouts over the REST API, whose gateway is in the server's process."""
    logging.disable(logging.INFO)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(compare(rollouts))


if __name__ == "__main__":
    typer.run(main)
