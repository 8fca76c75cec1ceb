"""The loop lag of a server, as its own metrics report it."""

from __future__ import annotations

from types import TracebackType

import aiohttp

_BUCKET = 'rollout_loop_lag_seconds_bucket{le="'


class Lag:
    """Collects the samples of the time inside `async with`. The metric has buckets, so percentiles are upper bounds."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._before: dict[float, float] = {}
        self._samples: dict[float, float] = {}

    async def __aenter__(self) -> None:
        self._before = await self._read()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for bound, count in (await self._read()).items():
                self._samples[bound] = self._samples.get(bound, 0.0) + count - self._before.get(bound, 0.0)

    def percentile_ms(self, share: float) -> float | None:
        """Return the bound in milliseconds that a share of the samples did not exceed; None without samples."""
        every = max(self._samples.values(), default=0.0)
        if not every:
            return None
        return 1000 * min(bound for bound, count in self._samples.items() if count >= share * every)

    async def _read(self) -> dict[float, float]:
        async with self._http.get(f"{self._url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = (line.removeprefix(_BUCKET).split('"} ') for line in lines if line.startswith(_BUCKET))
        return {float(bound): float(count) for bound, count in found}
