"""Shop agent: each rollout has its own stock and cart in its state, and the reward checks the final order."""

from rollout_server import Agent, Limits, RewardResult, Run, ToolContext, ToolError, tool

PRICES = {"tea": 350, "milk": 120, "bread": 280, "honey": 590}


@tool
async def look(context: ToolContext) -> dict[str, dict[str, int]]:
    """Return the price in cents and the number in stock of everything that the shop sells."""
    return {item: {"price": PRICES[item], "stock": count} for item, count in context.state["stock"].items()}


@tool
async def put(item: str, count: int, context: ToolContext) -> dict[str, int]:
    """Put items into the cart, or back on the shelf, and return the cart.

    Args:
        item: its name, as `look` returns it.
        count: how many; a negative number puts items back.
    """
    stock, cart = context.state["stock"], context.state["cart"]
    if item not in stock:
        raise ToolError(f"there is no {item}; there are {', '.join(stock)}")
    if not -cart.get(item, 0) <= count <= stock[item]:
        raise ToolError(f"the stock has {stock[item]} {item}, the cart has {cart.get(item, 0)}")
    stock[item] -= count
    cart[item] = cart.get(item, 0) + count
    return cart


@tool
async def order(context: ToolContext) -> str:
    """Order what is in the cart. This is final."""
    if "order" in context.state:
        raise ToolError("the order has been placed")
    context.state["order"] = {item: count for item, count in context.state["cart"].items() if count}
    return f"The order costs {sum(PRICES[item] * count for item, count in context.state['order'].items())} cents."


class Shop(Agent):
    """Buys what a customer asks for."""

    name = "shop"
    tools = (look, put, order)
    limits = Limits(turns=12, seconds=120)

    async def setup(self, run: Run) -> None:
        """Fill the shelves. The dataset has the column `stock`."""
        run.state.update(stock=dict(run.metadata["stock"]), cart={})

    async def reward(self, run: Run) -> RewardResult:
        """Return 1.0 if the order is exactly the ground truth, else 0.0."""
        ordered = run.state.get("order")
        correct = ordered == run.metadata["ground_truth"]
        return RewardResult(reward=float(correct), scores={"ordered": float(ordered is not None)})
