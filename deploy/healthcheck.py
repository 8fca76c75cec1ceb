"""Exits with 0 where the server or gateway beside it is ready, else with 1 and a line that says why. For HEALTHCHECK.

    python healthcheck.py        # finds the port in the environment, as `rollout serve` does
    python healthcheck.py URL    # asks for this one: any 200 is healthy

Standard library only. Certificates are not verified: it speaks with its own container, about nothing secret. Where clients need
a certificate (ROLLOUT_TLS_CLIENT_CA) or there is no HTTP (ROLLOUT_HTTP=false) it only looks whether the port is open.
"""

import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

SECONDS = 4.0
_FALSE = ("0", "off", "f", "false", "n", "no")  # pydantic's words


def port_of(environment: Mapping[str, str]) -> tuple[str, int]:
    """What to look at: `http`, `https` or `tcp`, and the port on this host."""
    given = {name.upper(): value for name, value in environment.items() if value}
    if given.get("ROLLOUT_HTTP", "true").lower() in _FALSE:
        return "tcp", int(given.get("ROLLOUT_GRPC_PORT", "50051"))
    port = int(given.get("ROLLOUT_SERVER_PORT", "9000"))
    if "ROLLOUT_SERVERS" in given:  # a gateway alone
        port = int(given.get("ROLLOUT_GATEWAY_PORT", "9000"))
    if "ROLLOUT_TLS_CLIENT_CA" in given:
        return "tcp", port
    return "https" if "ROLLOUT_TLS_CERT" in given else "http", port


def complaint(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Why it is not healthy; empty where it is."""
    try:
        kind, port = port_of(environment)
        if not arguments and kind == "tcp":
            socket.create_connection(("127.0.0.1", port), SECONDS).close()
            return ""
        return _asked(arguments[0] if arguments else f"{kind}://127.0.0.1:{port}/readyz")
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _asked(url: str) -> str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # The proxies of the environment are for the world outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=SECONDS) as reply:
            return "" if reply.status == 200 else f"{url} answered {reply.status}"
    except urllib.error.HTTPError as error:
        return f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}"


if __name__ == "__main__":
    sys.exit(complaint(sys.argv[1:], os.environ) or 0)
