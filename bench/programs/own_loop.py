"""The agent behind the rows "endpoint": it runs elsewhere, which is in the driver."""

from rollout_server.agent.external import ExternalAgent
from rollout_server.calculator import Calculator


class OwnLoop(ExternalAgent):
    """Offers the calculator's tools, so that the bench trainer, which knows one set of tools, renders the right prompts."""

    name = "own-loop"
    tools = Calculator.tools
