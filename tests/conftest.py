"""Configuration for all suites: the mark `heavy`, hypothesis settings, and a table of the time per suite."""

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
    | hostile/test_grpc\.py::test_(?:large_requests_that_are_refused|opening_and_resetting)\w*
    | (?:edge/rpc/test_(?:proto|agent_service)|gateway/test_openapi)_fuzz\.py                        # fuzzers
    | edge/rpc/test_bursts\.py | system/test_(?:many_rollouts|examples_at_once)\.py  # hundreds and thousands
    | .*::test_(?:250_rollouts|200_rollouts|fifty_rollouts|many_rollouts|many_programs|fifty)_at_once\w*
    | edge/rpc/test_survival\.py::test_a_thousand\w* | evaluation/test_report\.py::test_of_very_many\w*
    | authoring/test_ending\.py::test_(?:every_rollout|nothing_that|two_hundred)\w*
    | client/trainer/test_(?:stale|policy)\.py::test_(?:random|no_call)\w*        # hundreds of rollouts
    | exact/test_planted_faults\.py | durability/test_checks\.py | simulator/test_simulator\.py::test_a_planted\w*  # test tests
    | exact/test_trl_templates\.py::\w+\[apart-\w+\]                          # the mixed conversation has turns of both kinds
    | exact/test_fifty_turns_in_streams\.py                                 # as over HTTP and in token mode
    | tokencheck/test_planted\.py::test_(?:thinking|results_need|the_date|a_template_that|what_a_template|a_count)\w*
    | clients/test_programs\.py::test_a_program\w+\[(?:langgraph|openai|pydantic_ai)_agents?[\w-]*\]  # slow imports
    | clients/test_(?:programs\.py::test_(?:smolagents|two_processes|a_program_calls)\w* | heartbeats\.py)
    | clients/test_errors\.py::test_(?:a_prompt_that|a_rollout_that)\w*           # the same client as the first
    | system/test_own_loop_docs\.py::test_functions_with\w*
    | system/test_captured_agents\.py::test_(?:many|large_calls)\w*
    | system/test_model_endpoint_faults\.py::test_(?:a_flood|very_many|a_body_over|hostile_bodies|connections)\w*
    | system/test_toolset_faults\.py::test_(?:servers|programs|a_program|wrong|calls)\w*        # waits, and processes
    | system/test_toolset_isolation\.py::test_(?:a_shared|an_mcp_server_(?:without|that)|served_tools)\w*
    | system/test_toolset_life\.py::test_a_server_does_not_start\w*\[\[\S* | system/test_toolset_pages\.py::test_served\w*
    | system/test_rollout_tools\.py::test_(?:a_tool_call_keeps|rollouts_at_once)\w*
    | system/test_deliveries\.py::test_a_trainer_that_is_down\w* | durability/test_owed_outcomes\.py::test_a_receiver\w*
    | edge/toolsets/test_mcp_(?:http|stdio)\.py::test_(?:sessions_at_the_same|programs_of_both)\w*
    | edge/trainer/grpc/test_streams\.py::test_each_lie\w* | .*::test_a_field_of_100_megabytes_is_refused
    | edge/tracing/test_(?:trees|exports|page)\.py::\w+\[of\ the\ process\S*      # a server each
    | edge/tracing/test_(?:sdk\.py::test_(?:it_exports|the_console)|histograms\.py::test_too_many)\w*
    | cli/test_processes\.py::test_(?:agents_are_served|an_evaluation_that|the_trainer_tells|nothing_but)\w*
    | tool_server/test_mcp\.py::test_(?:a_message_over|a_signal_lets|standard_input\w+\[legacy\])\w*  # a process each
    | page/test_(?:many|accessibility)\.py::(?:test_(?:one_of_many|live_updates)\w*|\w+\[200\])
    | page/test_rollout\.py::test_(?:a_long_rollout|more_tabs|messages_and_tokens|it_asks_again)\w*
    | page/test_(?:tokens|timeline)\.py::test_(?:a_long_segment|times_do_not)\w*
    | page/test_list\.py::test_(?:pages_lead|a_long_search)\w* | page/test_keys\.py::test_what_the_key\w*
    | page/test_view\.py::test_(?:what_cannot|a_journal_in_use|a_running_server)\w*
    | client/test_export_rewards\.py::test_(?:segments_say|what_was_given)\w* | client/test_resuming\.py::test_a_run\w*
    | durability/test_crashes\.py::\w+\[load\] | durability/test_own_loops\.py::test_an_agent_elsewhere\w*  # many restarts
    | edge/tokens/test_hub\.py::test_what_was_fetched\w* | deploy/test_memory\.py   # a process for each tokenizer
    | verification/test_hostile_files\.py::test_memory\w* | core/test_random_rollouts\.py | agent/test_tool_property\.py
    | gateway/osmosis_http/test_message_slices\.py::test_messages_and\w* | archive/test_journal\.py::test_a_killed\w*
    | test_bench\.py                                                      # `make check` ends with `make bench-quick`
    | workers/test_(?!processes\.py::test_a_worker_that_is_killed|service\.py::test_every_rpc)\S*
    | simulator/test_worlds\.py::\w+\[[1-7]\] | simulator/test_simulator\.py::test_a_seed_gives\w*
    )""",
    re.VERBOSE,
)
"""Load, attacks, fuzzers, and tests that take long for what they find. Only `make test-all` runs them."""

ALIKE = re.compile(
    r"""tests/(?:
      exact/test_\w+ | contract/test_generated_runs | tokencheck/test_(?:families|golden)
    | testing/test_(?:continuation|plain_renderer|\w+_families)
    | edge/tokens/test_(?:append|chat_template|dropped_history|encoding|golden|later_system|properties|token_text)
    | inspection/test_real_tokenizers | client/trainer/test_aborts | edge/trainer/grpc/test_forks | edge/stream/test_idle
    | runtime/test_(?:quotas|staleness|policies) | edge/journal/test_store_model | durability/test_trainer_streams
    | (?:client/trainer|edge/trainer/grpc)/test_\w+\.py::test_a_cut_at_any_message | clients/test_programs
    | page/test_tokens\.py::test_each_cell | verification/test_planted\.py::test_a_fault_is_found | journeys/test_owners
    | edge/toolsets/test_mcp_http\.py::test_a_broken_response | test_examples\.py::test_its_tests_pass
    )""",
    re.VERBOSE,
)
"""Tests with many parameters, such as tokenizers, templates and seeds. `make check` runs every fourth parameter of each."""

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
    """Mark heavy tests, and begin with servers of several processes.

    Their longest test takes a minute, for most of which it waits: at the end, the other processes of the run would be idle.
    """
    items.sort(key=lambda item: not item.nodeid.startswith("tests/workers/"))
    parameters: dict[str, int] = defaultdict(int)
    for item in items:
        test = item.nodeid.partition("[")[0]
        if HEAVY.match(item.nodeid) or (ALIKE.match(item.nodeid) and parameters[test] % 4):
            item.add_marker(pytest.mark.heavy)
        parameters[test] += 1


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
