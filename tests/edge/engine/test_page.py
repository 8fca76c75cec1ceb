"""The snippet of docs/engines.md, run as written except for the addresses."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings

from tests.edge.engine.rolling import CALL, DONE
from tests.support.engine_model import EngineModel
from tests.support.engines import VllmEngine, serving

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "engines.md").read_text()


async def snippet(engine: str, **settings: Any) -> tuple[int | None, str, str]:
    """The snippet's exit code, output and errors, with an engine at a URL."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False}
    async with Server([Calculator()], Settings(_env_file=None, **ports, **settings)) as server:
        code = code.replace("http://localhost:8000", engine).replace("localhost:50051", f"127.0.0.1:{server.grpc_port}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_where_there_is_no_engine_the_snippet_says_so() -> None:
    with socket.socket() as nobody:  # bound, but not listening
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, output, errors = await snippet(url, retries=0)
    assert (code, output) == (1, "")
    assert f"the engine at {url.removeprefix('http://')} could not be reached" in errors
    assert "Traceback" not in errors


async def test_the_snippet_runs() -> None:
    engine = VllmEngine(EngineModel([CALL, DONE]), model_name="Qwen/Qwen3-8B")
    async with serving(engine):
        code, output, errors = await snippet(engine.url)
    assert code == 0, errors
    first, second = engine.model.seen
    length = len(second.prompt) + len(second.ids) - len(first.prompt)
    trained = len(first.ids) + len(second.ids)
    assert output == f"{len(first.prompt)} {trained} of {length} True\n"
