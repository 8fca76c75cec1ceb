"""The client depends only on grpcio and protobuf, and works with the oldest versions that trainers pin."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.conftest import CALCULATOR_EVENTS, ServerAndTrainer

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ROOT / ".venv-oldest" / "bin" / "python"

IMPORTS = """
import sys
import grpc, google.protobuf, google.rpc.error_details_pb2, google.rpc.status_pb2
theirs = set(sys.modules)
import rollout_client
ours = {name.partition(".")[0] for name in set(sys.modules) - theirs}
print(*sorted(ours - set(sys.stdlib_module_names) - {"google", "grpc", "osmosis", "rollout_client"}))
"""

SCRIPT = """
import asyncio, sys
from importlib.metadata import version
from rollout_client import AsyncClient, Client, NotFound, messages, samples

address, trainer = sys.argv[1:]
asked = dict(
    messages=[{"role": "user", "content": "Please calculate 5 plus 3, then multiply by 2."}],
    completions=trainer,
    tokenizer="toy",
)

async def main():
    async with AsyncClient(address) as client:
        run = client.run(**asked, detail="full")
        return [event.sequence async for event in run], run.outcome

with Client(address) as client:
    started = client.start(**asked)
    rollout = client.wait(started.uid, view="samples", timeout=60)
    sequences = [event.sequence for event in client.watch(started.uid)]
    try:
        client.get("nowhere")
    except NotFound as error:
        assert error.reason == "ROLLOUT_NOT_FOUND", error
again, outcome = asyncio.run(main())
assert again == sequences
assert "16" in messages(outcome)[-1]["content"]
assert samples(outcome)[0].response_mask == samples(rollout.outcome)[0].response_mask
assert not any(name.startswith(("rollout_server", "httpx", "aiohttp", "pydantic")) for name in sys.modules)
print(version("grpcio"), version("protobuf"), len(sequences))
"""


async def python(where: str | Path, *arguments: str) -> str:
    """Run Python with only the client and the generated code importable; return its output."""
    path = os.pathsep.join(str(ROOT / name) for name in ("generated", "gateway"))
    process = await asyncio.create_subprocess_exec(
        where,
        *arguments,
        # A proxy for external addresses, which connections to the server must not use.
        env={**os.environ, "PYTHONPATH": path, "http_proxy": "http://127.0.0.1:9", "grpc_proxy": "http://127.0.0.1:9"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode().strip()


async def test_importing_the_client_imports_nothing_else() -> None:
    assert await python(sys.executable, "-c", IMPORTS) == ""


@pytest.mark.skipif(not OLDEST.exists(), reason="no .venv-oldest; `make oldest` makes it")
async def test_it_works_beside_the_oldest_pins(world: ServerAndTrainer) -> None:
    told = await python(OLDEST, "-c", SCRIPT, world.address, world.trainer.url)
    assert told == f"1.76.0 6.31.1 {CALCULATOR_EVENTS}"


async def test_it_works_beside_the_newest(world: ServerAndTrainer) -> None:
    told = await python(sys.executable, "-c", SCRIPT, world.address, world.trainer.url)
    assert told.endswith(f" {CALCULATOR_EVENTS}")
