"""Trainers close idle connections. This must not cost a turn, whenever the next one begins."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpSettings

from tests.support.http_trainer import COMPLETION, head

Connect = Callable[[HttpSettings], HttpClient]
IDLE_SECONDS = 1.0
ANSWER = head(200, len(COMPLETION)) + COMPLETION


class Closing:
    """A trainer with its own threads, which closes each connection after a second without a request."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.closed = 0

    def serve(self) -> None:
        """Accept connections until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(IDLE_SECONDS)
            while _read_one(connection):
                connection.sendall(ANSWER)
        self.closed += 1


def _read_one(connection: socket.socket) -> bool:
    """Read one request with an empty body object; False if none arrives in time."""
    got = b""
    while not got.endswith(b"\r\n\r\n{}"):
        more = connection.recv(2**16)
        if not more:
            return False
        got += more
    return True


@contextlib.contextmanager
def closing_trainer() -> Iterator[Closing]:
    trainer = Closing()
    accepting = threading.Thread(target=trainer.serve, daemon=True)
    accepting.start()
    try:
        yield trainer
    finally:
        trainer.listener.shutdown(socket.SHUT_RDWR)
        trainer.listener.close()
        accepting.join()


def request(url: str) -> HttpRequest:
    return HttpRequest(f"{url}/v1/chat/completions", b"{}", {})


async def test_turns_around_the_moment_of_closing_are_all_answered(connect: Connect) -> None:
    """60 concurrent rollouts, each with a turn about every second: from 30 ms before the trainer closes to 30 ms after."""

    async def rollout(pause: float) -> None:
        client = connect(HttpSettings(timeout=20))
        for turn in range(3):
            await asyncio.sleep(pause if turn else 0)
            assert (await client.post(request(trainer.url))).status == 200

    with closing_trainer() as trainer:
        await asyncio.gather(*(rollout(IDLE_SECONDS + place / 1000) for place in range(-30, 30)))
        assert trainer.closed


async def test_a_connection_that_was_closed_while_the_loop_was_busy_is_not_used(client: HttpClient) -> None:
    """The trainer's FIN has arrived, but the event loop has not read it yet."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async def serve_one() -> socket.socket:
            connection, _ = await loop.sock_accept(listener)
            await loop.sock_recv(connection, 2**16)
            await loop.sock_sendall(connection, ANSWER)
            return connection

        serving = asyncio.create_task(serve_one())
        assert (await client.post(request(url))).status == 200
        first, serving = await serving, asyncio.create_task(serve_one())
        first.close()  # from here to the next request the loop does not run
        assert (await client.post(request(url))).status == 200
        (await serving).close()
