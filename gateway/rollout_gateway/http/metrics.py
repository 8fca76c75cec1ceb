"""The gateway's own metrics: HTTP requests by route, and how long they took."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import Scope

_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Whatever a client makes up is one method, so that nobody can fill the memory with labels.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NOWHERE: Final = "none"
_NO_ANSWER: Final = 499


class HttpMetrics:
    """Counts and times requests in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_gateway_requests",
            "HTTP requests answered, 499: the client left before it was.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "rollout_gateway_request_seconds",
            "From an HTTP request's head to the end of its answer.",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def count(self, scope: Scope, status: int | None, seconds: float) -> None:
        """One request that is over, None: without an answer. Its label is the route's template, never the path, which holds ids."""
        route = getattr(scope.get("route"), "path", _NOWHERE)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status or _NO_ANSWER)).inc()
        self._seconds.labels(route, method).observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus' text form."""
        return generate_latest(self._registry)
