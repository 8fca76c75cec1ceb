"""`create_app` under FastAPI's TestClient, with the mock trainer of the earlier SDK's documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from rollout_server.sdk import (
    RolloutContext,
    RolloutResult,
    RolloutServerSettings,
    RolloutSettings,
    configure,
    create_app,
    reset_settings,
)
from rollout_server.sdk.testing import (
    RolloutCompletionTracker,
    create_mock_trainer_app,
    patch_httpx_for_mock_trainer,
)
from rollout_server.settings import WrongSettings

from tests.sdk.calculator_agent import CalculatorAgentLoop
from tests.sdk.loops import Loop, user


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> RolloutCompletionTracker:
    tracker = RolloutCompletionTracker()
    patch_httpx_for_mock_trainer(TestClient(create_mock_trainer_app(tracker)), monkeypatch)
    return tracker


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(CalculatorAgentLoop(), max_concurrent=2)) as client:
        yield client


def body(rollout_id: str = "r", **changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "server_url": "http://trainer:8080",
        "messages": [user("Please calculate 5 plus 3.")],
        "completion_params": {"temperature": 0.7},
    } | changes


def test_it_is_healthy_and_knows_its_loop(client: TestClient) -> None:
    told = client.get("/health").json()
    assert (told["status"], told["agent_loop"]) == ("healthy", "calculator")


def test_a_rollout_runs_in_the_background_and_the_trainer_is_told(
    client: TestClient, tracker: RolloutCompletionTracker
) -> None:
    accepted = client.post("/v1/rollout/init", json=body())
    assert accepted.status_code == 202
    assert [tool["function"]["name"] for tool in accepted.json()["tools"]] == ["add", "subtract", "multiply", "divide"]
    assert tracker.wait(timeout=30)
    [told] = tracker.responses
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "stop")
    assert [message["role"] for message in told["final_messages"]] == ["user", "assistant", "tool", "assistant"]
    assert told["metrics"]["num_tool_calls"] == 1
    assert told["extra_fields"] == {}
    again = client.post("/v1/rollout/init", json=body())
    assert again.json() == accepted.json()
    assert len(tracker.responses) == 1


def test_an_api_key_is_demanded_by_both_dialects_but_not_for_health() -> None:
    with TestClient(create_app(CalculatorAgentLoop(), api_key="secret-key")) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/rollout/init", json=body()).status_code == 401
        assert client.get("/tools").status_code == 401
        for key in ("Bearer secret-key", "secret-key"):
            wrong = client.post("/v1/rollout/init", json={}, headers={"authorization": key})
            assert wrong.status_code == 422


def test_hooks_run_in_order_and_a_failing_one_stops_the_start() -> None:
    heard: list[str] = []

    def hook(word: str) -> Any:
        async def run() -> None:
            heard.append(word)

        return run

    with TestClient(create_app(CalculatorAgentLoop(), on_startup=hook("up"), on_shutdown=hook("down"))) as client:
        assert client.get("/health").status_code == 200
        assert heard == ["up"]
    assert heard == ["up", "down"]

    async def fail() -> None:
        raise RuntimeError("no database")

    with (
        pytest.raises(RuntimeError, match="no database"),
        TestClient(create_app(CalculatorAgentLoop(), on_startup=fail)),
    ):
        pass


def test_without_its_lifespan_it_says_what_is_missing() -> None:
    answer = TestClient(create_app(CalculatorAgentLoop())).get("/health")
    assert answer.status_code == 503
    assert "with TestClient(app) as client" in answer.json()["detail"]


def test_it_starts_again_after_it_has_stopped() -> None:
    app = create_app(CalculatorAgentLoop())
    for _ in range(2):
        with TestClient(app) as client:
            assert client.get("/health").status_code == 200


def test_its_owner_may_add_routes() -> None:
    app = create_app(CalculatorAgentLoop())

    @app.get("/mine")
    def mine() -> dict[str, str]:
        return {"route": "mine"}

    with TestClient(app) as client:
        assert client.get("/mine").json() == {"route": "mine"}
        assert client.get("/openapi.json").json()["info"]["title"] == "Rollout gateway"
        assert client.get("/nowhere").status_code == 404


def test_two_of_them_live_in_one_process(tracker: RolloutCompletionTracker) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        return ctx.complete(list(ctx.request.messages))

    with TestClient(create_app(CalculatorAgentLoop())) as one, TestClient(create_app(Loop(play))) as other:
        assert one.get("/health").json()["agent_loop"] == "calculator"
        assert other.get("/health").json()["agent_loop"] == "loop"
        assert other.post("/v1/rollout/init", json=body()).status_code == 202
        assert tracker.wait(30)
        assert tracker.responses[0]["metrics"]["num_llm_calls"] == 0


def test_debug_files_stay_in_their_directory(tmp_path: Path, tracker: RolloutCompletionTracker) -> None:
    inside = tmp_path / "logs"
    with TestClient(create_app(CalculatorAgentLoop(), debug_dir=str(inside))) as client:
        client.post("/v1/rollout/init", json=body("../../escape"))
        assert tracker.wait(30)
    assert [path.name for path in inside.iterdir()] == ["%2E.%2F..%2Fescape.jsonl"]
    first = json.loads(next(inside.iterdir()).read_text().splitlines()[0])
    assert first == {"event": "pre_llm", "rollout_id": "../../escape", "turn": 0, "num_messages": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_what_cannot_be_served_is_refused_when_the_app_is_made() -> None:
    loop = CalculatorAgentLoop()
    with pytest.raises(WrongSettings, match="MAX_RUNNING"):
        create_app(loop, max_concurrent=0)
    with pytest.raises(WrongSettings, match="RECORD_TTL"):
        create_app(loop, record_ttl_seconds=-1)
    with pytest.raises(TypeError, match="create_app takes no max_parallel"):
        create_app(loop, max_parallel=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="does not register"):
        create_app(loop, credentials=object())


def test_the_earlier_settings_are_taken(tracker: RolloutCompletionTracker) -> None:
    settings = RolloutSettings(server=RolloutServerSettings(max_concurrent_rollouts=1))
    configure(settings)
    try:
        with TestClient(create_app(CalculatorAgentLoop())) as client:
            for number in range(3):
                assert client.post("/v1/rollout/init", json=body(f"r{number}")).status_code == 202
            while len(tracker.responses) < 3:
                tracker.event.clear()
                assert len(tracker.responses) == 3 or tracker.wait(30)
    finally:
        reset_settings()
    assert {told["status"] for told in tracker.responses} == {"COMPLETED"}


def test_trainers_may_be_scripted_by_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def weather(message: dict[str, Any]) -> list[dict[str, Any]] | None:
        if "weather" not in message.get("content", "").lower():
            return None
        return [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]

    tracker = RolloutCompletionTracker()
    trainer = TestClient(create_mock_trainer_app(tracker, tool_call_generator=weather))
    patch_httpx_for_mock_trainer(trainer, monkeypatch)
    with TestClient(create_app(CalculatorAgentLoop())) as client:
        client.post("/v1/rollout/init", json=body(messages=[user("How is the weather?")]))
        assert tracker.wait(30)
    [told] = tracker.responses
    assert told["final_messages"][2]["content"] == "Error: Unknown function 'get_weather'"
    assert trainer.get("/v1/rollout/completed/r").json() == told
    assert trainer.get("/v1/rollout/completed/other").json() == {}
    assert trainer.get("/health").json()["status"] == "healthy"
    assert trainer.post("/v1/chat/completions", json={"messages": []}).status_code == 422
    tracker.clear()
    assert not tracker.wait(0)
