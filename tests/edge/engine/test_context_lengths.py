"""What engines say about a prompt that is too long."""

from __future__ import annotations

import pytest
from rollout_server.edge.engine.errors import context_lengths
from rollout_server.edge.trainer.http_client import HttpResponse

TOLD = [
    (
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4000 in the messages, 1000 in the "
        "completion). Please reduce the length of the messages or completion.",
        4000,
        4096,
    ),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 1000. This model's maximum context length is 4096 tokens and your "
        "request has 3500 input tokens (1000 > 4096 - 3500).",
        3500,
        4096,
    ),
    ("The decoder prompt (length 5000) is longer than the maximum model length of 4096.", 5000, 4096),
    (
        "You passed 5001 input tokens and requested 100 output tokens. However, the model's context length is only 4096 tokens.",
        5001,
        4096,
    ),
    ("The input (5000 tokens) is longer than the model's context length (4096 tokens).", 5000, 4096),
    (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000 tokens: "
        "4000 tokens from the input messages and 1000 tokens for the completion.",
        4000,
        4096,
    ),
    ("This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.", 5000, 4096),
    ("prompt is too long: 5000 tokens > 4096 maximum", 5000, 4096),
    ("request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it", 5000, 4096),
    ('"n_prompt_tokens":5000,"n_ctx":4096', 5000, 4096),
    (
        "This model's maximum context length is 4096 tokens. However, you requested 64 output tokens and your prompt contains 5000 "
        "input tokens, for a total of 5064 tokens. Please reduce the length of the input prompt.",
        5000,
        4096,
    ),
    (
        "This model's maximum context length is 4096 tokens. However, you requested 64 output tokens and your prompt contains at "
        "least 4033 input tokens, for a total of at least 4097 tokens. Please reduce the length of the input prompt.",
        None,
        4096,
    ),
    (
        "This model's maximum context length is 4096 tokens. However, you requested 64 output tokens and your prompt has 90000 "
        "characters (more than 40320 characters, which is the upper bound for 4032 input tokens).",
        None,
        4096,
    ),
    ("max_completion_tokens=32000 cannot be greater than max_model_len=max_total_tokens=4096.", None, 4096),
    ("context_length_exceeded", None, None),
    ("context length 99999999999999999999", None, None),
]


@pytest.mark.parametrize(("text", "tokens", "maximum"), TOLD)
def test_the_lengths_that_an_engine_tells(text: str, tokens: int | None, maximum: int | None) -> None:
    assert context_lengths(HttpResponse(400, text.encode())) == (tokens, maximum)
