"""`rollout run`: run one rollout and show its events live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.errors import Interrupted, quiet_transformers, report_errors
from rollout_server.cli.flags import CompletionFlags, accept_flags, pick_flags
from rollout_server.cli.json_output import JsonOutput, event_fields, open_output
from rollout_server.cli.prompt_flags import PromptFlags
from rollout_server.edge.grpc_loop import run_loop

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import Rollout, RolloutEvent

    from rollout_server.agent import Agent
    from rollout_server.core.limits import Limits


@dataclass(frozen=True, slots=True)
class RunFlags:
    """Arguments and flags of `rollout run`, without those of `PromptFlags` and `CompletionFlags`."""

    target: Annotated[str, typer.Argument(metavar="TARGET", help="Agent: MODULE[:OBJECT] or FILE.py[:OBJECT].")]
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the rollout for `rollout inspect FILE`.")] = (
        None
    )
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: the events, then the rollout.")
    ] = False


@accept_flags(RunFlags, PromptFlags, CompletionFlags)
def run(**values: Any) -> None:
    """Run one rollout of an agent and show turns, tool calls and tool results live.

    The command starts the server in its own process. Completions come from
    --model-url, or else from a mock model: --script, or a built-in one that calls
    a tool with arguments from the prompt and repeats its result.

    The exit code is 0 if the rollout completed, else 1.

    With --json each line is an event {"event": kind, "sequence", "turn", ...} as
    in GET /v1/rollouts/UID/events. The last line is {"rollout": {"end", "reason",
    "reward", "tokens", "authors", "messages", ...}}.
    """
    quiet_transformers()
    flags, completion = pick_flags(RunFlags, values), pick_flags(CompletionFlags, values)
    with report_errors("run"), open_output(as_json=flags.as_json) as output:
        from rollout_server.authoring.agent_loader import find_agents

        prompt = pick_flags(PromptFlags, values)
        conversation = prompt.read_messages(), prompt.read_metadata()
        if flags.out is not None:
            flags.out.open("ab").close()  # fail before the rollout if the file cannot be written
        [agent] = find_agents([flags.target])
        try:
            finished = run_loop(_run(agent, (flags, completion), conversation, output))
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the rollout was cancelled") from None
    raise typer.Exit(0 if finished else 1)


async def _run(
    agent: Agent,
    all_flags: tuple[RunFlags, CompletionFlags],
    conversation: tuple[list[dict[str, Any]], dict[str, Any]],
    output: JsonOutput,
) -> bool:
    from rich.console import Console

    from rollout_server.authoring.single_rollout import RolloutStart, run_rollout
    from rollout_server.cli.local_server import print_server_log, serve_for_command
    from rollout_server.cli.progress import Progress, show_result

    console = Console(highlight=False)
    flags, completion = all_flags
    messages, metadata = conversation
    progress = Progress(console, _limits(agent, completion))

    def on_event(event: RolloutEvent) -> None:
        progress.show(event)
        if not event.HasField("finished"):
            output.line(event_fields(event))

    with print_server_log(console) as log:
        async with serve_for_command([agent], completion) as server:
            console.print(f"agent {agent.name}, {server.endpoint.title}", markup=False, soft_wrap=True)
            progress.messages(messages)
            with progress.live():
                result = await run_rollout(
                    server.client, server.endpoint, RolloutStart("run", messages, agent.name, metadata), on_event
                )
            rollout = await server.client.get(result.uid, view="full") if result.uid else None
    result = log.with_reason(result)
    authors = _authors(rollout) if rollout is not None else None
    show_result(console, result, authors)
    fields = {"agent": agent.name, "endpoint": server.endpoint.description(), **asdict(result)}
    output.line({"rollout": {**fields, "authors": authors}})
    if rollout is not None and flags.out is not None:
        flags.out.write_bytes(rollout.SerializeToString())
    if rollout is not None:
        _show_next(console, flags, completion)
    return result.finished


def _show_next(console: Console, flags: RunFlags, completion: CompletionFlags) -> None:
    steps = []
    if flags.out is not None:
        steps.append(f"rollout inspect {flags.out} shows every token of the rollout")
    if not completion.model_url and not completion.script:
        steps.append("use a real model with --model-url URL --model NAME, or write a mock model with --script FILE")
    elif flags.out is None:
        steps.append("save the rollout with --out FILE, then `rollout inspect FILE` shows every token")
    for step in steps:
        console.print(f"next: {step}", markup=False, soft_wrap=True, style="dim")


def _authors(rollout: Rollout) -> Mapping[str, int] | None:
    """Return token counts by author, or None if the rollout has no token ids."""
    from rollout_server.cli.progress import authors_of
    from rollout_server.inspection.transcript import transcript_of

    letters: Counter[str] = Counter()
    for segment in transcript_of(rollout).segments:
        for part in segment.runs:
            letters[part.letter] += len(part.ids)
    return authors_of(letters) if letters else None


def _limits(agent: Agent, completion: CompletionFlags) -> Limits:
    from rollout_server.core.limits import Limits

    return agent.limits.lower(
        Limits(turns=completion.turns, generated_tokens=completion.generated_tokens, seconds=completion.seconds)
    )
