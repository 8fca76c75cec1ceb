"""The parent of the workers, with a small program in their place."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARENT = """
import sys
from rollout_server.settings import load
from rollout_server.workers.supervisor import supervise

sys.exit(supervise(load(workers=2, grpc_port=0, http_port=0, journal="memory"), sys.argv[1:]))
"""
WORKER = """#!{python}
import signal, time
from rollout_server.workers.link import take_link

link = take_link()
link.send(up=str(link.plan.index), agents=["agent"] * 20_000)
link.send(serving=True)
if link.plan.index:
    time.sleep(0.1)
    link._connection.sendall(b'{{"drained"')  # killed while it sends a message
    raise SystemExit(3)
signal.pause()
"""


@contextmanager
def parent(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A parent whose command is the file `worker`. Worker 1 dies soon."""
    program = folder / "worker"
    program.write_text(WORKER.format(python=sys.executable))
    program.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(program)], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_with(process: subprocess.Popen[str], text: str) -> Iterator[str]:
    """The lines of the log with a text, as they come."""
    assert process.stderr is not None
    return (line for line in process.stderr if text in line)


def test_a_worker_that_dies_soon_after_each_start_is_started_with_growing_pauses(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        ends = lines_with(process, "it is started again in")
        assert [next(ends).split(" ended with ")[1] for _ in range(3)] == [
            f"exit code 3; it is started again in {seconds} s\n" for seconds in (0, 1, 3)
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_process_that_cannot_be_created_is_a_failed_start(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        next(lines_with(process, "with 2 workers"))
        (tmp_path / "worker").unlink()
        assert "No such file" in next(lines_with(process, "worker 1 cannot be started"))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
