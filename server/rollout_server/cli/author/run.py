"""`rollout run`: one rollout, as it goes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.completion_flags import CompletionFlags
from rollout_server.cli.errors import Interrupted, complaining, hush_transformers
from rollout_server.cli.flags import taken, takes
from rollout_server.cli.json_output import JsonOutput, answering
from rollout_server.edge.grpc_loop import run_loop

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import Rollout, RolloutEvent

    from rollout_server.agent import Agent
    from rollout_server.authoring.rollout_result import Result
    from rollout_server.core.limits import Limits

_LONGEST_FILE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RunFlags:
    """What `rollout run` takes beside who completes."""

    target: Annotated[str, typer.Argument(metavar="TARGET", help="An agent: MODULE[:OBJECT] or FILE.py[:OBJECT].")]
    prompt: Annotated[str, typer.Option(help="What the user says.")] = ""
    message: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Instead: a file with a JSON list of messages, or one of them; -: standard input."
        ),
    ] = ""
    system: Annotated[str, typer.Option(help="A system message before the prompt.")] = ""
    metadata: Annotated[str, typer.Option(metavar="JSON", help="An object that the agent sees as run.metadata.")] = ""
    ground_truth: Annotated[str, typer.Option(help="metadata.ground_truth, for the agent's reward.")] = ""
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the rollout, for `rollout inspect FILE`.")] = (
        None
    )
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object on each line: the events, then the rollout.")
    ] = False


@takes(RunFlags, CompletionFlags)
def run(**given: Any) -> None:
    """Run one rollout of an agent, and show each turn, call and result as it happens.

    It runs through the real server. Without --model-url a mock model answers: with the lines of --script, or an echo of the prompt.

    The exit code is 0 if the rollout completed, else 1.

    With --json each event is a line {"event": kind, "sequence", "turn", ...} as GET /v1/rollouts/UID/events tells it, and the
    last line is {"rollout": {"end", "reason", "reward", "tokens", "authors", "messages", ...}}.
    """
    hush_transformers()
    flags, asked = taken(RunFlags, given), taken(CompletionFlags, given)
    with complaining("run"), answering(as_json=flags.as_json) as answers:
        from rollout_server.authoring.agent_loader import find_agents

        messages, metadata = _messages(flags), _metadata(flags)
        if flags.out is not None:
            flags.out.open("ab").close()  # what cannot be kept is not played
        [agent] = find_agents([flags.target])
        try:
            finished = run_loop(_run(agent, (flags, asked), (messages, metadata), answers))
        except KeyboardInterrupt:
            raise Interrupted("interrupted, and the rollout with it") from None
    raise typer.Exit(0 if finished else 1)


async def _run(
    agent: Agent,
    flags: tuple[RunFlags, CompletionFlags],
    conversation: tuple[list[dict[str, Any]], dict[str, Any]],
    answers: JsonOutput,
) -> bool:
    from rich.console import Console

    from rollout_server.authoring.playing import RolloutStart, play
    from rollout_server.cli.local_server import stage
    from rollout_server.cli.progress import Progress, show_result
    from rollout_server.cli.server_log import remarking

    console = Console(highlight=False)
    told, asked = flags
    messages, metadata = conversation
    progress = Progress(console, _limits(agent, asked))

    def seen(event: RolloutEvent) -> None:
        progress.see(event)
        if not event.HasField("finished"):
            answers.line(_event(event))

    with remarking(console):
        async with stage([agent], asked) as here:
            console.print(f"agent {agent.name}, {here.endpoint.title}", markup=False, soft_wrap=True)
            progress.messages(messages)
            with progress.shown():
                result = await play(
                    here.client, here.endpoint, RolloutStart("run", messages, agent.name, metadata), seen
                )
            rollout = await here.client.get(result.uid, view="full") if result.uid else None
    authors = _authors(rollout) if rollout is not None else None
    show_result(console, result, authors)
    answers.line(
        {"rollout": {"agent": agent.name, "endpoint": here.endpoint.told(), **_told(result), "authors": authors}}
    )
    if rollout is not None and told.out is not None:
        told.out.write_bytes(rollout.SerializeToString())
    if rollout is not None:
        _show_next(console, told, asked)
    return result.finished


def _show_next(console: Console, told: RunFlags, asked: CompletionFlags) -> None:
    steps = []
    if told.out is not None:
        steps.append(f"rollout inspect {told.out} shows every token of it")
    if not asked.model_url and not asked.script:
        steps.append("--model-url URL --model NAME asks a real model, --script FILE one that you write")
    elif told.out is None:
        steps.append("--out FILE keeps it for `rollout inspect FILE`, which shows every token")
    for step in steps:
        console.print(f"next: {step}", markup=False, soft_wrap=True, style="dim")


def _event(event: RolloutEvent) -> dict[str, Any]:
    """As the plain API tells it."""
    import msgspec
    from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_MESSAGES
    from rollout_gateway.rest.proto_json import event_json

    told = event_json(event, EVENT_DETAIL_MESSAGES) or {"event": "unknown", "sequence": event.sequence}
    plain: dict[str, Any] = json.loads(msgspec.json.encode(told))  # messages in it are still the text that they came as
    return plain


def _told(result: Result) -> dict[str, Any]:
    return {key: value for key, value in asdict(result).items() if key not in ("row", "repeat", "fingerprint")}


def _authors(rollout: Rollout) -> Mapping[str, int] | None:
    """Tokens by who wrote them; None where no tokens are known."""
    from rollout_server.cli.progress import authors_of
    from rollout_server.inspection.transcript import transcript_of

    letters: Counter[str] = Counter()
    for stretch in transcript_of(rollout).stretches:
        for part in stretch.runs:
            letters[part.letter] += len(part.ids)
    return authors_of(letters) if letters else None


def _limits(agent: Agent, asked: CompletionFlags) -> Limits:
    from rollout_server.core.limits import Limits

    return agent.limits.lower(Limits(turns=asked.turns, generated_tokens=asked.generated_tokens, seconds=asked.seconds))


def _messages(flags: RunFlags) -> list[dict[str, Any]]:
    from rollout_server.authoring.author_traceback import AuthorError

    if bool(flags.prompt) is bool(flags.message):
        raise AuthorError("give --prompt TEXT or --message FILE, one of them")
    given = _read(flags.message) if flags.message else [{"role": "user", "content": flags.prompt}]
    return [{"role": "system", "content": flags.system}, *given] if flags.system else given


def _read(name: str) -> list[dict[str, Any]]:
    from rollout_server.authoring.author_traceback import AuthorError

    if name == "-":
        content = sys.stdin.buffer.read(_LONGEST_FILE + 1)
    else:
        with Path(name).open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
    if len(content) > _LONGEST_FILE:
        raise AuthorError(f"a file of messages has at most {_LONGEST_FILE} bytes", name)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AuthorError(f"this is no JSON: {error}", name) from None
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in listed):
        raise AuthorError('messages are objects with a "role" and a "content", in a list', name)
    return listed


def _metadata(flags: RunFlags) -> dict[str, Any]:
    from rollout_server.authoring.author_traceback import AuthorError

    try:
        value = json.loads(flags.metadata) if flags.metadata else {}
    except (ValueError, RecursionError) as error:
        raise AuthorError(f"--metadata is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise AuthorError("--metadata must be a JSON object")
    return {**value, "ground_truth": flags.ground_truth} if flags.ground_truth else value
