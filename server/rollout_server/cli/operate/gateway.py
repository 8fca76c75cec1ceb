"""`rollout gateway`: run the HTTP gateway without a server."""

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
    """Run the HTTP gateway for one or more rollout servers until SIGTERM or Ctrl-C.

    Flags take precedence over the environment, and the environment over .env.
    API keys have no flag, because other users of the machine can read command
    lines.

    With --json: a line {"serving": {"url", "port", "servers"}} once it serves.
    """
    values = {name: value for name, value in flags.items() if value not in (None, [])}
    if as_json:
        values.setdefault("log_format", "json")
    with report_errors("gateway"), open_output(as_json=as_json) as output:
        options = load_options(**values)
        from rollout_server import logs, standalone_gateway  # imported late: gRPC is slow to import

        logs.set_up(options.log_format, options.log_level)
        serving = standalone_gateway.serve(
            options, lambda url, port: output.line(_serving_document(url, port, options))
        )
        run_loop(serving, loop_factory())


def _serving_document(url: str, port: int, options: GatewayOptions) -> dict[str, Any]:
    return {"serving": {"url": url, "port": port, "servers": list(options.servers)}}


def _flags() -> inspect.Signature:
    """Return a signature with a flag for each setting that is not a secret; typer derives flags from signatures."""
    fields = {name: field for name, field in GatewayOptions.model_fields.items() if field.annotation is not SecretStr}
    as_json = typer.Option("--json", help="Print a JSON object on one line once it serves; log in JSON.")
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
    # `load_options` checks the allowed words, so that the error names the setting.
    return str if get_origin(field.annotation) is Literal else field.annotation


gateway.__dict__["__signature__"] = _flags()
