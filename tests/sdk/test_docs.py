"""The code for agent authors in docs/migrating.md runs as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from rollout_server import sdk
from rollout_server.sdk.testing import RolloutCompletionTracker, create_mock_trainer_app, patch_httpx_for_mock_trainer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


def test_the_agent_of_the_page_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    shown: dict[str, Any] = {}
    exec(compile(code, "migrating.md", "exec"), shown)
    tracker = RolloutCompletionTracker()
    patch_httpx_for_mock_trainer(TestClient(create_mock_trainer_app(tracker)), monkeypatch)
    body = {
        "rollout_id": "r",
        "server_url": "http://trainer:8080",
        "messages": [{"role": "user", "content": "Hello"}],
        "completion_params": {},
    }
    with TestClient(shown["app"]) as client:
        assert client.post("/v1/rollout/init", json=body).status_code == 202
        assert tracker.wait(30)
    assert (tracker.responses[0]["status"], tracker.responses[0]["reward"]) == ("COMPLETED", 1.0)


def test_the_submodules_of_the_page_are_there() -> None:
    (listed,) = re.findall(r"submodules \((.*?)\)", PAGE, flags=re.DOTALL)
    room = Path(sdk.__file__).parent
    for name in re.findall(r"`([\w.]+)`", listed):
        path = room.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), name
