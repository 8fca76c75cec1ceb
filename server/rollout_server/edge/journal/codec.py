"""How values of the runtime become bytes of the journal, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_server.runtime.journal import AcceptedStart
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import Credentials


@dataclass(frozen=True, slots=True)
class Codec:
    """Functions that encode and decode. They run in the journal's thread.

    `encode_start` leaves the credentials of the request out. Credentials are encrypted after `encode_credentials`.
    """

    encode_entries: Callable[[Sequence[Entry]], bytes]
    decode_entries: Callable[[bytes], Sequence[Entry]]
    encode_start: Callable[[AcceptedStart], bytes]
    decode_start: Callable[[bytes], AcceptedStart]
    encode_credentials: Callable[[Credentials], bytes]
    decode_credentials: Callable[[bytes], Credentials]
