"""The golden boundaries of ../shared/tokenizers/vectors: environment tokens and length differences of real templates."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers
from rollout_server.core.ledger import pack_tokens
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.renderer import Renderer

from tests.edge.tokens.conftest import answered, packed
from tests.support.tokenizers import VECTORS, real_tokenizer


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
async def test_golden_boundaries(tokenizers, path: Path) -> None:
    header, *rows = map(json.loads, real_tokenizer(f"vectors/{path.name}").read_text(encoding="utf-8").splitlines())
    tools = json.loads(real_tokenizer("vectors/tools.json").read_text(encoding="utf-8"))
    at = real_tokenizer(header["tokenizer"])
    loaded = await tokenizers({"m": at}, templates={"m": at / header["template"]}).load(TokenizerName("m"))
    for row in rows:
        date = datetime.fromisoformat(header["rendered_on"])
        await check(Renderer(loaded, tools, header["template_kwargs"], date=date), header, row)


async def check(renderer: Renderer, header: dict[str, Any], row: dict[str, Any]) -> None:
    where = (row["case"], row["turn"])
    messages, asked = packed(*row["messages"]), row["first_env"] - 1
    await renderer.predict(messages[:asked], None, 0)
    cut = "length" if row["missing_stop"] else "stop"
    last = answered(row["messages"][asked], row["generated_ids"], cut)
    rendered = await renderer.predict(messages, last, asked)
    assert rendered.exact, where
    assert rendered.predicted.environment == pack_tokens(row["env_ids"]), where
    assert len(rendered.predicted.closing) == row["missing_stop"], where
    if header["transformers"].split(".")[0] == transformers.__version__.split(".")[0]:
        assert rendered.mask_length == row["naive_new"], where
