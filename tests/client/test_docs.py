"""The snippets of docs/client.md, run as written except for the addresses."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import rollout_client
import trustme
from rollout_server import ExternalAgent
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "client.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SAID = {
    "Start a rollout": r"5 plus 3 equals 8\. .*16.*\n\d+ \d+ of \d+\n",
    "Follow": r"1 accepted\n(?:.*\n)*\d+ finished\n[\w-]+ stop\nagain: 4\n",
    "Groups": r"(\d [\w-]+ (True|False)\n){8}[678] of 8\n",
    "Prompts": r"(\d+ \['add', 'subtract', 'multiply', 'divide'\] \d .*\n){2}",
    "Agents that run elsewhere": r"ModelAccess\(base_url='http://127\.0\.0\.1:\d+/r/[\w-]+'\)\n1\.0\n",
    "With asyncio": r"(?:\d turn \d\n)+\['stop', 'stop', 'stop', 'stop'\]\n\[('[\w-]+'(, )?){4}\]\n",
    "Find": r"\(\)\n\(\)\n\['calculator', 'remote'\] \['add', 'subtract', 'multiply', 'divide'\] \d",
    "Policies": r"\(\)\n",
    "When a call fails": r"spec\.completions\.url .*\nNOT_FOUND ROLLOUT_NOT_FOUND False None \w+\nthere is no rollout",
    "Retries": r"False\n0\n",
    "API keys": r"(<Client .*>\n){4}Credentials\(\.\.\.\)",
}


@pytest.fixture
async def addresses() -> AsyncIterator[dict[str, str]]:
    """The page's addresses, mapped to a server and a trainer that run here."""
    settings = Settings(
        _env_file=None, host="127.0.0.1", http_port=0, grpc_port=0, tokenizers={"Qwen/Qwen3-8B": TOY_TOKENIZER}
    )
    async with (
        Server([Calculator(), ExternalAgent(name="remote")], settings) as server,
        StrictTrainer(tools_from=f"http://127.0.0.1:{server.http_port}") as trainer,
    ):
        yield {"http://localhost:9001": trainer.url, "localhost:50051": f"127.0.0.1:{server.grpc_port}"}


@pytest.mark.parametrize("title", SAID)
async def test_a_snippet(title: str, addresses: dict[str, str], tmp_path: Path) -> None:
    section = next(part for part in PAGE.split("\n## ") if part.startswith(title))
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    for written, real in addresses.items():
        code = code.replace(written, real)
    authority = trustme.CA()
    cert = authority.issue_cert("client@example.org")
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "client.pem").write_bytes(cert.cert_chain_pems[0].bytes())
    (tmp_path / "client.key").write_bytes(cert.private_key_pem.bytes())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        cwd=tmp_path,
        env={**os.environ, "ROLLOUT_API_KEY": "hush", "TRAINER_KEY": "hush"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert re.match(SAID[title], output.decode()), output.decode()
    assert "hush" not in output.decode()


async def test_the_snippet_about_failures(addresses: dict[str, str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "failures.md").read_text(), flags=re.DOTALL)
    for written, real in addresses.items():
        code = code.replace(written, real)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert (output.decode(), errors.decode()) == ("1 samples train; dropped: {}\n", "")


def test_every_snippet_is_run() -> None:
    assert len(BLOCKS) == len(SAID)


def test_every_error_is_told_of() -> None:
    public = (getattr(rollout_client, name) for name in rollout_client.__all__)
    errors = {each.__name__ for each in public if isinstance(each, type) and issubclass(each, Exception)}
    assert {name for name in errors if f"`{name}`" not in PAGE} == set()
