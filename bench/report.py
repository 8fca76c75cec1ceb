"""Output of a result as a table and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.result import GATEWAY_TARGET, START_TARGET, Cost, Measured, Result
from bench.workload import Entry

_PACKAGES = "rollout-server aiohttp httpx grpcio fastapi uvicorn uvloop msgspec transformers tokenizers"
_MEGABYTE = 1024 * 1024
_QUIET = 0.15
"""Up to this share of other load, a program counts as alone on its core. The kernel's network processing is part of it."""


def machine() -> Mapping[str, Any]:
    """Return a description of this machine and its software."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in _PACKAGES.split()},
    }


def show(result: Result, tokenizer: str, console: Console) -> None:
    """Print the table and its notes."""
    table = Table(title="CPU of the server per turn, compared with a floor without tokens", title_justify="left")
    table.add_column("workload", no_wrap=True)
    table.add_column("API")
    for heading in ("server\nms/turn", "range", "floor\nms/turn", "ratio", "server\nturns/s", "floor\nturns/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for measured in result.measured:
        table.add_row(*_row(measured))
    console.print(table)
    for line in _lines(result, tokenizer):
        console.print(line, highlight=False)


def as_json(result: Result, tokenizer: str) -> bytes:
    """Return all results and the description of the machine as JSON."""
    found = {
        "machine": machine(),
        "tokenizer": tokenizer,
        "cores_apart": result.apart,
        "starts": result.starts,
        "end_resident_bytes": result.resident,
        "gateway_per_rollout": result.gateway,
        "masks": result.counts,
        "workloads": [_fields(measured) for measured in result.measured],
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def _row(measured: Measured) -> Sequence[str]:
    server, floor = measured.server, measured.floor
    return (
        str(measured.workload),
        measured.entry,
        f"{server.cpu_ms:.2f}",
        f"{server.cpu_ms_low:.2f}-{server.cpu_ms_high:.2f}",
        f"{floor.cpu_ms:.2f}",
        f"{measured.ratio:.1f}",
        _rate(server),
        _rate(floor),
        _target(measured.ratio, measured.workload.target, " x"),
    )


def _rate(cost: Cost) -> str:
    return f"{cost.turns_per_second:,.0f}{'*' if cost.held_up else ''}"


def _target(value: float, target: float | None, unit: str) -> str:
    if target is None:
        return ""
    return f"meets {target:g}{unit}" if value <= target else f"MISSES {target:g}{unit}"


def _lines(result: Result, tokenizer: str) -> Sequence[str]:
    return [*_circumstances(result, tokenizer), *_whole(result), *result.counts.faults, _machine_line()]


def _circumstances(result: Result, tokenizer: str) -> Iterator[str]:
    prompts = {measured.workload.conversation: measured.prompt_tokens for measured in result.measured}
    ranges = ", ".join(_range(lengths) for lengths in prompts.values())
    yield f"prompts of {ranges} tokens; tokenizer {tokenizer!r}"
    if result.apart:
        yield "server and floor ran on one core, trainer and driver on another"
    else:
        yield "all programs shared ONE core, so turns/s are too low and CPU is too high"
    costs = [cost for measured in result.measured for cost in (measured.server, measured.floor)]
    if any(measured.entry is Entry.ENDPOINT for measured in result.measured):
        yield "endpoint: one turn is one call of an agent that runs elsewhere; its floor is a proxy that reads nothing"
    if any(cost.held_up for cost in costs):
        yield "* limited by trainer and driver, which were busy nearly all the time"
    others = max(cost.others_share for cost in costs)
    if others > _QUIET:
        yield f"BUSY MACHINE: other processes used up to {others:.0%} of that core; turns/s are too low and CPU is too high"


def _range(lengths: Sequence[int]) -> str:
    return f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])


def _whole(result: Result) -> Iterator[str]:
    """Yield the results that concern the whole server: start, memory, gateway and masks."""
    yield (
        f"start until healthy {result.start_seconds:.2f} s ({_target(result.start_seconds, START_TARGET, ' s')}), "
        f"{result.start_cpu:.2f} s of CPU; "
        f"memory {result.idle_resident / _MEGABYTE:.0f} MB idle, {result.resident / _MEGABYTE:.0f} MB at the end"
    )
    gateway = result.gateway
    if gateway is not None:
        verdict = _target(gateway.ms, GATEWAY_TARGET, " ms")
        yield f"HTTP adds {gateway.ms:.2f} ± {gateway.noise:.2f} ms of CPU to a rollout ({verdict})"
    yield f"masks: {result.counts.masks_accepted} accepted, {result.counts.masks_refused} refused"


def _machine_line() -> str:
    facts = machine()
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}, {facts['python']}; {packages}"


def _fields(measured: Measured) -> Mapping[str, Any]:
    target = measured.workload.target
    return {
        "workload": measured.workload,
        "entry": measured.entry,
        "prompt_tokens": measured.prompt_tokens,
        "server": measured.server,
        "floor": measured.floor,
        "ratio": measured.ratio,
        "meets_target": None if target is None else measured.ratio <= target,
        "server_rounds": measured.server_rounds,
        "floor_rounds": measured.floor_rounds,
    }


def _cpu() -> str:
    """Return the name of the processor, or its architecture if the system does not report a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
