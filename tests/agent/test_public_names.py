"""The public names: few, cheap to import, and with a single source for the version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import rollout_server

HEAVY = (
    "transformers",
    "torch",
    "tokenizers",
    "grpc",
    "google",
    "fastapi",
    "uvicorn",
    "httpx",
    "aiohttp",
    "typer",
    "osmosis",
)


def test_the_public_names_are_there() -> None:
    assert sorted(rollout_server.__all__) == [
        "Agent",
        "AuxiliaryRule",
        "CaptureOptions",
        "Environment",
        "ExternalAgent",
        "FunctionAgent",
        "Image",
        "Judge",
        "Limits",
        "ModelFailed",
        "Program",
        "ProgramResult",
        "Reply",
        "Request",
        "RewardResult",
        "Rubric",
        "Run",
        "Step",
        "ToolContext",
        "ToolError",
        "__version__",
        "json_field",
        "mcp",
        "number_from",
        "own_loop",
        "serve",
        "tool",
        "yes_or_no",
    ]
    for name in rollout_server.__all__:
        assert getattr(rollout_server, name) is not None
    assert rollout_server.tool.__name__ == "tool"
    assert callable(rollout_server.tool)


def test_importing_loads_neither_server_nor_tokenizers() -> None:
    program = f"""
import sys
import rollout_server.calculator
print(sorted(set({HEAVY!r}) & set(sys.modules)), "rollout_server.app" in sys.modules, len(sys.modules) < 1000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False True"


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert rollout_server.__version__ == project["version"]
