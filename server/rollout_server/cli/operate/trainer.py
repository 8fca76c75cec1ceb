"""`rollout trainer`: run the strict trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.demo_output import plural
from rollout_server.cli.errors import quiet_transformers, report_errors
from rollout_server.cli.flags import accept_flags, pick_flags
from rollout_server.cli.json_output import JsonOutput, open_output
from rollout_server.edge.grpc_loop import run_loop
from rollout_server.inspection.escape import visible
from rollout_server.runtime.aio.stop_signals import StopSignals
from rollout_server.testing import TrainerDialect

if TYPE_CHECKING:
    from rollout_server.testing.checks.verdict import Verdict
    from rollout_server.testing.trainer import StrictTrainer


@dataclass(frozen=True, slots=True)
class TrainerFlags:
    """Flags of `rollout trainer`."""

    port: Annotated[int, typer.Option(envvar="MOCK_TRAINER_PORT", help="HTTP port; 0 picks a free one.")] = 9001
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of a tokenizer. Default: the built-in one.")] = None
    tools_from: Annotated[
        str | None,
        typer.Option(help="Base URL of the gateway whose GET /tools lists the tools to render; empty: no tools."),
    ] = "http://127.0.0.1:9000"
    tools_key: Annotated[
        str | None, typer.Option(envvar="ROLLOUT_API_KEY", help="API key for GET /tools, if the gateway requires one.")
    ] = None
    api_key: Annotated[str | None, typer.Option(envvar="MOCK_TRAINER_API_KEY", help="Require this bearer token.")] = (
        None
    )
    dialect: Annotated[
        TrainerDialect,
        typer.Option(help="Whether requests carry response masks; either: as in each rollout's first call."),
    ] = TrainerDialect.EITHER
    script: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Mock model: FILE.json (format of PUT /script) or FILE.py[:OBJECT] with reply(messages). "
            "Default: a calculator.",
        ),
    ] = ""
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: once it serves, then for each outcome.")
    ] = False


@accept_flags(TrainerFlags)
def trainer(**values: Any) -> None:
    """Run a mock trainer that verifies every token and mask and rejects errors.

    It serves the callbacks of both Osmosis HTTP APIs and the gRPC
    CompletionService. After POST /rollout, callbacks carry response masks. After
    POST /v1/rollout/init they do not, and the last one is
    POST /v1/rollout/completed. The trainer prints one line per outcome.

    GET /verdicts lists the results, GET /verdict?rollout_id= shows one in detail.
    PUT /script?rollout_id= sets completions and faults of a rollout.

    With --json: a line {"serving": {"url", "grpc_target"}} once it serves, then
    for each outcome a line {"verdict": {"rollout_id", "accepted", "turns",
    "refusals", "outcome", ...}} as in GET /verdicts.
    """
    quiet_transformers()
    flags = pick_flags(TrainerFlags, values)
    with report_errors("trainer"), open_output(as_json=flags.as_json) as output:
        run_loop(_serve(_trainer(flags, output), output))


def _trainer(flags: TrainerFlags, output: JsonOutput) -> StrictTrainer:
    from rollout_server.authoring.model_stubs import ModelStub, load_stub
    from rollout_server.testing.model.calculator import CalculatorModel
    from rollout_server.testing.trainer import StrictTrainer

    model = load_stub(flags.script) if flags.script else ModelStub("calculator", CalculatorModel())
    return StrictTrainer(
        _directory(flags.tokenizer),
        model=model.model,
        script=model.script,
        host=flags.host,
        port=flags.port,
        tools_from=flags.tools_from or None,
        tools_key=flags.tools_key,
        api_key=flags.api_key,
        dialect=flags.dialect,
        reuses_ids=True,
        settled=lambda verdict: _print_verdict(verdict, output),
    )


def _print_verdict(verdict: Verdict, output: JsonOutput) -> None:
    import msgspec

    from rollout_server.testing.http.wire import summary_body

    if output.as_json:
        output.line({"verdict": msgspec.to_builtins(summary_body(verdict))})
    else:
        typer.echo(verdict_line(verdict))


def _directory(tokenizer: Path | None) -> Path:
    """Return the directory of the tokenizer; None means the built-in one. Raises ValueError if it holds no tokenizer."""
    from rollout_server.testing.tokenizer import TOY_TOKENIZER

    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").exists():
        raise ValueError(f"{tokenizer} is not a tokenizer directory: it has no tokenizer_config.json")
    return tokenizer or TOY_TOKENIZER


def verdict_line(verdict: Verdict) -> str:
    """Return one line about a rollout whose outcome has arrived: its result and all refusals."""
    body = verdict.outcome.body if verdict.outcome else {}
    parts = [
        plural(len(verdict.turns), "turn"),
        f"{plural(sum(verdict.sample.response_mask), 'token')} generated",
    ]
    if body.get("reward") is not None:
        parts.append(f"reward {body['reward']}")
    if verdict.siblings:
        parts.append(f"{plural(verdict.siblings, 'turn')} regenerated")
    parts += [f"refused: {refusal.text}" for refusal in verdict.refusals]
    ended = f"{body.get('status')}, {body.get('finish_reason')}"
    return visible(f"{verdict.rollout_id}: {ended}; {', '.join(parts)}")


async def _serve(trainer_served: StrictTrainer, output: JsonOutput) -> None:
    signals = StopSignals()
    async with trainer_served:
        typer.echo(
            f"strict trainer on {trainer_served.url}; verdicts at /verdicts; CompletionService at grpc://{trainer_served.grpc_target}",
            err=True,
        )
        output.line({"serving": {"url": trainer_served.url, "grpc_target": trainer_served.grpc_target}})
        await signals.first.wait()
