"""The golden transcripts, read as the gateway's tests compare them."""

import json
import re
from typing import Any

from tests.support.golden import GOLDEN

TRANSCRIPTS = GOLDEN / "transcripts"


def exchanges(scenario: str, dialect: str = "sync") -> list[dict[str, Any]]:
    """Who asked whom what in a scenario, with the place holders filled in."""
    text = (
        (TRANSCRIPTS / dialect / f"{scenario}.json").read_text().replace("http://TRAINER", "http://trainer.test:9001")
    )
    repeated = re.sub(r"REPEAT x (\d+)", lambda found: "x" * int(found[1]), text)
    return [dict(each) for each in json.loads(repeated)["exchanges"]]


def client_exchange(scenario: str, dialect: str = "sync") -> dict[str, Any]:
    """What the client asked and was answered first."""
    return next(each for each in exchanges(scenario, dialect) if each["to"] == "server")


def scenarios(prefix: str, dialect: str = "sync") -> list[str]:
    return sorted(path.stem for path in (TRANSCRIPTS / dialect).glob(f"{prefix}*.json"))


def without_nulls(value: Any) -> Any:
    """Null and absent are the same when transcripts are compared."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
