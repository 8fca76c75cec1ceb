"""A resolver that answers from a table, and answers its k-th question about a name with the k-th answer."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from aiohttp.abc import AbstractResolver, ResolveResult


class Table(AbstractResolver):
    """For each name a list of answers, each a list of addresses; the last answer stays. Keeps what it was asked."""

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.closed = False

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The next answer, or OSError for a name that is not in the table."""
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
        """Notes it."""
        self.closed = True
