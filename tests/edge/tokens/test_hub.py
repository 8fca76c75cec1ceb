"""Loading from a local Hub: the real client libraries request the toy tokenizer from a small server.

The libraries read the Hub's address at import, so each request is made in a new interpreter.
"""

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.tokenizer import TOY_TOKENIZER

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    file: (TOY_TOKENIZER / file).read_bytes()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
}


class Hub(BaseHTTPRequestHandler):
    """A Hub with org/toy at one commit and a gated org/gated. It drops connections for org/broken."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/").removeprefix("api/models/")
        name, rest = "/".join(path.split("/")[:2]), path.split("/")[2:]
        if name == "org/broken":
            self.close_connection = True
        elif name == "org/gated":
            self._refuse(HTTPStatus.FORBIDDEN, "GatedRepo")
        elif name != "org/toy":
            self._refuse(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif rest[1:2] not in ([], ["main"], [COMMIT]):
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        elif rest[:1] == ["resolve"]:
            self._file("/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            self._send(
                json.dumps([{"type": "file", "path": f, "size": len(FILES[f]), "oid": f} for f in FILES]).encode()
            )
        else:
            self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in FILES]}).encode())

    def _file(self, file: str) -> None:
        if file not in FILES:
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
        else:
            self._send(FILES[file], ETag=f'"{hashlib.sha1(FILES[file]).hexdigest()}"')

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._send(b"{}", status, **{"X-Error-Code": code})

    def _send(self, body: bytes, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def answers(names: list[tuple[str, str]]) -> list[str]:
    """The result of loading each name: the stop token, or the error."""
    tokenizers = Tokenizers(LoaderSettings())
    said = []
    for name, revision in names:
        try:
            stop = (await tokenizers.load(TokenizerName(name, revision))).probed.final
            said.append(stop.text if stop is not None else "")
        except RolloutFailed as failed:
            said.append(failed.failure.message)
    await tokenizers.close()
    return said


async def ask(address: str, home: Path, *names: tuple[str, str]) -> list[str]:
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = (
        "import asyncio, json, sys; from tests.edge.tokens.test_hub import answers;"
        "print(json.dumps(asyncio.run(answers(json.loads(sys.argv[1])))))"
    )
    pipe = asyncio.subprocess.PIPE
    root = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, json.dumps(names)), env=environment, cwd=root, stdout=pipe, stderr=pipe
    )
    out, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (0, "")
    said: list[str] = json.loads(out)
    assert all("127.0.0.1" not in text and str(home) not in text for text in said)
    return said


async def test_what_the_hub_says(hub, tmp_path) -> None:
    names = [
        ("org/toy", ""),
        ("org/toy", COMMIT),
        ("org/toy", "v9"),
        ("org/none", ""),
        ("org/gated", ""),
        ("org/broken", ""),
    ]
    toy, pinned, revision, unknown, gated, broken = await ask(hub, tmp_path, *names)
    assert (toy, pinned) == ("<|im_end|>", "<|im_end|>")
    assert revision == "tokenizer 'org/toy' has no revision 'v9'"
    assert unknown.startswith("tokenizer 'org/none' is unknown: the Hugging Face Hub has no such name")
    assert gated.startswith("tokenizer 'org/gated' is gated")
    assert broken.startswith("tokenizer 'org/broken' is not on this server, and the Hugging Face Hub was not there")


async def test_what_was_fetched_once_is_there_without_the_hub(hub, tmp_path) -> None:
    assert await ask(hub, tmp_path, ("org/toy", "")) == ["<|im_end|>"]
    toy, other = await ask("http://127.0.0.1:9", tmp_path, ("org/toy", ""), ("org/other", ""))
    assert toy == "<|im_end|>"
    assert other.startswith("tokenizer 'org/other' is not on this server, and the Hugging Face Hub was not there")
