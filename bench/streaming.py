"""The trainer's part of the rows of whole servers in `bench.dialects`: `python -m bench.streaming SERVER DIRECTORY ROUNDS`.

Reads a JSON list of texts. In each round it plays one rollout for each of them over a stream, with CompletionService, and over HTTP
with masks. Prints a JSON object for each rollout: the way, the place of its text, and the bytes of each turn's request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from rollout_client import AsyncClient
from rollout_client.training import TrainerStream
from rollout_server.testing.trainer import StrictTrainer

TOKENIZER = "measured"
HTTP, UNARY, STREAM = "http", "unary", "stream"
WAYS = (HTTP, UNARY, STREAM)


def main(server: str, directory: Path, rounds: int) -> None:
    """Play and print."""
    asyncio.run(_play(server, directory, json.load(sys.stdin), rounds))


async def _play(server: str, directory: Path, texts: Sequence[str], rounds: int) -> None:
    async with (
        StrictTrainer(directory, api_key=None) as trainer,
        AsyncClient(server) as client,
        trainer.connected(server) as stream,
    ):
        for turn in range(rounds):
            for way in WAYS:
                for place, text in enumerate(texts):
                    spec = _spec(trainer, way, f"{way}-{place}-{turn}", text)
                    outcome = await (_streamed(stream, spec) if way == STREAM else _asked(client, spec))
                    _tell(trainer, way, place, spec.rollout_id, outcome)
