"""The snippet of docs/engines.md, run as it is written, save for the addresses."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings

from tests.engines.model import ToyModel
from tests.engines.rolling import CALL, DONE
from tests.engines.served import VllmEngine, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()


async def test_the_snippet_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    engine = VllmEngine(ToyModel([CALL, DONE]), model_name="Qwen/Qwen3-8B")
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False}
    async with serving(engine), Server([Calculator()], Settings(_env_file=None, **ports)) as server:
        code = code.replace("http://localhost:8000", engine.url).replace(
            "localhost:50051", f"127.0.0.1:{server.grpc_port}"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    first, second = engine.model.seen
    length = len(second.prompt) + len(second.ids) - len(first.prompt)
    trained = len(first.ids) + len(second.ids)
    assert output.decode() == f"{len(first.prompt)} {trained} of {length} True\n"
