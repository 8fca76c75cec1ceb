"""Any JSON as a response is parsed or refused with a reason, and parsed values are consistent."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.engine.response import Sampled, read_completion, read_sampled
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.runtime.errors import RolloutFailed

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
LOOSE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
ANY = st.recursive(
    LOOSE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner), max_leaves=5
)
MESSAGES = st.fixed_dictionaries({"role": st.just("assistant"), "content": st.text(max_size=5)})
CONTENT = st.fixed_dictionaries({"content": st.lists(st.fixed_dictionaries({"logprob": st.floats(-9, 0)}), max_size=4)})
LISTED = st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 9), st.none()), max_size=4)
CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "message": MESSAGES | ANY,
        "finish_reason": st.just("stop") | ANY,
        "token_ids": IDS | ANY,
        "prompt_token_ids": IDS | ANY,
        "logprobs": CONTENT | ANY,
        "meta_info": st.fixed_dictionaries({"output_token_logprobs": LISTED}) | ANY,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(CHOICES | ANY, max_size=2) | ANY,
        "prompt_token_ids": IDS | ANY,
        "usage": ANY,
        "metadata": ANY,
    },
)


def read(body: bytes) -> tuple[list[ChatCompletion | Sampled], list[Failure]]:
    """The results of both parsers for a response to turn 3, or their errors."""
    answers: list[ChatCompletion | Sampled] = []
    failures: list[Failure] = []
    for reader in (partial(read_completion, most_calls=Limits().calls_read), read_sampled):
        try:
            answers.append(reader(body, 3))
        except RolloutFailed as failed:
            failures.append(failed.failure)
    return answers, failures


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_any_answer_is_read_or_refused_in_words(body: dict[str, Any]) -> None:
    answers, failures = read(json.dumps(body).encode())
    for failure in failures:
        assert failure.category is Category.VALIDATION
        assert failure.message.startswith("turn 3: the engine's answer is malformed: ")
    for answer in answers:
        if answer.logprobs is not None:
            assert answer.token_ids is not None
            assert len(answer.logprobs) == len(answer.token_ids)


@given(st.binary(max_size=50))
def test_what_is_no_json_is_refused(body: bytes) -> None:
    answers, failures = read(body)
    assert answers == []
    assert {failure.category for failure in failures} == {Category.VALIDATION}
