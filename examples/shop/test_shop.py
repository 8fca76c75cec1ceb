"""Tests of the shop agent: what is ordered counts, whatever the model says."""

import asyncio
from types import SimpleNamespace

import pytest
from agent import Shop, order, put
from rollout_server import ToolError
from rollout_server.local_stack import ScriptedModel

ROW = {"stock": {"tea": 2, "milk": 1}, "ground_truth": {"tea": 2}}


def test_the_right_order(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("put", item="milk", count=1).calls("put", item="tea", count=2)
    model.calls("put", item="milk", count=-1).calls("order").says("Done.")
    rollout = serving(Shop()).play("Two bags of tea.", model, metadata=ROW)
    assert rollout.tool_results[-1] == "The order costs 700 cents."
    assert rollout.reward == 1.0


def test_a_cart_is_no_order(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("put", item="tea", count=2).says("I ordered two bags of tea.")
    rollout = serving(Shop()).play("Two bags of tea.", model, metadata=ROW)
    assert (rollout.reward, rollout.scores) == (0.0, {"ordered": 0.0})


def test_each_rollout_has_its_own_stock(serving, scripted_model: ScriptedModel) -> None:
    stack, model = serving(Shop()), scripted_model.calls("put", item="tea", count=2).calls("order").says("Done.")
    assert [stack.play("Two bags of tea.", model, metadata=ROW).reward for _ in range(2)] == [1.0, 1.0]
    assert ROW["stock"] == {"tea": 2, "milk": 1}


@pytest.mark.parametrize(("item", "count"), [("tea", 3), ("tea", -1), ("cake", 1)])
def test_what_cannot_be_put(item: str, count: int) -> None:
    state = {"stock": {"tea": 2}, "cart": {}}
    with pytest.raises(ToolError, match=r"the stock has 2 tea, the cart has 0|there is no cake; there are tea"):
        asyncio.run(put(item, count, SimpleNamespace(state=state)))
    assert state == {"stock": {"tea": 2}, "cart": {}}


def test_only_the_first_order_counts() -> None:
    context = SimpleNamespace(state={"stock": {}, "cart": {"tea": 1, "milk": 0}})
    assert asyncio.run(order(context)) == "The order costs 350 cents."
    with pytest.raises(ToolError, match="has been placed"):
        asyncio.run(order(context))
    assert context.state["order"] == {"tea": 1}
