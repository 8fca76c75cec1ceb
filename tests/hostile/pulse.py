"""`python pulse.py PORT`: poll `/healthz` until stdin ends, then print the longest latency in seconds and the count."""

import contextlib
import select
import socket
import sys
import time

_PAUSE_SECONDS = 0.01


def beat(port: int) -> None:
    """Measure until standard input ends."""
    worst, count = 0.0, 0
    sys.stdout.write("\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0]:
        began = time.monotonic()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            while connection.recv(4096):
                pass
        worst, count = max(worst, time.monotonic() - began), count + 1
    sys.stdout.write(f"{worst} {count}")


if __name__ == "__main__":
    beat(int(sys.argv[1]))
