"""The HTTP face of a strict trainer: completions of the synchronous dialect, and what the judge found."""

import hmac
import json
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

from rollout_server.testing.breakage import Held, Reset, Truncated
from rollout_server.testing.desk import Desk, ToolsUnavailableError
from rollout_server.testing.engine import Failed, Result
from rollout_server.testing.script import FaultKind
from rollout_server.testing.script_json import script_from_json
from rollout_server.testing.verdict import RefusedError
from rollout_server.testing.wire import call_from_body, completion_body, summary_body, verdict_body


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request for a completion as it came: the parsed body (text where it is not JSON), header names in lower case."""

    body: Any
    headers: Mapping[str, str]


class TrainerApp:
    """The endpoints. Every request for a completion goes into `requests` first, whatever becomes of it."""

    def __init__(self, desk: Desk, api_key: str | None, requests: "deque[SeenRequest]") -> None:
        self._desk = desk
        self._api_key = api_key
        self._requests = requests

    def asgi(self) -> Starlette:
        """The ASGI application, to be served by `serving.Listener`."""
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/verdicts", self._verdicts, methods=["GET"]),
                Route("/verdict", self._verdict, methods=["GET"]),
                Route("/script", self._put_script, methods=["PUT"]),
            ]
        )

    async def _health(self, _request: Request) -> Response:
        return _json({"status": "healthy", "service": "strict-trainer"})

    async def _complete(self, request: Request) -> Response:
        raw = await request.body()
        body, fault = _parsed(raw)
        self._requests.append(SeenRequest(body, dict(request.headers)))
        if not self._authorized(request):
            return _detail(401, "Invalid or missing API key")
        if fault:
            return _detail(422, f"the body is not JSON: {fault}")
        try:
            result = await self._desk.complete(call_from_body(body, await self._desk.tools.get()))
        except RefusedError as error:
            return _detail(422, error.refusal.text)
        except ValueError as error:
            return _detail(422, str(error))
        except ToolsUnavailableError as error:
            return _detail(502, str(error))
        return _response(body, result)

    def _authorized(self, request: Request) -> bool:
        if self._api_key is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode())

    async def _verdicts(self, _request: Request) -> Response:
        return _json({"verdicts": [summary_body(verdict) for verdict in self._desk.judge.verdicts()]})

    async def _verdict(self, request: Request) -> Response:
        verdict = self._desk.judge.verdict(request.query_params.get("rollout_id", ""))
        return _json(verdict_body(verdict)) if verdict else _detail(404, "no call came for this rollout_id")

    async def _put_script(self, request: Request) -> Response:
        rollout_id = request.query_params.get("rollout_id", "")
        if not rollout_id.strip():
            return _detail(422, "the query parameter rollout_id is missing")
        body, fault = _parsed(await request.body())
        try:
            script = script_from_json(body)
        except ValueError as error:
            return _detail(422, f"no script: {fault or error}")
        await self._desk.put_script(rollout_id, script)
        return _json({"rollout_id": rollout_id, "lines": len(script.lines)})


def _response(body: Mapping[str, Any], result: Result) -> Response:
    if isinstance(result, Failed):
        fault = result.fault
        match fault.kind:
            case FaultKind.SILENCE:
                return Held(None, delay=None)
            case FaultKind.RESET:
                return Held(Reset(), fault.delay)
            case FaultKind.TRUNCATED:
                return Held(Truncated(fault), fault.delay)
            case FaultKind.STATUS:
                return Held(Response(fault.body, fault.status, dict(fault.headers)), fault.delay)
    with_logprobs = body.get("logprobs") is not False
    completion = completion_body(body["rollout_id"], int(time.time()), result, with_logprobs=with_logprobs)
    delay = result.fault.delay if isinstance(result, Failed) else result.reply.delay
    return Held(_raw_json(completion), delay)


def _parsed(raw: bytes) -> tuple[Any, str]:
    # The standard library's parser, because it keeps integers of any size.
    try:
        return json.loads(raw), ""
    except ValueError as error:
        return raw.decode(errors="replace"), str(error)


def _detail(status: int, text: str) -> Response:
    return _json({"detail": text}, status)


def _json(value: object, status: int = 200) -> Response:
    return _raw_json(msgspec.json.encode(value), status)


def _raw_json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
