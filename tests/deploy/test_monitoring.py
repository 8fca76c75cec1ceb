"""The dashboard and the alert rules use metrics, labels and label values that a real server exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rollout_client import AsyncClient
from rollout_server import Agent
from rollout_server.calculator import Calculator

from tests.deploy.files import DEPLOY
from tests.support.bodies import QUESTION, body
from tests.support.tool_service import CounterService, serving
from tests.system.conftest import open_world

MONITORING = DEPLOY / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
# Prometheus adds these to every sample, and `up` itself.
ADDED = {"job", "instance"}
SCRAPE = "up"
Samples = dict[str, list[dict[str, str]]]


class WithoutTools(Agent):
    """Has only the tools of its requests."""

    name = "without_tools"


def panels() -> list[Any]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in RULES)
    for panel in panels():
        # Grafana replaces its variables before it asks Prometheus.
        yield from (each["expr"].replace("$__rate_interval", "1m") for each in panel["targets"])


def selectors(node: Any) -> Iterator[Any]:
    """Yield the vector selectors below a node."""
    if isinstance(node, promql.MatrixSelector):
        yield from selectors(node.vector_selector)
    elif isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from selectors(argument)
    elif isinstance(node, promql.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    elif isinstance(node, promql.AggregateExpr | promql.ParenExpr):
        yield from selectors(node.expr)
    else:
        assert isinstance(node, promql.NumberLiteral | promql.StringLiteral), type(node)


@pytest.fixture
async def samples() -> Samples:
    """Label sets by name of sample, after a rollout with tool calls over HTTP and one with a tool server."""
    async with AsyncExitStack() as stack:
        world = await open_world(stack, agents=[Calculator(), WithoutTools()])
        assert (await world.http.post("/rollout", json=body("one", world.trainer.url))).status_code == 200
        tools = await stack.enter_async_context(serving(CounterService()))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{world.server.grpc_port}"))
        completions = f"grpc://{world.trainer.grpc_target}"
        question = [{"role": "user", "content": QUESTION}]
        started = await client.start(messages=question, completions=completions, tools=tools, agent="without_tools")
        await client.wait(started.uid)
        text = (await world.http.get("/metrics")).text
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


async def test_every_expression_selects_what_exists(samples: Samples) -> None:
    checked = 0
    for expression in expressions():
        for selector in selectors(promql.parse(expression)):
            checked += 1
            if selector.name == SCRAPE:
                continue
            # A counter without labels exists from the start; one with labels has a sample once it was counted.
            assert selector.name in samples, f"{selector.name} in {expression}"
            labels = {name for each in samples[selector.name] for name in each} | ADDED
            for matcher in selector.matchers.matchers:
                assert matcher.name in labels, f"{matcher.name} in {expression}"
                if matcher.op is promql.MatchOp.Equal and matcher.value != "true":
                    values = {each.get(matcher.name) for each in samples[selector.name]}
                    assert matcher.value in values, f"{matcher.name}={matcher.value} in {expression}"
            for name in re.findall(r"by \(([\w, ]+)\)", expression):
                assert {each.strip() for each in name.split(",")} <= labels | {"le"}, expression
    assert checked > 40


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len({*names})
    for rule in RULES:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_panels_of_the_dashboard_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
