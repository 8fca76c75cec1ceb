"""Settings of the gateway. The program that creates the gateway reads them from its environment or options."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway. Durations are in seconds, sizes in bytes."""

    #: How long a rollout of `POST /rollout` continues after its client disconnects; 0 cancels it at once.
    detach_grace_seconds: float = 10.0
    #: A larger request body gets 413.
    max_body_bytes: int = 16 << 20
    #: A body that has not arrived completely after this time gets 408.
    body_seconds: float = 60.0
    #: Maximum `metadata` of the synchronous and asynchronous HTTP APIs, in bytes of JSON text; more gets 422.
    max_metadata_bytes: int = 1 << 20
    #: Deadline of short calls to the rollout server, such as tools, health and acknowledgements.
    call_seconds: float = 10.0
    #: A stream of a model endpoint without a completion begins after this time, and then sends a heartbeat each time it passes.
    heartbeat_seconds: float = 10.0
    #: API key that the gateway adds to requests of the synchronous HTTP API without one; empty: it adds none.
    synchronous_key: str = field(default="", repr=False)

    @property
    def max_model_body_bytes(self) -> int:
        """A larger body of a request to a model endpoint gets 413. Its message for the server may be much shorter."""
        return 2 * self.max_body_bytes
