"""Pytest in forks of one process, for mutation testing of the renderer: what takes seconds to import is imported once.

`python -m tests.tokens.forks serve SOCKET` waits in the directory of the tests, `python -m tests.tokens.forks run SOCKET ARGS...`
runs pytest there with these arguments and ends with its exit status. Nothing of the project is imported before a fork, so
each run sees the sources as they are then.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

_LONGEST_REQUEST = 65536
_CPU_SECONDS = 60  # a mutant may never come to an end, also in a thread, which no signal reaches


def serve(path: Path) -> None:
    """Runs one request after the other, for ever."""
    import pytest
    import transformers
    from hypothesis import Phase, settings

    # The same few examples each time, so that a mutant that lives today lives tomorrow.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("few", derandomize=True, database=None, phases=phases, deadline=None, print_blob=False)
    settings.load_profile("few")
    assert transformers.AutoTokenizer  # imported lazily: a look at it is what loads it
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            caller, _ = listener.accept()
            with caller:
                arguments = caller.recv(_LONGEST_REQUEST).decode().split("\0")
                child = os.fork()
                if not child:
                    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
                    os._exit(int(pytest.main(arguments)))
                caller.sendall(bytes([child != 0 and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF]))


def run(path: Path, arguments: list[str]) -> int:
    """The exit status of pytest."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(path))
        server.sendall("\0".join(arguments).encode())
        return server.recv(1)[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    sys.exit(run(Path(sys.argv[2]), sys.argv[3:]))
