"""Flags for the messages and the metadata that a rollout begins with."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Messages and metadata of one rollout."""

    prompt: Annotated[str, typer.Option(help="User message.")] = ""
    message: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON file with a message or a list of messages, instead of --prompt; - reads standard input.",
        ),
    ] = ""
    system: Annotated[str, typer.Option(help="System message before the prompt.")] = ""
    metadata: Annotated[str, typer.Option(metavar="JSON", help="JSON object that the agent reads as run.metadata.")] = (
        ""
    )
    ground_truth: Annotated[str, typer.Option(help="Sets ground_truth in the metadata, for the agent's reward.")] = ""

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages. Raises `AuthorError` for flags or a file without messages, OSError for an unreadable file."""
        from rollout_server.authoring.author_traceback import AuthorError

        if bool(self.prompt) is bool(self.message):
            raise AuthorError("exactly one of --prompt TEXT and --message FILE is needed")
        messages = _read(self.message) if self.message else [{"role": "user", "content": self.prompt}]
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def read_metadata(self) -> dict[str, Any]:
        """Return the metadata with the ground truth. Raises `AuthorError` if it is not a JSON object."""
        from rollout_server.authoring.author_traceback import AuthorError

        try:
            value = json.loads(self.metadata) if self.metadata else {}
        except (ValueError, RecursionError) as error:
            raise AuthorError(f"--metadata is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise AuthorError("--metadata must be a JSON object")
        return {**value, "ground_truth": self.ground_truth} if self.ground_truth else value


def _read(name: str) -> list[dict[str, Any]]:
    from rollout_server.authoring.author_traceback import AuthorError

    if name == "-":
        content = sys.stdin.buffer.read(_MAX_FILE_BYTES + 1)
    else:
        with Path(name).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise AuthorError(f"the file is larger than {_MAX_FILE_BYTES} bytes", name)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AuthorError(f"this is not JSON: {error}", name) from None
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in listed):
        raise AuthorError('the file must hold a message or a list of messages: objects with "role" and "content"', name)
    return listed
