"""Flags of `rollout eval` for its dataset, through the real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Invoke, complaint, document

GOLDEN = Path(__file__).parents[1] / "golden" / "datasets"
RED = "data:image/png;base64,iVBORw0KGgo"
PROVIDER = """
from rollout_server import Agent, Run


class Provider(Agent):
    name = "provider"

    def dataset(self, split: str):
        for number in range(3):
            yield {"prompt": f"{split} {number}", "answer": number}

    async def reward(self, run: Run):
        return float(run.metadata["ground_truth"] == run.metadata["answer"])
"""


class ChatServer(ThreadingHTTPServer):
    """A server of chat completions that keeps the messages of each request."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), ChatHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.conversations.append(body["messages"])
        message = {"role": "assistant", "content": "red"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        content = json.dumps({"id": "c", "model": "m", "choices": choices, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def results(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()[1:]]


def prompts(name: str) -> list[str]:
    return [message["content"] for line in results(name) for message in line["messages"] if message["role"] == "user"]


@pytest.mark.parametrize("endpoint", [("openai", "--model", "m"), ("http-plain",)], ids=["engine", "trainer"])
def test_images_reach_the_endpoint_as_content_parts(
    project: Path, invoke: Invoke, chat: ChatServer, endpoint: tuple[str, ...]
) -> None:
    flags = ("--dialect", *endpoint, "--concurrency", "1", "--json")
    told = invoke("eval", "agent.py", str(GOLDEN / "images"), "--model-url", chat.url, *flags)
    assert told.exit_code == 0, told.stderr
    assert document(told)["summary"]["finished"] == 2
    assert "images: 2 rows; prompt from 'prompt', images from 'images', ground_truth from 'answer'" in told.stderr
    for conversation in chat.conversations:
        [image, text] = conversation[0]["content"]
        assert (image["type"], image["image_url"]["url"][: len(RED)]) == ("image_url", RED)
        assert text == {"type": "text", "text": "Which colour?"}
    assert chat.conversations[0] != chat.conversations[1]
    assert [line["messages"][0]["content"] for line in results("images.results.jsonl")] == [
        conversation[0]["content"] for conversation in chat.conversations
    ]
    assert "Which colour?" in Path("images.report.html").read_text()


def test_the_agents_own_dataset_is_run(project: Path, invoke: Invoke) -> None:
    (project / "provider.py").write_text(PROVIDER)
    told = invoke("eval", "provider.py", "--json")
    assert document(told)["summary"]["mean_reward"] == 1.0
    assert "dataset of agent provider [test]: 3 rows" in told.stderr
    assert document(told)["files"] == {"results": "provider.results.jsonl", "report": "provider.report.html"}
    assert sorted(prompts("provider.results.jsonl")) == ["test 0", "test 1", "test 2"]
    assert invoke("eval", "provider.py", "--split", "train", "--limit", "1").exit_code == 0
    assert prompts("provider-train.results.jsonl") == ["train 0"]
    assert "DATASET is missing, and agent letter-counter provides none" in complaint(invoke("eval", "agent.py"))


def test_rows_are_chosen_and_resumed(project: Path, invoke: Invoke) -> None:
    """A row keeps its number when the rows are shuffled, so another choice of rows can continue the results."""
    asked = ("eval", "agent.py", str(GOLDEN / "conversations"), "--split", "train", "--concurrency", "1")
    shuffled = (*asked, "--shuffle", "5", "--offset", "1", "--limit", "2")
    assert invoke(*shuffled).exit_code == 0
    chosen = prompts("conversations-train.results.jsonl")
    assert len(chosen) == 2
    assert invoke(*asked, "--resume").exit_code == 0
    assert prompts("conversations-train.results.jsonl")[:2] == chosen
    assert sorted(prompts("conversations-train.results.jsonl")) == [f"What is {n} plus 1?" for n in range(5)]
    assert "has several splits" in complaint(invoke(*asked[:3]))
    told = invoke(*asked, "--shuffle", "-1")
    assert (told.exit_code, "--shuffle" in told.stderr) == (2, True)


def test_a_system_prompt_is_a_text_or_a_file(project: Path, invoke: Invoke) -> None:
    Path("d.csv").write_text("question\nhi\n")
    Path("system.txt").write_text("\ufeffBe brief.\n")
    asked = ("eval", "agent.py", "d.csv", "--overwrite", "--system-prompt")
    for value, system in (("Be long.", "Be long."), ("@system.txt", "Be brief.\n")):
        told = invoke(*asked, value)
        assert "prompt from 'question', no ground truth, system_prompt from --system-prompt" in told.stdout
        assert results("d.results.jsonl")[0]["messages"][0] == {"role": "system", "content": system}
    assert "absent.txt: No such file" in complaint(invoke(*asked, "@absent.txt"))
    Path("system.txt").write_bytes(b"\xff")
    assert "system.txt: --system-prompt: the file is not UTF-8" in complaint(invoke(*asked, "@system.txt"))
    Path("system.txt").write_bytes(b" " * (1024 * 1024 + 1))
    assert "the file has more than 1,048,576 bytes" in complaint(invoke(*asked, "@system.txt"))


def test_a_wrong_row_is_an_error_with_file_and_line(project: Path, invoke: Invoke) -> None:
    Path("d.jsonl").write_text('{"prompt": "a"}\n{"prompt": [{"role": "user"}]}\n')
    told = invoke("eval", "agent.py", "d.jsonl", "--json")
    assert document(told)["error"] == {
        "command": "eval",
        "kind": "failed",
        "message": "d.jsonl:2: prompt[0].content must be a text or a list of parts, not null",
        "file": "d.jsonl",
        "line": 2,
    }
