"""The recorded transcripts of the dialect, where they are at hand."""

import json
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[3] / "shared"
SYNC = SHARED / "transcripts" / "sync"
CONFORMANCE = SHARED / "tokenizers" / "conformance"


def recorded() -> dict[str, dict[str, Any]]:
    """The transcripts in which a trainer is called, by name; empty where there are none."""
    read = {path.stem: json.loads(path.read_text()) for path in sorted(SYNC.glob("*.json"))}
    return {name: script for name, script in read.items() if to_trainer(script)}


def to_trainer(transcript: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls that the trainer got, with what it answered."""
    return [exchange for exchange in transcript["exchanges"] if exchange["to"] == "trainer"]


def tools() -> list[Any]:
    """The tools that the recorded trainers rendered."""
    told: list[Any] = json.loads((SYNC / "tools.json").read_text())["exchanges"][0]["response"]["tools"]
    return told


needs_recordings = pytest.mark.skipif(not SYNC.is_dir(), reason="../shared/transcripts/sync is not beside this clone")
