"""Docker HEALTHCHECK: exit with 0 if the server or gateway in this container is ready, else with 1 and the reason.

    python healthcheck.py        # reads the port from the environment, like `rollout serve`
    python healthcheck.py URL    # checks this URL: any 200 means healthy

Uses the standard library only. It does not verify certificates, because it calls its own container and sends no secrets. If
clients need a certificate (ROLLOUT_TLS_CLIENT_CA) or HTTP is off (ROLLOUT_HTTP=false), it only checks that the port is open.
"""

import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

SECONDS = 4.0
_FALSE = ("0", "off", "f", "false", "n", "no")  # the values that pydantic reads as false


def port_of(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return what to check: `http`, `https` or `tcp`, and the port on this host."""
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
    """Return why the server is not healthy; empty if it is."""
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
    # Ignore the proxy settings of the environment: the server is in this container.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=SECONDS) as response:
            return "" if response.status == 200 else f"{url} returned {response.status}"
    except urllib.error.HTTPError as error:
        return f"{url} returned {error.code}: {error.read(500).decode(errors='replace')}"


if __name__ == "__main__":
    sys.exit(complaint(sys.argv[1:], os.environ) or 0)
