"""Receiver of outcomes: ``POST /v1/rollout/completed`` of the asynchronous HTTP API (docs/design.md, B)."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_server.testing.checks.judge import ROLLOUTS_KEPT
from rollout_server.testing.checks.rollout_state import OutcomeNotice
from rollout_server.testing.checks.verdict import RefusedError, Verdict
from rollout_server.testing.http.broken_responses import DelayedResponse, broken_response
from rollout_server.testing.http.wire import Bearer, parse_body, rollout_in
from rollout_server.testing.model.engine_thread import EngineThread
from rollout_server.testing.notifier import Notifier
from rollout_server.testing.script import Fault, FaultKind

_DELIVERIES_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class ReceivedOutcome:
    """One delivery of an outcome, and how the trainer responded.

    Args:
        raw: the body; `body`: the parsed body, text if it is not JSON.
        headers: with names in lower case.
        met: the status that was sent, or the kind of fault that replaced it.
        arrived: time of arrival in seconds of a monotonic clock.
    """

    raw: bytes
    body: Any
    headers: Mapping[str, str]
    met: str
    arrived: float

    @property
    def key(self) -> str:
        """Its ``Idempotency-Key``; empty if missing."""
        return self.headers.get("idempotency-key", "")


class OutcomeReceiver:
    """Records and verifies every delivery, and responds as the rollout's script says. For the event loop's thread only.

    `settled` is called once with the verdict of each rollout, when its outcome is acknowledged or refused. `changed` notifies
    of every delivery, and when an outcome is settled.
    """

    def __init__(self, engine_thread: EngineThread, bearer: Bearer, settled: Callable[[Verdict], None]) -> None:
        self._engine_thread = engine_thread
        self._bearer = bearer
        self._settled = settled
        self._deliveries: dict[str, deque[ReceivedOutcome]] = {}
        self._responses_sent: dict[str, int] = {}
        self.changed = Notifier()

    def deliveries(self, rollout_id: str) -> tuple[ReceivedOutcome, ...]:
        """Return the last `_DELIVERIES_KEPT` deliveries of a rollout, oldest first."""
        return tuple(self._deliveries.get(rollout_id, ()))

    def begin_anew(self, rollout_id: str) -> None:
        """Restart the scripted responses: the next delivery for this rollout counts as the first one."""
        self._responses_sent.pop(rollout_id, None)

    async def receive(self, request: Request) -> Response:
        """Handle one delivery."""
        raw, arrived = await request.body(), time.monotonic()
        body, _ = parse_body(raw)
        try:
            fields, rollout_id = rollout_in(body)
        except ValueError as error:
            status, text = (422, str(error)) if self._bearer.admits(request) else (401, Bearer.REFUSAL)
            return JSONResponse({"detail": text}, status)
        response, met = self._respond(
            request, OutcomeNotice(rollout_id, raw, fields, request.headers.get("idempotency-key", ""))
        )
        self._store(rollout_id, ReceivedOutcome(raw, body, dict(request.headers), met, arrived))
        self.changed.notify()
        return response

    def _respond(self, request: Request, notice: OutcomeNotice) -> tuple[Response, str]:
        """Return the response to a delivery, and the value for `ReceivedOutcome.met`."""
        if not self._bearer.admits(request):
            return JSONResponse({"detail": Bearer.REFUSAL}, 401), "401"
        try:
            self._engine_thread.judge.receive_outcome(notice)
        except RefusedError as error:
            return self._settling_response(notice, JSONResponse({"detail": error.refusal.text}, 422)), "422"
        count = self._responses_sent.get(notice.rollout_id, 0)
        self._responses_sent[notice.rollout_id] = count + 1
        fault = self._engine_thread.scripts.of(notice.rollout_id).reception.fault(count)
        if fault is None:
            return self._settling_response(notice, JSONResponse({"status": "ok"})), "200"
        if fault.kind is FaultKind.STATUS:
            return self._settling_response(notice, broken_response(fault), fault.delay), str(fault.status)
        return DelayedResponse(broken_response(fault), _delay(fault)), fault.kind.value

    def _settling_response(self, notice: OutcomeNotice, response: Response | None, delay: float = 0.0) -> Response:
        """Return a response that settles the outcome when it is sent. Before that, the client may still disconnect."""
        status = response.status_code if response else 0
        return DelayedResponse(response, delay, lambda: self._settle(notice.rollout_id, status))

    def _settle(self, rollout_id: str, status: int) -> None:
        verdict = self._engine_thread.judge.settle(rollout_id, status)
        if verdict:
            self._settled(verdict)
            self.changed.notify()

    def _store(self, rollout_id: str, delivery: ReceivedOutcome) -> None:
        self._deliveries.setdefault(rollout_id, deque(maxlen=_DELIVERIES_KEPT)).append(delivery)
        while len(self._deliveries) > ROLLOUTS_KEPT:
            oldest = next(iter(self._deliveries))
            del self._deliveries[oldest]
            self._responses_sent.pop(oldest, None)


def _delay(fault: Fault) -> float | None:
    return None if fault.kind is FaultKind.SILENCE else fault.delay
