"""The environment tokens that the check computes equal the golden boundaries of ../shared/tokenizers/vectors."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rollout_server.core.ledger import pack_tokens
from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.tokencheck.conversation import CheckConversation
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.reference_tokens import ReferenceBuilder
from rollout_server.tokencheck.template import RenderedConversation, Template

from tests.support.tokenizers import VECTORS, real_tokenizer, tokenizer_of

# Messages do not determine the spelling of arguments, the stop token, or text that the template omits.
UNTOLD = {"compact JSON", "unicode escapes", "number formats", "other stop token", "content+call", "edge whitespace"}


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_what_was_written_and_what_came_after(path: Path) -> None:
    header, *rows = map(json.loads, real_tokenizer(f"vectors/{path.name}").read_text(encoding="utf-8").splitlines())
    tools = json.loads(real_tokenizer("vectors/tools.json").read_text(encoding="utf-8"))
    at = real_tokenizer(header["tokenizer"])
    tokenizer = tokenizer_of(at, (at / header["template"]).read_text(encoding="utf-8"))
    frame = Frame(None, header["template_kwargs"], datetime.fromisoformat(header["rendered_on"]))
    with ThreadPoolExecutor(1) as executor:
        loaded = LoadedTokenizer(path.stem, tokenizer, executor)
    template = Template(loaded, tokenizer.added_tokens_decoder, frame)
    for row in rows:
        check(template, row, tools)


def check(template: Template, row: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    where, last = (row["case"], row["turn"]), row["first_env"] - 1
    cut = frozenset({last} if row["missing_stop"] else ())
    conversation = CheckConversation("golden", tuple(row["messages"]), tools, cut)
    builder = ReferenceBuilder(
        template, conversation, RenderedConversation(template, conversation, Arguments.PARSED), Writing.TEMPLATE
    )
    for position in (index for index in conversation.completions if index <= last):
        output, ids = builder.append_completion(position)
        added = builder.append_environment(position, ids)
    environment = pack_tokens(row["env_ids"])
    assert added is not None
    assert added.tokens == len(environment) + row["missing_stop"], where
    assert builder.reference.ids[-len(environment) :] == environment, where
    if row["case"] not in UNTOLD:
        text = output.text.removesuffix(output.stop) if row["missing_stop"] else output.text
        assert text == template.loaded.decode(pack_tokens(row["generated_ids"])), where
