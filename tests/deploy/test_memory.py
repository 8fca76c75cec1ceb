"""The command for the memory table in docs/deployment.md works; no figure is asserted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.deploy.files import ROOT
from tests.support.processes import environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


def test_each_tokenizer_has_a_row() -> None:
    command = [sys.executable, "-m", "bench.memory", str(TOY_TOKENIZER)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    head, line, idle, libraries, tokenizer = done.stdout.splitlines()
    assert (head.count("|"), line) == (4, "|---|---|---|")
    assert re.fullmatch(r"\| idle \| [1-9]\d* MiB \| \|", idle)
    assert re.fullmatch(r"\| .* built-in tokenizer \| \+ [1-9]\d* MiB \| \|", libraries)
    assert re.fullmatch(rf"\| {TOY_TOKENIZER.name} \| \+ -?\d+ MiB \| \+ -?\d+ MiB \|", tokenizer)
