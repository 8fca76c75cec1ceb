"""`serve_agent_loop` and an ASGI server, each as a separate process."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
from rollout_server.testing import TrainerDialect
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import TOKENIZER, body
from tests.support.processes import Serving, environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from rollout_server.sdk import serve_agent_loop
from tests.sdk.calculator_agent import agent_loop
serve_agent_loop(agent_loop, host="127.0.0.1", port=0, api_key="server-key")
"""
APP = """
import uvicorn
from rollout_server.sdk import create_app
from tests.sdk.calculator_agent import agent_loop
uvicorn.run(create_app(agent_loop), host="127.0.0.1", port=0)
"""


async def running(program: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        cwd=ROOT,
        env=environment(ROLLOUT_GRPC_PORT="0", ROLLOUT_TOKENIZERS=f"{TOKENIZER}=toy"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_loop_is_served_until_it_is_told_to_stop() -> None:
    served = Serving(await running(PROGRAM))
    try:
        await served.start()
        async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
            assert (await client.get("/health")).json()["agent_loop"] == "calculator"
            assert (await client.post("/v1/rollout/init", json={})).status_code == 401
        served.send(signal.SIGTERM)
        assert await served.ended() == 0
        assert "server-key" not in served.text
    finally:
        if served.process.returncode is None:
            served.process.kill()


async def test_by_default_a_trainer_on_the_same_machine_is_called() -> None:
    """In the earlier SDK's examples, agent and trainer run on the same machine and the agent listens on all addresses."""
    served = Serving(await running(PROGRAM.replace('host="127.0.0.1", ', "").replace(', api_key="server-key"', "")))
    try:
        await served.start()
        async with (
            StrictTrainer(tools_from=served.url, dialect=TrainerDialect.EITHER) as trainer,
            httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=60) as client,
        ):
            answer = (await client.post("/rollout", json=body("r", trainer.url))).json()
        assert answer["status"] == "COMPLETED", answer["error_message"]
    finally:
        if served.process.returncode is None:
            served.process.kill()
        await served.ended()


async def test_uvicorn_runs_the_app() -> None:
    process = await running(APP)
    assert process.stderr is not None
    try:
        port = 0
        async for line in process.stderr:
            if "Uvicorn running on http://127.0.0.1:" in (text := line.decode()):
                port = int(text.split("http://127.0.0.1:")[1].split()[0])
                break
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            tools = (await client.get("/tools")).json()["tools"]
        assert len(tools) == 4
        process.send_signal(signal.SIGINT)
        _, rest = await process.communicate()
        assert "Application shutdown complete" in rest.decode()
    finally:
        if process.returncode is None:
            process.kill()
