"""The golden transcripts beside the repository; tests that need them skip where they are not."""

import json
from pathlib import Path
from typing import Any

import pytest

SYNC = Path(__file__).resolve().parents[3] / "shared" / "transcripts" / "sync"

needs_transcripts = pytest.mark.skipif(not SYNC.is_dir(), reason="../shared/transcripts/sync is not beside this clone")


def client_exchange(scenario: str) -> dict[str, Any]:
    """What the client asked and was answered, with the place holders filled in."""
    text = (SYNC / f"{scenario}.json").read_text().replace("http://TRAINER", "http://trainer.test:9001")
    exchanges = json.loads(text)["exchanges"]
    return dict(next(each for each in exchanges if each["to"] == "server"))


def scenarios(prefix: str) -> list[str]:
    return sorted(path.stem for path in SYNC.glob(f"{prefix}*.json"))


def without_nulls(value: Any) -> Any:
    """Null and absent are the same when transcripts are compared."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
