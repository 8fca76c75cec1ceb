"""What `rollout demo` prints of rollouts: their events, messages and tokens, and how a strict trainer judges them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_server.inspection.escape import visible

if TYPE_CHECKING:
    from osmosis.rollout.v1 import event_pb2, token_pb2
    from rich.console import Console

    from rollout_server.testing.checks.verdict import Verdict


def show_verdict(console: Console, verdict: Verdict | None, samples: Sequence[token_pb2.Sample] | None = None) -> bool:
    """Prints the trainer's verdict; whether all was accepted, and `samples`, where given, hold the trainer's tokens."""
    if verdict is None or not verdict.accepted or verdict.faults or (verdict.outcome and not verdict.concluded):
        console.print("  trainer: [red]refused[/]", end=" ")
        console.print(visible(str(verdict)), markup=False)
        return False
    theirs = verdict.sample
    accepted = (
        f"{plural(len(verdict.turns), 'turn')} and the outcome"
        if verdict.outcome
        else plural(len(verdict.turns), "mask")
    )
    trained = f"{sum(theirs.response_mask)} of {len(theirs.response_mask)} tokens train"
    text = f"  trainer: [green]accepted {accepted}[/], {trained}"
    same = samples is None or (len(samples) == 1 and _same(samples[0], verdict))
    if samples is not None:
        text += "; its record equals the server's, token for token" if same else "; [red]its record is another one[/]"
    console.print(text + "\n")
    return same


def _same(ours: token_pb2.Sample, verdict: Verdict) -> bool:
    theirs = verdict.sample
    return (
        tuple(ours.prompt_ids) == theirs.prompt_ids
        and tuple(ours.response_ids) == theirs.response_ids
        and tuple(ours.response_mask) == theirs.response_mask
        and tuple(ours.logprobs.values) == theirs.logprobs
    )


def show_ledger(console: Console, segment: token_pb2.Segment, tokenizer_dir: Path) -> None:
    """Prints a segment's text: what the model wrote in green (mask 1), all else dim (mask 0)."""
    from osmosis.rollout.v1 import token_pb2
    from rich.text import Text
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    text = Text()
    for span in segment.spans:
        lines = tokenizer.decode(span.token_ids, skip_special_tokens=False).split("\n")
        decoded = "\n".join(map(visible, lines))
        if span.mask_reason == token_pb2.MASK_REASON_PROMPT:
            decoded = f"… {decoded[-160:]}"
        model = span.author == token_pb2.AUTHOR_MODEL
        # Without colours the brackets tell.
        text.append(f"⟦{decoded}⟧" if model else decoded, style="bold green" if model else "dim")
    console.print("\n  the ledger: [bold green]the model wrote it, mask 1[/], [dim]others did, mask 0[/]")
    console.print(text)


def show_messages(console: Console, messages: Sequence[Mapping[str, Any]]) -> None:
    """Prints each message on a line of its own."""
    for message in messages:
        console.print(visible(f"  {message['role']:9} {_message_text(message)}"), markup=False)


def show_metrics(console: Console, outcome: Mapping[str, Any]) -> None:
    """Prints how a rollout of an HTTP dialect ended, and what it used."""
    metrics = outcome["metrics"]
    console.print(
        f"  {outcome['status']}, {outcome['finish_reason']}: {plural(metrics['num_llm_calls'], 'turn')}, "
        f"{plural(metrics['num_tool_calls'], 'tool call')}, {plural(metrics['response_tokens'], 'token')} generated, "
        f"{metrics['total_latency_ms']:.0f} ms",
        markup=False,
    )
    if outcome.get("error_message"):
        console.print(visible(f"  {outcome['error_message']}"), style="red", markup=False)


def plural(number: int, noun: str) -> str:
    """So many of them: 1 turn, 2 turns."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def event_line(event: event_pb2.RolloutEvent) -> str:
    """One event in a few words."""
    kind = event.WhichOneof("event")
    match kind:
        case "asked":
            return f"turn {event.turn}: asked"
        case "answered":
            completion = event.answered
            mask = f", mask of {completion.mask_length}" if completion.HasField("mask_length") else ""
            message = json.loads(completion.message.json)
            return (
                f"turn {event.turn}: {_message_text(message)}  ({plural(completion.generated_tokens, 'token')}{mask})"
            )
        case "tool_returned":
            returned = event.tool_returned
            return f"turn {event.turn}: {returned.name} returned {json.loads(returned.message.json)['content']}"
        case "finished":
            return f"finished: {event.finished.outcome.stop.reason or 'failed'}"
        case "forked" | "given_up" | "masked" | "observed":
            return ": ".join(agent_action(event))
        case _:
            return str(kind).replace("_", " ")


def agent_action(event: event_pb2.RolloutEvent) -> tuple[str, str]:
    """What an agent did beside its turns and calls: the kind of action, and a description."""
    from rollout_client.samples import SEGMENT_KINDS

    match event.WhichOneof("event"):
        case "forked":
            forked = event.forked
            kind = SEGMENT_KINDS.get(forked.origin.kind, "conversation")
            tools = f", with the tools {', '.join(forked.tools)}" if forked.tools else ", without tools"
            count = plural(forked.count, "message")
            return "fork", f"segment {event.segment_id}, a {kind} of segment {forked.of_segment_id}: {count}{tools}"
        case "given_up":
            return "given up", f"turn {event.turn}: the agent no longer waits for its answer"
        case "masked":
            return "masked", f"turn {event.turn} does not train: {event.masked.reason}"
        case _:
            value = f" {event.observed.value_json}" if event.observed.value_json else ""
            return "observed", f"{event.observed.what}{value}"


def _message_text(message: Mapping[str, Any]) -> str:
    calls = [f"{c['function']['name']}{c['function']['arguments']}" for c in message.get("tool_calls") or ()]
    return " ".join([str(message.get("content") or ""), *calls]).strip()
