"""Tests of the Python agent with correct, wrong and hostile code."""

import asyncio

import pytest
from agent import Python, run_python
from rollout_server.local_stack import ScriptedModel


def test_the_thousandth_prime(serving, scripted_model: ScriptedModel) -> None:
    code = "primes = [n for n in range(2, 8000) if all(n % d for d in range(2, int(n**0.5) + 1))]\nprint(primes[999])"
    model = scripted_model.calls("run_python", code=code).says("#### 7919")
    rollout = serving(Python()).play("What is the 1000th prime number?", model, metadata={"ground_truth": "7919"})
    assert rollout.tool_results == ["7919\n"]
    assert rollout.reward == 1.0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 / 0", "line 1, in <module>\nZeroDivisionError"),
        ("def", "SyntaxError"),
        ("pass", "nothing was printed"),
        ("while True: pass", "ended by"),
        ("x = bytearray(10**9)", "MemoryError"),
        ("print('x' * 10**7)", "cut: 10000001 bytes"),
        ("import time; time.sleep(60)", "stopped after 1 seconds"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; print(sorted(os.environ))", "LANG"),
    ],
)
def test_whatever_the_model_writes(code: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limited.CPU_SECONDS", 1)
    monkeypatch.setattr("limited.SECONDS", 1 if "sleep" in code else 30)
    assert expected in asyncio.run(run_python(code))


def test_the_servers_environment_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_KEY", "secret")
    assert "HUB_KEY" not in asyncio.run(run_python("import os; print(os.environ)"))


@pytest.mark.parametrize(
    "start", ["os.fork()", "os.system('true')", "subprocess.run(['true'])", "multiprocessing.Pool(1)"]
)
def test_a_program_starts_no_processes(start: str) -> None:
    printed = asyncio.run(run_python(f"import multiprocessing, os, subprocess\n{start}\nprint('started')"))
    assert "may not start processes" in printed
    assert not printed.endswith("started\n")
