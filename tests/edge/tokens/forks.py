"""Pytest in forks of one process, for mutation testing of the renderer: slow imports happen once.

`python -m tests.edge.tokens.forks serve SOCKET` waits in the directory of the tests. `python -m tests.edge.tokens.forks run
SOCKET ARGS...` runs pytest there with these arguments and exits with its status. Nothing of the project is imported before
a fork, so each run uses the current sources.
"""

from __future__ import annotations

import copy
import os
import resource
import shutil
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_LONGEST_REQUEST = 65536
_CPU_SECONDS = 45  # a mutant may never terminate, also in a thread, which no signal reaches
_WAIT_SECONDS = 120.0
_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
_MUTATED = Path("rollout_server/edge/tokens")
_SHARED = Path("../shared/tokenizers")


def serve(path: Path) -> None:
    """Serve one request after the other, forever."""
    import pydantic
    import pytest
    from hypothesis import Phase, settings
    from hypothesis import strategies as st

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = [option for name in _PLUGINS if import_module(name) for option in ("-p", name)]
    assert pydantic.BaseModel  # pydantic imports it lazily, on first access
    # The same few examples in each run, so that results are reproducible.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("few", derandomize=True, database=None, phases=phases, deadline=None, print_blob=False)
    settings.load_profile("few")
    st.text().validate()
    _keep_tokenizers()
    _fork(lambda: _compile_tests(lambda arguments: pytest.main([*options, *arguments])))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            caller, _ = listener.accept()
            with caller:
                arguments = [*options, *caller.recv(_LONGEST_REQUEST).decode().split("\0")]
                caller.sendall(bytes([_fork(lambda arguments=arguments: pytest.main(arguments))]))


def run(path: Path, arguments: list[str]) -> int:
    """Run pytest and return its exit status."""
    until = time.monotonic() + _WAIT_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(path))
        server.sendall("\0".join(arguments).encode())
        return server.recv(1)[0]


def _fork(work: Any) -> int:
    """Run `work` in a child process and return its exit status."""
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        os._exit(int(work()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


def _keep_tokenizers() -> None:
    """Read each tokenizer of the tests once. Later loads return a copy with its own template over the same vocabulary."""
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained
    places = [Path("rollout_server/testing/tokenizer"), *(_SHARED.iterdir() if _SHARED.exists() else ())]
    kept = {
        place.resolve(): read(place, local_files_only=True) for place in places if (place / "tokenizer.json").exists()
    }

    def load(place: Any, **options: Any) -> Any:
        found = kept.get(Path(place).resolve())
        return read(place, **options) if found is None else copy.copy(found)

    AutoTokenizer.from_pretrained = load


def _compile_tests(main: Any) -> int:
    """Compile the tests, and the sources that are not mutated."""
    sys.dont_write_bytecode = False
    status = int(main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/edge/tokens"]))
    shutil.rmtree(_MUTATED / "__pycache__", ignore_errors=True)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    sys.exit(run(Path(sys.argv[2]), sys.argv[3:]))
