"""Whether a chat template renders a system message behind other messages where it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.core.spec import Dialect, Spec, Target, TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers, later_system
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import Fields
from rollout_server.edge.tokens.template_probe import probe
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.hostile.templates.run import Inline
from tests.support.trl_templates import trl_templates, trl_tokenizer

Template = Callable[[Sequence[Fields]], Sequence[Fields]]


def in_place(messages: Sequence[Fields]) -> Sequence[Fields]:
    return messages


def at_the_start(messages: Sequence[Fields]) -> Sequence[Fields]:
    return sorted(messages, key=lambda message: message["role"] != "system")


def first_only(messages: Sequence[Fields]) -> Sequence[Fields]:
    return [message for at, message in enumerate(messages) if not at or message["role"] != "system"]


def last_dropped(messages: Sequence[Fields]) -> Sequence[Fields]:
    return messages[:-1] if messages[-1]["role"] == "system" else messages


def refused(messages: Sequence[Fields]) -> Sequence[Fields]:
    if any(message["role"] == "system" for message in messages[1:]):
        raise RolloutFailed(Failure(Category.TOKENIZER, "System message must be at the beginning."))
    return messages


@pytest.mark.parametrize(
    ("template", "possible"),
    [(in_place, True), (at_the_start, False), (first_only, False), (last_dropped, False), (refused, False)],
)
def test_the_probe_sees_it(template: Template, possible: bool) -> None:
    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        shown = [f"<{message['role']}>{message.get('content')}<end>" for message in template(messages)]
        return "".join([*shown, "<assistant>" * generation_prompt])

    assert probe(render, {7: "<end>"}).later_system is possible


@pytest.mark.parametrize("path", trl_templates())
async def test_where_it_is_possible_it_is_between_two_completions(path: Path) -> None:
    loaded = LoadedTokenizer(path.stem, trl_tokenizer(path), Inline())
    if not loaded.probed.later_system or loaded.probed.final is None:
        pytest.skip("this template does not render it, or closes no completion")
    asked, said, late = (
        Message.write({"role": role, "content": text})
        for role, text in (("user", "Hello"), ("assistant", "Hi."), ("system", "It is late."))
    )
    completion = Answered(1, said, "stop", None)
    rendered = await Renderer(loaded, (), {}).append([asked, said, late], completion, 1)
    assert "It is late." in loaded.decode(rendered.predicted.environment)


async def test_without_a_known_template_it_is_the_users() -> None:
    spec = Spec("r", (), Target("grpc://trainer:1", Dialect.GRPC))
    tokenizers = Tokenizers(LoaderSettings(directories={"toy": TOY_TOKENIZER}, local_files_only=True))
    try:
        assert await later_system(tokenizers, spec) == "user"
        named = Spec("r", (), spec.completions, tokenizer=TokenizerName("toy"))
        assert await later_system(tokenizers, named) == "system"
    finally:
        await tokenizers.close()
