"""Delivery of outcomes in the asynchronous HTTP API: `POST {url}/v1/rollout/completed` (docs/design.md, protocol B)."""

from __future__ import annotations

from rollout_server.edge.trainer.http_client import (
    ConnectionLost,
    ConnectionRefused,
    HttpClient,
    HttpRequest,
    HttpResponse,
    ResponseTooLarge,
    TargetForbidden,
    keyed_headers,
)
from rollout_server.edge.trainer.http_errors import error_text
from rollout_server.runtime.outcome_delivery import (
    DeliveryAcknowledged,
    DeliveryRefused,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)

_ASKED_AGAIN = frozenset({408, 425, 429})


class HttpCourier:
    """Delivers outcomes over HTTP. `timeout` is in seconds, for one attempt."""

    def __init__(self, client: HttpClient, timeout: float = 60.0) -> None:
        self._client = client
        self._timeout = timeout

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Make one request.

        Any 2xx acknowledges. 408, 425, 429, 5xx and transport errors are retried. Other statuses are final.
        """
        headers = keyed_headers(packed.key, packed.credential)
        request = HttpRequest(f"{packed.target.url}/v1/rollout/completed", packed.body, headers, self._timeout)
        try:
            response = await self._client.post(request)
        except (ConnectionRefused, ConnectionLost) as error:
            return DeliveryUnsettled(f"{request.host}: {error}")
        except TargetForbidden as error:
            return DeliveryRefused(f"{request.host}: {error}")
        except ResponseTooLarge:  # the status of the response is unknown
            return DeliveryUnsettled(f"{request.host}: the response is too large")
        return _delivery_result(response, request.host, packed.credential)


def _delivery_result(response: HttpResponse, host: str, credential: str) -> Receipt:
    if 200 <= response.status < 300:
        return DeliveryAcknowledged()
    message = error_text(response, (credential,) if credential else ())
    text = f"{host} answered {response.status}" + (f": {message}" if message else "")
    if response.status >= 500 or response.status in _ASKED_AGAIN:
        return DeliveryUnsettled(text, response.retry_after)
    return DeliveryRefused(text)
