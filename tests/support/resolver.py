"""A DNS resolver with scripted results: the k-th query for a name returns the k-th result."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from aiohttp.abc import AbstractResolver, ResolveResult


class Table(AbstractResolver):
    """For each name, a list of results, each a list of addresses; the last one repeats. Records the queries."""

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.closed = False

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the next result. Raises OSError for an unknown name."""
        self.asked.append(host)
        if host not in self.answers:
            raise OSError(f"no such name: {host}")
        answers = self.answers[host]
        chosen = answers[min(self.asked.count(host), len(answers)) - 1]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in chosen
        ]

    async def close(self) -> None:
        """Record the call."""
        self.closed = True
