"""The calculator's tools, for a trainer that has no gateway to fetch them from."""

from __future__ import annotations

import json
from typing import Any

from rollout_server.calculator import Calculator


def calculator_tools() -> list[dict[str, Any]]:
    """The tools, in the shape of `GET /tools`."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters_json_schema),
            },
        }
        for tool in Calculator().tools
    ]
