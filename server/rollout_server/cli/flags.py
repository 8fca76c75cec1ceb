"""Command-line flags declared as dataclass fields, and the flags that all commands that run rollouts share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

if TYPE_CHECKING:
    from rollout_server.authoring.endpoint import Endpoint
    from rollout_server.authoring.model_stubs import ModelStub

_DIALECTS = "openai, vllm, sglang, grpc, http-plain or http-masked"


_T = TypeVar("_T")
_Command = TypeVar("_Command", bound=Callable[..., None])


def tokenizer_directories(pairs: Sequence[str]) -> dict[str, Path]:
    """Return the directories of a repeated `--tokenizer` by name. Raises ValueError for a malformed one."""
    from rollout_server.settings.types import named_paths

    try:
        return named_paths(pairs, "NAME=DIRECTORY")
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from None


@dataclass(frozen=True, slots=True)
class EndpointFlags:
    """Flags that describe the endpoint that generates completions, and flags for sampling and limits."""

    help_panel: ClassVar[str] = "Model, sampling and limits"

    dialect: Annotated[
        str,
        typer.Option(
            help=f"API of the endpoint: {_DIALECTS}. Default: grpc for grpc:// and grpcs:// URLs, else openai."
        ),
    ] = ""
    model: Annotated[str, typer.Option(metavar="NAME", help="Name of the model at the endpoint.")] = ""
    api_key_env: Annotated[
        str, typer.Option(metavar="VAR", help="Environment variable that holds the endpoint's API key.")
    ] = ""
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME[=DIRECTORY]", help="Tokenizer of the model; required for http-masked.")
    ] = ""
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Sampling temperature.")] = None
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Token limit per completion.")] = None
    turns: Annotated[int | None, typer.Option(min=1, help="Turn limit per rollout.")] = None
    generated_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget per rollout.")] = None
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Time limit per rollout.")] = None

    def endpoint_at(self, url: str, flag: str) -> Endpoint:
        """Return the endpoint at a URL, which was given with `flag`. Raises `AuthorError` for flags that do not fit it."""
        from rollout_server.authoring.endpoint import Endpoint, check_endpoint

        name = self.tokenizer.partition("=")[0]
        endpoint = Endpoint(
            url,
            self.dialect,
            self.model,
            secret_in(self.api_key_env, "--api-key-env"),
            name,
            self.sampling,
            self.limits,
        )
        return check_endpoint(endpoint, flag)

    @property
    def sampling(self) -> dict[str, float | int]:
        """Sampling parameters that were given, in the client's names."""
        options = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def limits(self) -> dict[str, float | int]:
        """Limits that were given, in the client's names."""
        options = {"turns": self.turns, "generated_tokens": self.generated_tokens, "time": self.seconds}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def tokenizers(self) -> dict[str, Path]:
        """Directory of the tokenizer by its name; empty if no directory was given."""
        name, _, directory = self.tokenizer.partition("=")
        return {name: Path(directory)} if directory else {}


@dataclass(frozen=True, slots=True)
class CompletionFlags(EndpointFlags):
    """Flags for the source of completions, an endpoint or a mock model, and for sampling and limits."""

    model_url: Annotated[
        str, typer.Option(metavar="URL", help="Endpoint that generates completions. Default: a mock model.")
    ] = ""
    script: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Mock model: FILE.json (format of PUT /script) or FILE.py[:OBJECT] with reply(messages).",
        ),
    ] = ""
    scripted: Annotated[
        bool,
        typer.Option("--scripted", help="Built-in mock model, which calls a tool and repeats its result. The default."),
    ] = False

    def model_stub(self) -> ModelStub | None:
        """Return the mock model, or None with `--model-url`. Raises `AuthorError` for flags that exclude each other."""
        from rollout_server.authoring.author_traceback import AuthorError
        from rollout_server.authoring.model_stubs import load_stub

        if self.model_url and (self.script or self.scripted):
            raise AuthorError(
                "--model-url and --script or --scripted exclude each other: choose an endpoint or a mock model"
            )
        if self.script and self.scripted:
            raise AuthorError("--script and --scripted exclude each other: the mock model of --scripted has no script")
        endpoint_flags = {"--dialect": self.dialect, "--model": self.model, "--api-key-env": self.api_key_env}
        if not self.model_url and (unused := [flag for flag, value in endpoint_flags.items() if value]):
            raise AuthorError(f"{unused[0]} needs --model-url URL")
        return None if self.model_url else load_stub(self.script)

    def endpoint(self) -> Endpoint:
        """Return the endpoint of `--model-url`. Raises `AuthorError` for flags that do not fit it."""
        return self.endpoint_at(self.model_url, "--model-url")


def secret_in(variable: str, flag: str) -> str:
    """Return the value of the environment variable that was given with `flag`; empty if none was. Raise `AuthorError`."""
    from rollout_server.authoring.author_traceback import AuthorError

    value = os.environ.get(variable, "") if variable else ""
    if variable and not value:
        raise AuthorError(f"{flag}: the environment variable {variable} is not set")
    return value


def accept_flags(*kinds: type[Any]) -> Callable[[_Command], _Command]:
    """Return a decorator that makes the fields of these dataclasses the flags of a command.

    typer derives flags from a function's signature, so the decorator replaces the signature. `--help` shows the options of a class
    with `help_panel` under that heading.
    """

    def decorate(command: _Command) -> _Command:
        command.__dict__["__signature__"] = Signature([each for kind in kinds for each in _parameters(kind)])
        return command

    return decorate


def pick_flags(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return one of these dataclasses, filled from the values that a command received."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


def _parameters(kind: type[Any]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        for option in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(option, OptionInfo) and option.rich_help_panel is None:
                option.rich_help_panel = getattr(kind, "help_panel", None)
    # The fields of a base class come last, so that --model-url precedes what describes the endpoint.
    ordered = sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)
    defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in ordered}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        for name, default in defaults.items()
    ]
