"""Example bodies of the OpenAPI description, which work as they are, except for the addresses."""

import json
from importlib import resources
from typing import Any, Final

_BODIES: Final = json.loads(resources.files("rollout_gateway").joinpath("openapi.json").read_text())["bodies"]
EXAMPLE: Final[dict[str, Any]] = _BODIES["RolloutBody"]["example"]
"""Of `POST /rollout`."""
INIT_EXAMPLE: Final[dict[str, Any]] = _BODIES["InitBody"]["example"]
"""Of `POST /v1/rollout/init`."""
