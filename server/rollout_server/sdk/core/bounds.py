"""What requests are checked against."""

from __future__ import annotations

from urllib.parse import urlsplit


class MetadataBound:
    """The largest metadata of a request, which the earlier SDK lets a process set for itself."""

    default = 1024 * 1024

    def __init__(self) -> None:
        self.most = self.default

    def set(self, size_bytes: int) -> None:
        """Sets it. Raises ValueError for less than one byte."""
        if size_bytes < 1:
            raise ValueError(f"the largest metadata must have at least 1 byte, not {size_bytes}")
        self.most = size_bytes


METADATA = MetadataBound()


def written_id(value: str) -> str:
    """A rollout id. Raises ValueError for a blank one."""
    if not value.strip():
        raise ValueError("must not be blank")
    return value


def required_url(value: str) -> str:
    """An http or https URL with a host, without its trailing slash. Raises ValueError for another."""
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError("must be an http or https URL with a host")
    return value.rstrip("/")
