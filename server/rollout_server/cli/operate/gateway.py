"""`rollout gateway`: the HTTP gateway alone."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from rollout_server.cli.errors import report_errors
from rollout_server.cli.json_output import open_output
from rollout_server.edge.grpc_loop import loop_factory, run_loop
from rollout_server.settings.standalone_gateway import GatewayOptions, load_options, name_of

_REPEATED = {"servers": "--server"}


def gateway(as_json: bool = False, **flags: object) -> None:
    """Serve HTTP before one or several rollout servers until SIGTERM or Ctrl-C.

    A flag goes before the environment, and that before .env. API keys are set there only: a command line can be read by others.

    With --json: {"serving": {"url", "port", "servers"}} on a line once it serves.
    """
    values = {name: value for name, value in flags.items() if value not in (None, [])}
    if as_json:
        values.setdefault("log_format", "json")
    with report_errors("gateway"), open_output(as_json=as_json) as output:
        options = load_options(**values)
        from rollout_server import logs, standalone_gateway  # gRPC takes its time

        logs.set_up(options.log_format, options.log_level)
        serving = standalone_gateway.serve(
            options, lambda url, port: output.line(_serving_document(url, port, options))
        )
        run_loop(serving, loop_factory())


def _serving_document(url: str, port: int, options: GatewayOptions) -> dict[str, Any]:
    return {"serving": {"url": url, "port": port, "servers": list(options.servers)}}


def _flags() -> inspect.Signature:
    """A flag for each setting that is no secret, for typer, which reads flags off a function's parameters."""
    fields = {name: field for name, field in GatewayOptions.model_fields.items() if field.annotation is not SecretStr}
    as_json = typer.Option("--json", help="A JSON object on a line once it serves; logs in JSON.")
    last = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, as_json]
    )
    return inspect.Signature([*(_flag(name, field) for name, field in fields.items()), last])


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = _REPEATED.get(name, f"--{name.replace('_', '-')}")
    default = f" Default: {field.default}." if field.default not in (None, "", ()) else ""
    option = typer.Option(None, flag, help=f"{field.description}{default} [{name_of(name)}]")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_kind(name, field))


def _kind(name: str, field: FieldInfo) -> Any:
    if name in _REPEATED:
        return list[str]
    # The words are checked with the other settings.
    return str if get_origin(field.annotation) is Literal else field.annotation


gateway.__dict__["__signature__"] = _flags()
