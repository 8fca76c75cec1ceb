"""Wrong API keys: each is logged by its hash, never by its text, and many of them are answered slowly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rollout_server.edge.api_keys import fingerprint

_log = logging.getLogger(__name__)
BURST = 20
PER_SECOND = 10
"""So many wrong keys, and then so many more each second, are answered at once and logged one by one."""
DELAY_SECONDS = 1.0


class WrongKeys:
    """Counts the wrong keys of all callers together, so that its memory does not grow with them.

    Right keys are never delayed, and so nobody suffers from the wrong ones of others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent = 0.0
        self._counted = clock()
        self._unlogged = 0

    def note(self, authorization: str | None, peer: str) -> float:
        """Takes note of a refused header. Returns after how many seconds to answer; a request without a key is never delayed."""
        if authorization is None:
            return 0.0
        now = self._clock()
        self._recent = max(0.0, self._recent - PER_SECOND * (now - self._counted)) + 1
        self._counted = now
        if self._recent > BURST:
            self._unlogged += 1
            return DELAY_SECONDS
        more, self._unlogged = self._unlogged, 0
        before = f"; {more} more were refused before it" if more else ""
        _log.warning("refused the API key with hash sha256:%s... from %s%s", fingerprint(authorization), peer, before)
        return 0.0
