"""The options of channels and servers: gRPC silently ignores unknown ones, so each must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("server", "gateway") for path in sorted((ROOT / folder).rglob("*.py"))]
OPTIONS = {option for path in SOURCES for option in re.findall(r'"(grpc\.[a-z0-9_.]+)",', path.read_text())}
LIBRARY = Path(cygrpc.__file__).read_bytes()


def known(option: str) -> bool:
    """Whether the gRPC library contains this option name."""
    return option.encode() + b"\x00" in LIBRARY


def test_options_are_found() -> None:
    assert len(OPTIONS) > 10


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_the_library_knows_the_option(option: str) -> None:
    assert known(option)


def test_an_option_that_does_not_exist_is_noticed() -> None:
    assert not known("grpc.http2.min_recv_ping_interval_without_data_ms")
