"""Keys of model endpoints. A key names its rollout, and so its server.

A process accepts its own keys. The journal has digests of those that agents elsewhere got, so that later processes accept them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Final

_PREFIX: Final = "rk_"
_LONGEST: Final = 512


class ModelKeys:
    """Makes and checks keys. A key is not stored: it is `rk_UID.MAC`, with the HMAC-SHA256 of the uid.

    Args:
        secret: at least 32 bytes; by default new random ones, so that no key outlives the process.
    """

    def __init__(self, secret: bytes = b"") -> None:
        if secret and len(secret) < 32:
            raise ValueError(f"the secret of model keys has {len(secret)} bytes; it needs at least 32")
        self._secret = secret or secrets.token_bytes(32)

    def key(self, uid: str) -> str:
        """Return the key of a rollout, printable ASCII."""
        return f"{_PREFIX}{uid}.{self._mac(uid)}"

    def uid_of(self, key: str) -> str | None:
        """Return the uid of the rollout that a key is for, None for an invalid key. Takes the same time for each wrong MAC.

        Whether the rollout exists, or has ended, is not checked.
        """
        uid, mac = named_uid(key), key.rpartition(".")[2]
        if not uid:
            return None
        return uid if hmac.compare_digest(self._mac(uid), mac) else None

    def _mac(self, uid: str) -> str:
        digest = hmac.digest(self._secret, uid.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def named_uid(key: str) -> str:
    """Return the uid that a key names, whoever made it; empty if it has not the form of a key."""
    if not key.startswith(_PREFIX) or not key.isascii() or len(key) > _LONGEST:
        return ""
    return key.removeprefix(_PREFIX).rpartition(".")[0]
