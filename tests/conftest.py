"""Configuration for all suites: the marks `thorough` and `heavy`, hypothesis settings, and a table of the time per suite."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from rollout_server.edge.tokens.template_probe import TemplateTraits
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.aio.collector import collector_paused
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.authorities import share_authorities
from tests.support.routes import share_signatures

# Collection creates objects that stay. Scanning them again and again would take a quarter of its time.
gc.disable()

# Shells let their background jobs ignore SIGINT. Programs that tests start would inherit that, and Ctrl-C would not end them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Silence library warnings on stderr that are unrelated to test failures: PyTorch is not installed, a connection was closed.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

HEAVY = re.compile(
    r"""tests/(?:
      hostile/test_(?:bursts|fuzz|http|templates|tools)\.py                       # attacks, each on a server of its own
    | (?:edge/rpc/test_(?:proto|agent_service)|gateway/test_openapi)_fuzz\.py                        # fuzzers
    | edge/rpc/test_bursts\.py | system/test_(?:many_rollouts|examples_at_once)\.py  # hundreds and thousands
    | .*::test_250_rollouts_at_once | authoring/test_ending\.py::test_(?:every_rollout|nothing_that|two_hundred)\w*
    | clients/test_programs\.py::test_a_program\w+\[(?:langgraph|openai|pydantic_ai)_agents?[\w-]*\]  # slow imports
    | clients/test_(?:programs\.py::test_(?:smolagents|two_processes|a_program_calls)\w* | heartbeats\.py)
    | system/test_own_loop_docs\.py::test_functions_with\w*
    | system/test_captured_agents\.py::test_(?:many|large_calls)\w* | .*::test_(?:many_programs|fifty)_at_once
    | system/test_model_endpoint_faults\.py::test_(?:a_flood|very_many|a_body_over|hostile_bodies|connections)\w*
    | edge/trainer/grpc/test_streams\.py::test_each_lie\w* | .*::test_a_field_of_100_megabytes_is_refused
    | cli/test_processes\.py::test_an_evaluation_that_is_killed\w*               # three processes
    | (?:exact/test_trl_templates|edge/tokens/test_later_system)\.py::\w+\[(?:\w+-)?\w+_training\]  # variants of templates
    | exact/test_trl_templates\.py::\w+\[apart-\w+\]                          # the mixed conversation has turns of both kinds
    | exact/test_fifty_turns\.py::\w+\[[\w.-]+/\S+\]     # variants of templates, whose ledger `make check` tests
    | exact/test_first_prompts\.py::test_templates_of\w+                       # random templates reach the same
    | page/test_rollout\.py::test_a_long_rollout\[10000\] | page/test_many\.py::\w+\[200\]  # as 2,000 events, 60 rollouts
    | durability/test_crashes\.py::\w+\[load\]                                  # 200 rollouts per crash
    | test_bench\.py::test_(?:a_quick_run|a_small_crowd|two_workers)\w*  # `make check` ends with `make bench-quick`
    | system/test_toolset_faults\.py::test_servers_that_cannot_be_reached\w*\[grpc\S*  # half a minute of attempts
    | workers/test_(?:processes\.py::test_a_worker_that_hangs|trainers\.py::)\w*  # a minute of timeouts, and two deaths
    | simulator/test_worlds\.py::\w+\[[1-7]\]                     # 1,750 worlds; the other 250 reach everything too
    )""",
    re.VERBOSE,
)
"""Load, attacks and fuzzers, which only `make test-all` runs."""

THOROUGH = re.compile(
    r"""tests/(?:
      exact/test_fifty_turns\w*\.py::\w+\[(?!toy\]) | tokencheck/test_families\.py::\w+\[(?!toy\])  # large tokenizers
    | exact/test_first_prompts\.py::test_tokenizers\w+\[(?!toy\])              # large tokenizers
    | client/trainer/test_(?:stale|policy)\.py::test_(?:random|no_call)\w*\[(?:stream|None)[\w-]*\]  # hundreds of rollouts
    | durability/test_own_loops\.py::test_an_agent_elsewhere\w*                 # five restarts
    | system/test_rollout_tools\.py::test_a_tool_call_keeps\w*                # a pause of the agent
    | system/test_toolset_isolation\.py::test_(?:a_shared|an_mcp_server_that|served_tools)\w*  # 20 rollouts each
    | system/test_toolset_life\.py::test_a_server_does_not_start\w*\[\[\S*  # a process each
    | system/test_toolset_pages\.py::test_served_tools\w*                     # four commands
    | page/test_rollout\.py::test_a_long_rollout\[2000\]                       # a rollout of 2,000 events
    | workers/test_(?:(?:access|processes|supervisor)\.py::\w+|service\.py::test_(?!every_rpc)\w+)  # servers of processes
    | page/test_view\.py::test_(?:what_cannot|a_journal_in_use)\w*              # a process each
    | tool_server/test_mcp\.py::test_(?:a_message_over|a_signal_lets|standard_input\w+\[legacy\])\w*  # a process each
    | test_bench\.py | edge/tracing/test_(?:trees|exports|page)\.py::\w+\[of\ the\ process\S*  # a server each
    )""",
    re.VERBOSE,
)
"""Slow tests of tokens and durability, and the benchmarks, which `make check` runs and `make test` does not."""

# A slow machine must not fail a test, so examples have no deadline.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def toy_is_probed_once() -> Iterator[None]:
    """Servers probe the toy tokenizer's template once per process: it takes 0.1 s, and thousands of tests start a server."""
    found: dict[tuple[object, ...], TemplateTraits] = {}

    class ProbedOnce(LoadedTokenizer):
        def _probed(self, template_kwargs: Mapping[str, Any]) -> TemplateTraits:
            tokenizer = self._tokenizer
            if getattr(tokenizer, "name_or_path", "") != str(TOY_TOKENIZER):
                return super()._probed(template_kwargs)
            key = (
                str(tokenizer.chat_template),
                tokenizer.eos_token_id,
                str(self._special),
                json.dumps(template_kwargs),
            )
            if key not in found:
                found[key] = super()._probed(template_kwargs)
            return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_server.edge.tokens.cache.LoadedTokenizer", ProbedOnce)
        yield


@pytest.fixture(scope="session", autouse=True)
def authorities_are_shared() -> Iterator[None]:
    """HTTP clients read the certificates of TLS authorities once per process."""
    with pytest.MonkeyPatch.context() as patch:
        share_authorities(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def routes_are_analysed_once() -> Iterator[None]:
    """The routes of the gateway, which each server creates, are analysed once per process."""
    with pytest.MonkeyPatch.context() as patch:
        share_signatures(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def state_of_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that keep a journal by default keep it in a temporary directory and not in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and begin with servers of several processes.

    Their longest test takes a minute, for most of which it waits: at the end, the other processes of the run would be idle.
    """
    items.sort(key=lambda item: not item.nodeid.startswith("tests/workers/"))
    for item in items:
        if HEAVY.match(item.nodeid):
            item.add_marker(pytest.mark.heavy)
        elif THOROUGH.match(item.nodeid):
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """Freeze what collection created, so that the garbage collector never scans it, and enable the collector."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Parse the source of a failed test without the garbage collector: see `tests.support.syntax`."""
    with collector_paused():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print seconds and test count per folder of `tests/`, set-up and tear-down included."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                suite = _suite(Path(report.nodeid.partition("::")[0]))
                seconds[suite] += report.duration
                tests[suite] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.write_sep("=", "suites")
        for suite in sorted(seconds, key=lambda name: -seconds[name]):
            terminalreporter.write_line(f"{suite:32} {tests[suite]:5} tests {seconds[suite]:7.1f} s")


def _suite(module: Path) -> str:
    """Return the suite of a test file: its top folder, with one more level for `edge` and `gateway`."""
    if len(module.parts) <= 2:
        return module.stem
    return "/".join(module.parts[1:-1][: 2 if module.parts[1] in ("edge", "gateway") else 1])
