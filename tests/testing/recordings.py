"""The golden transcripts of the synchronous HTTP API, for the strict trainer's tests."""

import json
from typing import Any

from tests.support.golden import SYNC


def recorded() -> dict[str, dict[str, Any]]:
    """The transcripts in which a trainer is called, by name."""
    read = {path.stem: json.loads(path.read_text()) for path in sorted(SYNC.glob("*.json"))}
    return {name: script for name, script in read.items() if to_trainer(script)}


def to_trainer(transcript: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests to the trainer, with its responses."""
    return [exchange for exchange in transcript["exchanges"] if exchange["to"] == "trainer"]


def tools() -> list[Any]:
    """The tools that the recorded trainers rendered."""
    told: list[Any] = json.loads((SYNC / "tools.json").read_text())["exchanges"][0]["response"]["tools"]
    return told
