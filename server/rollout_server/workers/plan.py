"""What each worker gets of the whole: its place, its share of the limits and its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollout_server.edge.tools.pool import default_processes
from rollout_server.settings import Settings, WrongSettings
from rollout_server.settings.journal import MEMORY

_JOURNAL = "worker-"
_SHARED = (
    "max_running",
    "max_queued",
    "max_active_bytes",
    "max_running_per_caller",
    "max_queued_per_caller",
    "max_active_bytes_per_caller",
    "starts_per_minute_per_caller",
    "max_records",
    "max_record_bytes",
    "max_connections",
    "max_streams",
    "max_streams_of_caller",
    "trainer_connections",
    "tool_threads",
    "tool_processes",
    "toolset_calls",
    "models_concurrency",
)
"""Settings that limit the whole service."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker must know before it starts. The parent sends it over the link, because programs of agents see the environment.

    Attributes:
        index: number of this worker, from 0.
        count: number of workers.
        directory: directory of the private sockets.
        http_port, grpc_port, metrics_port: the public ports, never 0.
        journal: directory of this worker's journal, or "memory".
        secret: hexadecimal, the same in all workers: from it they make the keys that each must accept of the others.
    """

    index: int
    count: int
    directory: str
    http_port: int
    grpc_port: int
    metrics_port: int | None
    journal: str
    secret: str = field(repr=False)

    @property
    def gateway_key(self) -> str:
        """The key with which the workers' gateways call for HTTP clients that need none."""
        return f"gateway-{self.secret}"

    def address(self, index: int) -> str:
        """Return the gRPC address of a worker."""
        return f"unix:{self.socket(index)}"

    def socket(self, index: int) -> Path:
        """Return the path of a worker's gRPC socket."""
        return Path(self.directory) / f"worker-{index}.sock"

    def question_socket(self, index: int) -> Path:
        """Return the path of the socket at which a worker answers questions of the others."""
        return Path(self.directory) / f"worker-{index}.questions"

    def settings(self, whole: Settings) -> Settings:
        """Return the settings of this worker."""
        own: dict[str, object] = {"http_port": self.http_port, "grpc_port": self.grpc_port, "journal": self.journal}
        # The port of the metrics shows all workers, so the server of one does not open it.
        return whole.model_copy(update={**own, **_shares(whole, self.count), "metrics_port": None})


def _shares(whole: Settings, count: int) -> Mapping[str, int]:
    values = {name: getattr(whole, name) for name in _SHARED}
    values["tool_processes"] = whole.tool_processes or default_processes()
    return {name: -(-value // count) for name, value in values.items() if value is not None}


def journal_of(directory: Path | None, index: int) -> str:
    """Return the setting of a worker's journal. The first uses the directory itself, so that one process finds its rollouts."""
    if directory is None:
        return MEMORY
    return str(directory / f"{_JOURNAL}{index}" if index else directory)


def check_journals(directory: Path | None, count: int) -> None:
    """Raise `WrongSettings` if the directory has journals of more workers: nobody would continue their rollouts."""
    if directory is None:
        return
    numbers = (path.name.removeprefix(_JOURNAL) for path in directory.glob(f"{_JOURNAL}*") if path.is_dir())
    needed = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    if needed > count:
        raise WrongSettings(
            f"ROLLOUT_WORKERS: the journal {directory} has the rollouts of {needed} workers; start with --workers {needed}. To use "
            f"fewer, let their rollouts end, stop the server and remove the directories {_JOURNAL}{count} and above"
        )
