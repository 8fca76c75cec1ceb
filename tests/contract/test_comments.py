"""The comments are part of the contract: each rpc documents its status codes and who may retry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from .project import ROOT, buf, needs_buf

pytestmark = needs_buf

SERVICES = {"AgentService", "RolloutService", "TrainerService", "CompletionService", "OutcomeService", "ToolService"}
CODES = re.compile(rf"\b({'|'.join(code.name for code in grpc.StatusCode)})\b")
RETRY = re.compile(r"\bretr(y|ied|ies)\b", re.IGNORECASE)

# Path of a method in a file's source info: field 6 of the file (services), field 2 of a service (methods).
_SERVICE, _METHOD = 6, 2


@pytest.fixture(scope="module")
def comments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The comment of each rpc, by "Service.Rpc"."""
    image = tmp_path_factory.mktemp("image") / "contract.binpb"
    run = buf(ROOT, "build", "--as-file-descriptor-set", "-o", str(image))
    assert run.returncode == 0, run.stderr.decode()
    return dict(_rpcs(image))


def _rpcs(image: Path) -> Iterator[tuple[str, str]]:
    for file in FileDescriptorSet.FromString(image.read_bytes()).file:
        told = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        for path, name in _methods(file):
            yield name, told.get(path, "")


def _methods(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    for s, service in enumerate(file.service):
        for m, method in enumerate(service.method):
            yield (_SERVICE, s, _METHOD, m), f"{service.name}.{method.name}"


def test_all_services_are_there(comments: dict[str, str]) -> None:
    assert {name.split(".")[0] for name in comments} == SERVICES


def test_every_rpc_names_status_codes_or_retry_rights(comments: dict[str, str]) -> None:
    silent = [name for name, text in comments.items() if not CODES.search(text) and not RETRY.search(text)]
    assert silent == []


def test_codes_are_spelled_as_grpc_spells_them(comments: dict[str, str]) -> None:
    """A word in capitals before a colon is a status code and must be spelled correctly."""
    words = {word for text in comments.values() for word in re.findall(r"\b([A-Z][A-Z_]{5,}):", text)}
    known = {code.name for code in grpc.StatusCode}
    reasons = {word for text in comments.values() for word in re.findall(r"[Rr]eason ([A-Z_]+)", text)}
    assert words <= known | reasons
