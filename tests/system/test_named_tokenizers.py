"""Tokenizers named in the settings are loaded before a server is ready."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import body
from tests.support.gateways import http_client


def settings(directory: Path) -> Settings:
    return Settings(_env_file=None, http_port=0, grpc_port=0, tokenizers={"named": directory}, tokenizers_offline=True)


async def test_the_first_rollout_finds_them_loaded(tmp_path: Path) -> None:
    directory = tmp_path / "tokenizer"
    shutil.copytree(TOY_TOKENIZER, directory)
    async with StrictTrainer(TOY_TOKENIZER) as trainer, Server([Calculator()], settings(directory)) as server:
        shutil.rmtree(directory)
        async with http_client(f"http://127.0.0.1:{server.http_port}") as client:
            answer = await client.post("/rollout", json=body("r", trainer.url) | {"tokenizer_name": "named"})
    assert answer.json()["status"] == "COMPLETED"


async def test_one_that_cannot_be_loaded_is_told_of_and_the_server_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Server([Calculator()], settings(tmp_path / "missing")) as server,
        http_client(f"http://127.0.0.1:{server.http_port}") as client,
    ):
        assert (await client.get("/readyz")).status_code == 200
    (told,) = [record.getMessage() for record in caplog.records if record.name == "rollout_server.edge.tokens.cache"]
    assert "'named'" in told
    assert str(tmp_path / "missing") in told
