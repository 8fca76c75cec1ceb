"""The endpoint that generates completions, with the parameters of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast
from urllib.parse import urlsplit

from rollout_client import Credentials, Target, Tokenizer
from rollout_client.enums import Dialect
from rollout_client.spec import Limits, Sampling, StartFields

from rollout_server.authoring.author_traceback import AuthorError

DIALECTS: Final = ("openai", "vllm", "sglang", "grpc", "http-plain", "http-masked")
"""Values of `--dialect`: the protocols that an endpoint may use."""
_ENGINES: Final = frozenset({"openai", "vllm", "sglang"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint, and the parameters of every rollout that uses it.

    Args:
        url: begins with http://, https://, grpc:// or grpcs://.
        dialect: one of `DIALECTS`; empty: derived from the URL by `check_endpoint`.
        model: the model's name at an engine; else empty.
        bearer: API key, sent as a bearer token and never displayed.
        tokenizer: name of the tokenizer, for endpoints that need one.
        sampling: sampling parameters, as `rollout_client` takes them.
        limits: limits, as `rollout_client` takes them.
        label: name for display; empty: the URL.
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
        """A name for display."""
        return self.label or (f"{self.model} at {self.url}" if self.model else self.url)

    def start_fields(self) -> StartFields:
        """Return the fields with which the client starts a rollout at this endpoint."""
        target = Target(self.url, cast("Dialect", self.dialect.replace("-", "_")), model=self.model or None)
        return StartFields(
            completions=target,
            tokenizer=Tokenizer(self.tokenizer) if self.tokenizer else None,
            sampling=cast("Sampling", dict(self.sampling)) if self.sampling else None,
            limits=cast("Limits", dict(self.limits)) if self.limits else None,
            credentials=Credentials(completions_bearer=self.bearer) if self.bearer else None,
        )

    def description(self) -> dict[str, Any]:
        """Return what the results file stores, enough to detect a change of endpoint, sampling or limits."""
        where = {"url": self.url} if not self.label else {}
        named = {"name": self.label or self.model, "dialect": self.dialect, "tokenizer": self.tokenizer}
        return {**named, **where, "sampling": dict(self.sampling), "limits": dict(self.limits)}


def check_endpoint(endpoint: Endpoint, flag: str) -> Endpoint:
    """Return the endpoint with its protocol, which is derived from the URL if none is set.

    Raises `AuthorError` for options that contradict each other. `flag` is the one that gave the URL.
    """
    try:
        scheme = urlsplit(endpoint.url).scheme
    except ValueError as error:
        raise AuthorError(f"{flag} is not a URL: {error}") from None
    if scheme not in ("http", "https", "grpc", "grpcs"):
        raise AuthorError(f"{flag} must begin with http://, https://, grpc:// or grpcs://")
    by_grpc = scheme.startswith("grpc")
    dialect = endpoint.dialect or ("grpc" if by_grpc else "openai")
    if dialect not in DIALECTS:
        raise AuthorError(f"--dialect {dialect!r} must be one of {', '.join(DIALECTS)}")
    if by_grpc is not (dialect == "grpc"):
        raise AuthorError(f"--dialect {dialect} does not go with a URL that begins with {scheme}://")
    if dialect in _ENGINES and not endpoint.model:
        raise AuthorError(f"--dialect {dialect} needs --model NAME: the model's name at the endpoint")
    if dialect not in _ENGINES and endpoint.model:
        raise AuthorError(f"--model is for the dialects {', '.join(sorted(_ENGINES))}; {dialect} takes no model name")
    if dialect == "http-masked" and not endpoint.tokenizer:
        text = "--dialect http-masked needs --tokenizer NAME or NAME=DIRECTORY, with which this server counts the masks"
        raise AuthorError(text)
    return replace(endpoint, dialect=dialect)
