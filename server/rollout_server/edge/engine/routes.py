"""Where an engine answers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

_VERSION = "/v1"


@dataclass(frozen=True, slots=True)
class Routes:
    """The URLs of one engine. `base` is what OpenAI's clients call the base URL."""

    base: str

    @classmethod
    def of(cls, url: str) -> Routes:
        """A URL with a path is the base itself; one without gets the path that every engine serves by default."""
        return cls(url if urlsplit(url).path.strip("/") else f"{url}{_VERSION}")

    @property
    def chat(self) -> str:
        """Chat completions."""
        return f"{self.base}/chat/completions"

    @property
    def generate(self) -> str:
        """vLLM: ids in, ids out. It stands beside the OpenAI routes, not under them."""
        return f"{self.base.removesuffix(_VERSION)}/inference/v1/generate"

    @property
    def derender(self) -> str:
        """vLLM: sampled ids to the message that they are."""
        return f"{self.chat}/derender"
