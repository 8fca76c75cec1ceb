"""The snippets of docs/trainer.md and the example, run as written except for the addresses; and the library's imports."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import rollout_client.trainer
import trustme
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.start_requests import settings

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "trainer.md").read_text()
SAID = {
    "The loop": r"(4 rollouts, reward \[None, None, None, None\]\n(\d+ of \d+ stop\n){4}){2}",
    "Batches": r"a batch of 4\n4 rollouts\n",
    "Weight updates": r"\[\('step-1', 2\), \('step-2', 3\)\]\n\(1, 2\) \[-0.5, -0.5, -0.25, -0.25, -0.25\]\n",
    "Tool calls": r"ParsedCompletion\(content='Adding.', .*'\{\"a\": 1.50\}'.* reasoning='Easy.'\)\n"
    r"ParsedCompletion\(content='', .*name='add'",
    "The turn": r"([0-9a-f]+/[01]/0/1 \d+ tokens, 0 images, \d+ s left\n){2}\[True, True\]\n",
    "Without asyncio": r"step 0 \[2, 2\]\nstep 1 \[2, 2\]\n",
    "Keys and TLS": r"<Trainer of <AsyncClient rollouts.internal:50051>>\n",
    "A trainer that listens": r"<Trainer of <AsyncClient rollouts.internal:50051>>\n",
}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server with the page's tokenizer."""
    known = {"Qwen/Qwen3-8B": TOY_TOKENIZER, "toy": TOY_TOKENIZER}
    async with Server([Calculator()], settings(tokenizers=known)) as server:
        yield f"127.0.0.1:{server.grpc_port}"


async def run(*arguments: str, cwd: Path) -> str:
    """The output of a program that must succeed."""
    piped = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=cwd, stdout=piped, stderr=piped)
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


@pytest.mark.parametrize("title", SAID)
async def test_a_snippet(title: str, address: str, tmp_path: Path) -> None:
    section = next(part for part in PAGE.split("\n## ") if part.startswith(title))
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    code = code.replace("localhost:50051", address).replace("0.0.0.0:9001", "127.0.0.1:0")
    (tmp_path / "tokenizer.json").symlink_to(Path(TOY_TOKENIZER) / "tokenizer.json")
    (tmp_path / "ca.pem").write_bytes(trustme.CA().cert_pem.bytes())
    output = await run("-c", code, cwd=tmp_path)
    assert re.match(SAID[title], output), output


def test_every_snippet_is_run_and_every_parser_told_of() -> None:
    assert PAGE.count("```python") == len(SAID)
    missing = {name for name in rollout_client.trainer.parsers.__all__ if f"parsers.{name}" not in PAGE}
    assert missing == {"plain"}


async def test_the_example_loops(address: str, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "training_loop.py")
    lines = (await run(example, address, "toy", f"{TOY_TOKENIZER}/tokenizer.json", cwd=tmp_path)).splitlines()
    assert len(lines) == 2 * 2 * 4
    assert all(re.fullmatch(r"policy-[01]: advantage \+0.0 for \d+ of \d+", line) for line in lines)
    assert [line.split(":")[0] for line in lines] == ["policy-0"] * 8 + ["policy-1"] * 8


async def test_the_library_loads_nothing_heavy(tmp_path: Path) -> None:
    program = """
import sys
import grpc, grpc.aio, google.protobuf, google.rpc.error_details_pb2, google.rpc.status_pb2
theirs = set(sys.modules)
import rollout_client.trainer
ours = {name.partition(".")[0] for name in set(sys.modules) - theirs}
print(*sorted(ours - set(sys.stdlib_module_names) - {"google", "grpc", "osmosis", "rollout_client"}))
"""
    assert (await run("-c", program, cwd=tmp_path)).split() == []


def test_every_public_name_is_there() -> None:
    public = rollout_client.trainer.__all__
    assert [name for name in public if not hasattr(rollout_client.trainer, name)] == []
    assert list(public) == sorted(public)
