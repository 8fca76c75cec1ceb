"""What the calls of an agent that owns its loop were."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Counts of the calls of one rollout. `CaptureReport` in the proto file describes the fields.

    `CallTree` counts all but `refused`: its owner also refuses calls for reasons of its own.
    """

    continued: int = 0
    parted: int = 0
    joined: int = 0
    replayed: int = 0
    abandoned: int = 0
    auxiliary: int = 0
    restored: int = 0
    dropped: int = 0
    refused: int = 0
    fixed_replies: int = 0
