"""The certificates of TLS authorities, which thousands of tests would read when they start a client."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest


def share_authorities(patch: pytest.MonkeyPatch) -> None:
    """HTTP clients with default settings share one TLS context.

    Each of them would read the 150 certificates of authorities, 0.1 s of CPU, also if it never opens a TLS connection.
    """
    if find_spec("httpx") is None:
        return
    from httpx._transports import default

    create, made = default.create_ssl_context, dict[tuple[str | None, ...], Any]()

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is not True or cert is not None:
            return create(verify=verify, cert=cert, trust_env=trust_env)
        key = tuple(os.environ.get(name) if trust_env else None for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
        if key not in made:
            made[key] = create(verify=verify, cert=cert, trust_env=trust_env)
        return made[key]

    patch.setattr(default, "create_ssl_context", shared)
