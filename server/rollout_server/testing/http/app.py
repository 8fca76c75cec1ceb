"""The HTTP endpoints of a strict trainer: completions for both HTTP APIs, verdicts and scripts."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout_server.testing import TrainerDialect
from rollout_server.testing.checks.turn import CompletionCall
from rollout_server.testing.checks.verdict import RefusedError
from rollout_server.testing.http.broken_responses import Closed, DelayedResponse, broken_response
from rollout_server.testing.http.outcome_receiver import OutcomeReceiver
from rollout_server.testing.http.wire import (
    Bearer,
    completion_body,
    keyed_call,
    masked_call,
    messages_in,
    parse_body,
    rollout_in,
    summary_body,
    verdict_body,
)
from rollout_server.testing.model.engine import CompletedCall, FailedCall, Result
from rollout_server.testing.model.engine_thread import EngineThread, ToolsUnavailableError
from rollout_server.testing.model.script_json import script_from_json
from rollout_server.testing.script import FaultKind


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A completion request as received: the parsed body (text if it is not JSON), and headers with names in lower case."""

    body: Any
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Speech:
    """The trainer's HTTP protocol, and whether its responses repeat the ``Idempotency-Key`` of the request."""

    dialect: TrainerDialect
    echoes_keys: bool


class TrainerApp:
    """The endpoints. `requests` records every completion request before it is judged."""

    def __init__(
        self,
        engine_thread: EngineThread,
        speech: Speech,
        bearer: Bearer,
        receiver: OutcomeReceiver,
        requests: "deque[SeenRequest]",
    ) -> None:
        self._engine_thread = engine_thread
        self._speech = speech
        self._bearer = bearer
        self._receiver = receiver
        self._requests = requests

    def asgi(self) -> Starlette:
        """Return the ASGI application. Only `HttpServer` can serve it, because faults need its transport."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/verdicts", self._verdicts, methods=["GET"]),
            Route("/verdict", self._verdict, methods=["GET"]),
            Route("/script", self._put_script, methods=["PUT"]),
        ]
        if self._speech.dialect is not TrainerDialect.MASKED:
            routes.append(Route("/v1/rollout/completed", self._receiver.receive, methods=["POST"]))
        return Starlette(routes=routes)

    async def _health(self, _request: Request) -> Response:
        return _json({"status": "healthy", "service": "strict-trainer"})

    async def _complete(self, request: Request) -> Response:
        body, fault = parse_body(await request.body())
        self._requests.append(SeenRequest(body, dict(request.headers)))
        if not self._bearer.admits(request):
            return _detail(401, Bearer.REFUSAL)
        if fault:
            return _detail(422, f"the body is not JSON: {fault}")
        try:
            call = await self._call(body, request.headers.get("idempotency-key", ""))
            result = await self._engine_thread.complete(call)
        except RefusedError as error:
            return _detail(422, error.refusal.text)
        except ValueError as error:
            return _detail(422, str(error))
        except ToolsUnavailableError as error:
            return _detail(502, str(error))
        echoed = call.keyed.turn_key if call.keyed and self._speech.echoes_keys else ""
        return _response(body, result, {"idempotency-key": echoed} if echoed else {})

    async def _call(self, body: Any, turn_key: str) -> CompletionCall:
        """Return the completion request of a body, in its protocol. Raises ValueError and ToolsUnavailableError."""
        fields, rollout_id = rollout_in(body)
        known = self._engine_thread.judge.is_masked(rollout_id, messages_in(fields))
        tools = await self._engine_thread.tools.get()
        if self._speech.dialect.has_mask(fields, known):
            return masked_call(body, tools)
        return keyed_call(body, turn_key, tools)

    async def _verdicts(self, _request: Request) -> Response:
        return _json({"verdicts": [summary_body(verdict) for verdict in self._engine_thread.judge.verdicts()]})

    async def _verdict(self, request: Request) -> Response:
        verdict = self._engine_thread.judge.verdict(request.query_params.get("rollout_id", ""))
        return _json(verdict_body(verdict)) if verdict else _detail(404, "no request had this rollout_id")

    async def _put_script(self, request: Request) -> Response:
        rollout_id = request.query_params.get("rollout_id", "")
        if not rollout_id.strip():
            return _detail(422, "the query parameter rollout_id is missing")
        body, fault = parse_body(await request.body())
        try:
            script = script_from_json(body)
        except ValueError as error:
            return _detail(422, f"the script is invalid: {fault or error}")
        await self._engine_thread.put_script(rollout_id, script)
        self._receiver.begin_anew(rollout_id)
        return _json({"rollout_id": rollout_id, "lines": len(script.lines)})


def _response(body: Mapping[str, Any], result: Result, headers: Mapping[str, str]) -> Response:
    if isinstance(result, CompletedCall) and result.lost:
        return DelayedResponse(Closed(), result.lost.delay)
    if isinstance(result, FailedCall):
        fault = result.fault
        if fault.kind not in (FaultKind.EMPTY_CHOICES, FaultKind.NULL_MESSAGE):
            return DelayedResponse(broken_response(fault), None if fault.kind is FaultKind.SILENCE else fault.delay)
    with_logprobs = body.get("logprobs") is not False
    completion = completion_body(body["rollout_id"], int(time.time()), result, with_logprobs=with_logprobs)
    delay = result.fault.delay if isinstance(result, FailedCall) else result.reply.delay
    return DelayedResponse(Response(completion, headers=headers, media_type="application/json"), delay)


def _detail(status: int, text: str) -> Response:
    return _json({"detail": text}, status)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
