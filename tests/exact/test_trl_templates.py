"""Chat templates of released models, with the toy tokenizer's vocabulary: environment tokens and mask counts are exact.

The expected values come from the strict trainer's judges, which render everything and share no code with the renderer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.checks.renderer import PlainRenderer, UnrenderableError
from rollout_server.testing.checks.token_mode_check import PromptSpan, TokenModeCheck, TokenPrompt
from rollout_server.testing.script import tool_call

from tests.exact.conversations import Conversation, Look, written
from tests.hostile.templates.run import Inline
from tests.support.trl_templates import trl_templates, trl_tokenizer

TURNS = 12
ASKED = [{"role": "user", "content": "What is 5 + 3?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": Look().name,
            "description": Look().description,
            "parameters": json.loads(Look().parameters_json_schema),
        },
    }
]
IMAGES: Final = frozenset({"idefics3", "llava_next", "smolvlm"})
"""Their templates accept no plain-text content, so the server refuses to load them."""


def packed(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [Message.parse(json.dumps(message, ensure_ascii=False)) for message in messages]


@pytest.mark.parametrize("path", trl_templates())
@pytest.mark.parametrize("kinds", [("mixed",), ("calls", "talk")], ids=["mixed", "apart"])
async def test_no_token_is_wrong(path: Path, kinds: Sequence[str]) -> None:
    """A conversation of both kinds of turns, or, before a release, a conversation of each kind."""
    tokenizer = trl_tokenizer(path)
    loaded = LoadedTokenizer(path.stem, tokenizer, Inline())
    if path.stem.removesuffix("_training") in IMAGES:
        assert loaded.probed.refusal
        return
    assert loaded.probed.refusal == ""
    plain, boundaries = PlainRenderer(tokenizer), 0
    for kind in kinds if writes_calls(plain) else ["talk"]:
        boundaries += await play(loaded, plain, written(kind, plain, TOOLS, TURNS))
    assert boundaries > 0


async def play(loaded: LoadedTokenizer, plain: PlainRenderer, conversation: Conversation) -> int:
    """Run a conversation in both modes, judge each boundary, and return the number of boundaries."""
    predicting, appending = Renderer(loaded, TOOLS, {}), Renderer(loaded, TOOLS, {})
    judge, messages = TokenModeCheck(plain), list(conversation.asked)
    held = plain.prompt(messages, TOOLS)
    for renderer in (predicting.predict, appending.append):
        assert (await renderer(packed(messages), None, 0)).predicted.environment == pack_tokens(held)
    for turn, exchange in enumerate(conversation.exchanges, 1):
        reply, asked, before = exchange.reply, len(messages), plain.prompt(messages, TOOLS)
        ids = plain.completion_ids(messages, TOOLS, before, reply)
        messages += [reply.message, *exchange.heard()]
        reason = "length" if reply.cut else "stop"
        last = Answered(turn, packed([reply.message])[0], reason, pack_tokens(ids))
        try:
            predicted = await predicting.predict(packed(messages), last, asked)
            appended = await appending.append(packed(messages), last, asked)
        except RolloutFailed:  # the only possible reason: the template omits an empty completion
            assert plain.text(messages, TOOLS) == plain.text([*messages[:asked], *messages[asked + 1 :]], TOOLS)
            return turn - 1
        assert predicted.mask_length == len(plain.prompt(messages, TOOLS)) - len(before) - len(ids), turn
        # Whether a stop token with a space behind it ends the completion is unknown. A cut completion with content behind its calls
        # does not end like the rendering of a template that writes its content behind their results.
        assert predicted.exact or (predicted.repeated and reply.cut) or reply.surplus == " ", turn
        assert appended.predicted == predicted.predicted, turn
        held += ids
        closing, added = list(predicted.predicted.closing), list(predicted.predicted.environment)
        start, held = len(held), [*held, *closing, *added]
        piece = PromptSpan(turn, start, len(held), len(messages), asked, len(closing), reply.cut)
        assert judge.fault(messages, TOOLS, TokenPrompt(held, (piece,))) is None, turn
    return len(conversation.exchanges)


def writes_calls(plain: PlainRenderer) -> bool:
    """Whether the template renders tool calls, or refuses them.

    If it omits them, the text after a completion with only calls is undefined.
    """
    texts = set()
    for name in ("look", "listen"):
        called = {"role": "assistant", "content": "", "tool_calls": [tool_call("c00000000", name, "{}")]}
        try:
            texts.add(plain.text([*ASKED, called], TOOLS))
        except UnrenderableError:
            return True
    return len(texts) > 1
