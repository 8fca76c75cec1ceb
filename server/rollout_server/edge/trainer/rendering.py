"""The renderer of one rollout, with the tokenizer, switches and tools that its trainer is told of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rollout_server.core.message import JSON, parse_object
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import RenderingForm
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool


async def open_renderer(
    tokenizers: Tokenizers, name: TokenizerName | None, tools: Sequence[Tool], form: RenderingForm | None = None
) -> Renderer:
    """Loads the tokenizer if need be. `form` is how the trainer is known to render. Raises `RolloutFailed`."""
    if name is None:
        raise RolloutFailed(
            Failure(Category.TOKENIZER, "the rollout names no tokenizer, so its tokens cannot be rendered here")
        )
    loaded = await tokenizers.load(name)
    switches = parse_object(name.template_kwargs_json) if name.template_kwargs_json else {}
    # In a thread: switches that were not seen before have the template probed anew.
    return await loaded.run(partial(Renderer, form=form), loaded, [as_function(tool) for tool in tools], switches)


def as_function(tool: Tool) -> dict[str, JSON]:
    """A tool as OpenAI writes function tools."""
    parameters = parse_object(tool.parameters_json_schema)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }
