"""Types of parameters and results of the tests' tools."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from enum import Enum, IntEnum
from typing import Annotated

from pydantic import BaseModel, Field

Number = int | float


class Colour(Enum):
    """What paint has."""

    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Point(BaseModel):
    """A place."""

    title: str
    x: Annotated[Number, Field(description="To the right", ge=0)]
    at: date | None = None


class Node(BaseModel):
    """Contains itself."""

    inner: list[Node] = []


@dataclass
class Size:
    width: int
