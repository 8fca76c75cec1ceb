"""Recorded data in the repository: the transcripts of the reference implementations, and their tokenizer."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SYNC = GOLDEN / "transcripts" / "sync"
INIT = GOLDEN / "transcripts" / "init"
CONFORMANCE = GOLDEN / "tokenizers" / "conformance"
"""The tokenizer with which the transcripts were recorded."""
