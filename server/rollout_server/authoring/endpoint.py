"""Who completes a rollout, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast
from urllib.parse import urlsplit

from rollout_client import Credentials, Target, Tokenizer
from rollout_client.spec import Dialect, Limits, Sampling, StartFields

from rollout_server.authoring.author_traceback import AuthorError

DIALECTS: Final = ("openai", "vllm", "sglang", "grpc", "http-plain", "http-masked")
"""The words of a command line for the protocols that an endpoint may speak."""
_ENGINES: Final = frozenset({"openai", "vllm", "sglang"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint, and what every rollout asks of it.

    Args:
        url: http:, https:, grpc: or grpcs:.
        dialect: one of `DIALECTS`.
        model: the model's name there, for engines.
        bearer: sent as a bearer token; shown by nobody.
        tokenizer: for endpoints that are told of one.
        sampling: as the client takes it.
        limits: likewise.
        label: what to call it; empty: its URL.
    """

    url: str
    dialect: str
    model: str = ""
    bearer: str = field(default="", repr=False)
    tokenizer: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        """A name for people."""
        return self.label or (f"{self.model} at {self.url}" if self.model else self.url)

    def start_fields(self) -> StartFields:
        """What a client starts a rollout with."""
        target = Target(self.url, cast("Dialect", self.dialect.replace("-", "_")), model=self.model or None)
        return StartFields(
            completions=target,
            tokenizer=Tokenizer(self.tokenizer) if self.tokenizer else None,
            sampling=cast("Sampling", dict(self.sampling)) if self.sampling else None,
            limits=cast("Limits", dict(self.limits)) if self.limits else None,
            credentials=Credentials(completions_bearer=self.bearer) if self.bearer else None,
        )

    def description(self) -> dict[str, Any]:
        """What a file of results holds of it: enough to see whether another run had the same endpoint and sampling."""
        where = {"url": self.url} if not self.label else {}
        named = {"name": self.label or self.model, "dialect": self.dialect, "tokenizer": self.tokenizer}
        return {**named, **where, "sampling": dict(self.sampling), "limits": dict(self.limits)}


def check_endpoint(endpoint: Endpoint) -> Endpoint:
    """The endpoint, its dialect taken from the URL where none is given. Raises `AuthorError` for what does not fit together."""
    try:
        scheme = urlsplit(endpoint.url).scheme
    except ValueError as error:
        raise AuthorError(f"--model-url is no URL: {error}") from None
    if scheme not in ("http", "https", "grpc", "grpcs"):
        raise AuthorError("--model-url must begin with http://, https://, grpc:// or grpcs://")
    by_grpc = scheme.startswith("grpc")
    dialect = endpoint.dialect or ("grpc" if by_grpc else "openai")
    if dialect not in DIALECTS:
        raise AuthorError(f"--dialect {dialect!r} is none of {', '.join(DIALECTS)}")
    if by_grpc is not (dialect == "grpc"):
        raise AuthorError(f"--dialect {dialect} is not spoken at a URL that begins with {scheme}://")
    if dialect in _ENGINES and not endpoint.model:
        raise AuthorError(f"--dialect {dialect} needs --model NAME: the model's name at the endpoint")
    if dialect not in _ENGINES and endpoint.model:
        raise AuthorError(f"--model is for the dialects {', '.join(sorted(_ENGINES))}; {dialect} names no model")
    if dialect == "http-masked" and not endpoint.tokenizer:
        raise AuthorError("--dialect http-masked needs --tokenizer NAME or NAME=DIRECTORY: its masks are counted here")
    return replace(endpoint, dialect=dialect)
