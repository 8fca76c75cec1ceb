"""What the gateway can be told; the composition root reads it from wherever settings live."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway. Seconds are wall-clock seconds, sizes are bytes."""

    #: How long a rollout goes on after its HTTP client hung up; 0 cancels it at once.
    detach_grace_seconds: float = 10.0
    #: A larger request body is answered with 413.
    max_body_bytes: int = 16 << 20
    #: A body that has not arrived whole after this is answered with 408.
    body_seconds: float = 60.0
    #: A larger `metadata`, as it stands in the body, is answered with 422.
    max_metadata_bytes: int = 1 << 20
    #: Deadline of the short calls to the server: tools, health, acknowledgements.
    call_seconds: float = 10.0
    #: The API key under which requests of the synchronous dialect that carry none are made; empty: they stay without.
    synchronous_key: str = field(default="", repr=False)
