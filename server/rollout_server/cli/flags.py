"""Flags as fields: a command takes them as dataclasses, such as those of commands that run rollouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from rollout_server.authoring.endpoint import Endpoint
    from rollout_server.authoring.model_stubs import ModelStub

_DIALECTS = "openai, vllm, sglang, grpc, http-plain or http-masked"


_T = TypeVar("_T")
_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class CompletionFlags:
    """How a rollout's completions are asked for."""

    model_url: Annotated[
        str, typer.Option(metavar="URL", help="The endpoint that completes. Without one a scripted model stands in.")
    ] = ""
    dialect: Annotated[
        str, typer.Option(help=f"What is spoken there: {_DIALECTS}. By default grpc or openai, as the URL says.")
    ] = ""
    model: Annotated[str, typer.Option(metavar="NAME", help="The model's name there.")] = ""
    api_key_env: Annotated[
        str, typer.Option(metavar="VAR", help="The environment variable that holds the endpoint's API key.")
    ] = ""
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME[=DIRECTORY]", help="The model's tokenizer: http-masked needs it, others may.")
    ] = ""
    script: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="What stands in: FILE.json (as PUT /script takes it), or FILE.py[:OBJECT] with reply(messages).",
        ),
    ] = ""
    scripted: Annotated[
        bool,
        typer.Option("--scripted", help="A stand-in without a script: it repeats what the user said. The default."),
    ] = False
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one answer.")] = None
    turns: Annotated[int | None, typer.Option(min=1, help="Most turns of a rollout.")] = None
    generated_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens that a rollout generates.")] = None
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Longest time of a rollout.")] = None

    def model_stub(self) -> ModelStub | None:
        """What stands in for a model; None where there is one. Raises `AuthorError`."""
        from rollout_server.authoring.author_traceback import AuthorError
        from rollout_server.authoring.model_stubs import load_stub

        if self.model_url and (self.script or self.scripted):
            raise AuthorError("--model-url and --script exclude each other: either a model completes, or a script does")
        if self.script and self.scripted:
            raise AuthorError("--scripted is a stand-in without a script; leave it out beside --script")
        alone = {"--dialect": self.dialect, "--model": self.model, "--api-key-env": self.api_key_env}
        if not self.model_url and (needless := [flag for flag, value in alone.items() if value]):
            raise AuthorError(f"{needless[0]} needs --model-url URL")
        return None if self.model_url else load_stub(self.script)

    def endpoint(self) -> Endpoint:
        """The endpoint of --model-url. Raises `AuthorError`."""
        from rollout_server.authoring.endpoint import Endpoint, check_endpoint

        return check_endpoint(
            Endpoint(
                self.model_url,
                self.dialect,
                self.model,
                self._bearer(),
                self.tokenizer.partition("=")[0],
                self.sampling,
                self.limits,
            )
        )

    @property
    def sampling(self) -> dict[str, float | int]:
        """What the client takes as sampling."""
        options = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def limits(self) -> dict[str, float | int]:
        """What the client takes as limits."""
        options = {"turns": self.turns, "generated_tokens": self.generated_tokens, "time": self.seconds}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def tokenizers(self) -> dict[str, Path]:
        """Where the tokenizer is, if that was said."""
        name, _, directory = self.tokenizer.partition("=")
        return {name: Path(directory)} if directory else {}

    def _bearer(self) -> str:
        from rollout_server.authoring.author_traceback import AuthorError

        if not self.api_key_env:
            return ""
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise AuthorError(f"--api-key-env: the environment variable {self.api_key_env} is not set")
        return key


def accept_flags(*kinds: type[Any]) -> Callable[[_Command], _Command]:
    """A command that takes the fields of these dataclasses as keywords: typer reads flags off a function's parameters."""

    def decorate(command: _Command) -> _Command:
        command.__dict__["__signature__"] = Signature([each for kind in kinds for each in _parameters(kind)])
        return command

    return decorate


def pick_flags(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """One of these dataclasses, of what a command was given."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


def _parameters(kind: type[Any]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in fields(kind)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        for name, default in defaults.items()
    ]
