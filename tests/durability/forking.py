"""Fork processes of `rollout` whose modules are imported already, so that a restart takes a fraction of a second.

Reads one JSON object per line from stdin, {"arguments", "environment", "directory", "log"}, and prints the id of the new process.
The processes are those of the command line in every other respect. Their output is appended to the file `log`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any

from rollout_server.cli import main

from tests.support.forking import MODULES as COMMON

PR_SET_PDEATHSIG = 1
MODULES = (*COMMON, "tests.durability.agents")


def _become(job: dict[str, Any]) -> None:
    os.setsid()
    if sys.platform == "linux":  # a test run that is killed leaves no servers behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(job["directory"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path.insert(0, job["directory"])
    sys.argv = ["rollout", *job["arguments"]]
    main()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes processes that have ended
    for module in MODULES:
        import_module(module)
    gc.freeze()
    _print("ready")
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _become(json.loads(line))
            os._exit(0)
        _print(str(process))


_serve()
