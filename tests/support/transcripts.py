"""The golden transcripts, in the form that the gateway's tests compare."""

import json
import re
from typing import Any

from tests.support.golden import GOLDEN

TRANSCRIPTS = GOLDEN / "transcripts"


def exchanges(scenario: str, dialect: str = "sync") -> list[dict[str, Any]]:
    """The requests and responses of a scenario, with placeholders filled in."""
    text = (
        (TRANSCRIPTS / dialect / f"{scenario}.json").read_text().replace("http://TRAINER", "http://trainer.test:9001")
    )
    repeated = re.sub(r"REPEAT x (\d+)", lambda found: "x" * int(found[1]), text)
    return [dict(each) for each in json.loads(repeated)["exchanges"]]


def client_exchange(scenario: str, dialect: str = "sync") -> dict[str, Any]:
    """The client's first request, and its response."""
    return next(each for each in exchanges(scenario, dialect) if each["to"] == "server")


def scenarios(prefix: str, dialect: str = "sync") -> list[str]:
    return sorted(path.stem for path in (TRANSCRIPTS / dialect).glob(f"{prefix}*.json"))


def without_nulls(value: Any) -> Any:
    """Drop nulls: null and absent count as equal when transcripts are compared."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
