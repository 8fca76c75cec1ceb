"""Of a reported prompt only the new ids are decoded, and the result is the same as if all were."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.ledger import Ledger, Turn, pack_tokens
from rollout_server.edge.trainer.chat_completion import ChatCompletion, ReportedPrompts, parse_chat_completion
from rollout_server.runtime.errors import RolloutFailed

IDS = st.lists(st.integers(0, 130), max_size=6)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")])
ANSWER = pack_tokens([12, 13])


def body(prompt: str) -> bytes:
    fixed = {"choices": [{"message": {"role": "assistant", "content": "Hi."}}], "token_ids": ANSWER.tolist()}
    return f'{json.dumps(fixed)[:-1]}, "prompt_token_ids": {prompt}}}'.encode()


def read(prompt: str, known: Any = None) -> ChatCompletion:
    return parse_chat_completion(body(prompt), 2, ids_needed=True, most_calls=9, known=known)


def after(ids: list[int], prompt: str) -> tuple[ReportedPrompts, Any]:
    """A trainer's first turn was read and committed. Return the reader, and the request of the second turn."""
    prompts, line = ReportedPrompts(), Ledger().main
    prompts.add(1, read(prompt))
    line.commit(Turn(1, ANSWER, reported=pack_tokens(ids)))
    return prompts, SimpleNamespace(last=SimpleNamespace(turn=1, token_ids=ANSWER), ledger=line)


@given(IDS, IDS, SEPARATORS, SEPARATORS, st.booleans())
def test_any_prompt_after_any_other(first, second, before, now, extends) -> None:
    second = first + second if extends else second
    prompts, request = after(first, json.dumps(first, separators=before))
    text = json.dumps(second, separators=now)
    known = prompts.earlier(request)
    assert known.ids == pack_tokens(first)
    assert read(text, known) == read(text)
    assert read(text).reported == pack_tokens(second)


def test_the_last_known_id_goes_on() -> None:
    prompts, request = after([1, 2], "[1,2]")
    assert read("[1,23,4]", prompts.earlier(request)).reported == pack_tokens([1, 23, 4])


def test_only_new_ids_are_decoded() -> None:
    prompts, request = after([1, 2], "[1,2]")
    known = prompts.earlier(request)
    wrong = SimpleNamespace(ids=pack_tokens([8, 9]), size=known.size, digest=known.digest)
    assert read("[1,2,12,13,5]", wrong).reported == pack_tokens([8, 9, 12, 13, 5])


@pytest.mark.parametrize("new", ['"5"', "-1", "5.5", "4294967296", "null"])
def test_a_wrong_new_id_is_named_by_its_index(new) -> None:
    prompts, request = after([1, 2], "[1,2]")
    with pytest.raises(RolloutFailed) as failed:
        read(f"[1,2,{new}]", prompts.earlier(request))
    assert "$.prompt_token_ids[2]" in failed.value.failure.message


def test_another_turn_has_no_known_prompt() -> None:
    prompts, request = after([1, 2], "[1,2]")
    request.last.turn = 3
    assert prompts.earlier(request) is None
    request.last = None
    assert prompts.earlier(request) is None


def test_a_ledger_that_went_on_without_the_reader_has_no_known_prompt() -> None:
    prompts, request = after([1, 2], "[1,2]")
    request.ledger.commit(Turn(2, ANSWER, reported=pack_tokens([1, 2, 12, 13, 7])))
    assert prompts.earlier(request) is None
