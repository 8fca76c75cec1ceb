"""Random templates and conversations through the real renderer, and through faulty ones that the judge must detect."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.renderer import Rendered
from rollout_server.runtime.errors import RolloutFailed

from tests.hostile.templates import conversations, grammar
from tests.hostile.templates.conversations import TOOLS, Conversation, Turn
from tests.hostile.templates.grammar import Traits, build
from tests.hostile.templates.oracle import Exact, Oracle, Refused, Undecidable
from tests.hostile.templates.reduce import kinds, signature
from tests.hostile.templates.run import (
    DATE,
    SILENT,
    Case,
    Opens,
    Played,
    Verdict,
    cases,
    load,
    play,
    play_numbered,
)

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Eight."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"value": "a"}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "seen", "tool_call_id": "call00001"}
LATER = {"role": "system", "content": "Later."}


@pytest.mark.parametrize("seed", range(101, 103))
def test_the_renderer_is_never_silently_wrong(seed: int) -> None:
    """100 boundaries of each seed. `python -m tests.hostile.templates` runs more, and reduces what it finds."""
    played = Played()
    for number in count():
        played.add(play_numbered(seed, number))
        if len(played.boundaries) >= 100:
            break
    assert [(each.path, each.turn, each.verdict, each.expected, each.got) for each in played.differences] == []
    for path, share in shares(played).items():
        assert share > 0.7, f"{path} declines too often: {share:.0%} exact"


def shares(played: Played) -> dict[str, float]:
    """The share of correct boundaries among those that have a truth, by path."""
    found: dict[str, Counter[Verdict]] = {}
    for boundary in played.boundaries:
        for path, verdict in boundary.verdicts:
            found.setdefault(path, Counter())[verdict] += 1
    wanted = (Verdict.RIGHT, Verdict.DECLINED, Verdict.DIFFERENT)
    return {path: seen[Verdict.RIGHT] / max(1, sum(map(seen.__getitem__, wanted))) for path, seen in found.items()}


# Verdicts of the judge, computed by hand.


def spelled(*messages: dict[str, Any]) -> list[str]:
    return [json.dumps(message) for message in messages]


@pytest.mark.parametrize(
    ("traits", "messages", "stop", "behind"),
    [
        (
            Traits(),
            (ANSWER, USER),
            "<|im_end|>",
            "\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            Traits(reminder="before_results"),
            (CALLING, RESULT),
            "<|im_end|>",
            "\n<|im_start|>system\nRemember the rules.<|im_end|>\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n",
        ),
        (Traits("next_begins"), (ANSWER, USER), "<|user|>", "\nHello<|assistant|>\n"),
        (Traits("next_begins"), (CALLING, RESULT), "<|observation|>", "\nseen<|assistant|>\n"),
        (Traits("next_begins"), (ANSWER, LATER, USER), "<|system|>", "\nLater.<|user|>\nHello<|assistant|>\n"),
        (Traits("next_begins"), (ANSWER,), "<|assistant|>", "\n"),
        (Traits("inst"), (ANSWER, USER), "</s>", "[INST] Hello [/INST] "),
        (Traits("channels"), (CALLING, RESULT), "<|call|>", "<|start|>tool<|message|>seen<|end|><|start|>assistant"),
        (Traits("no_stop"), (ANSWER, USER), "", "\n\nUser: Hello\n\nAssistant: "),
        (
            Traits(merges="answers"),
            (ANSWER, ANSWER, USER),
            "",
            "\nEight.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            Traits(counts="index", later_system="ignored"),
            (ANSWER, LATER, USER),
            "<|im_end|>",
            "\n<|im_start|>user\n[3] Hello<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=lambda value: str(value.unusual()) if isinstance(value, Traits) else None,
)
def test_the_judge_splits_where_the_answer_ends(
    traits: Traits, messages: Sequence[dict[str, Any]], stop: str, behind: str
) -> None:
    split = Oracle(build(traits), None, DATE).split(spelled(USER, *messages), 1)
    assert (split.stop, split.behind) == (stop, behind)


def test_the_judge_adds_a_stop_where_the_answer_lacks_it_and_only_there() -> None:
    oracle = Oracle(build(Traits(calls="special_closer")), None, DATE)
    split = oracle.split(spelled(USER, CALLING, RESULT), 1)
    behind = "\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n"
    for end, added in (
        ("<|im_end|>", ""),
        ("<|call_end|>", "<|im_end|>"),
        ("<|pad|>", "<|im_end|>"),
        ("x", "<|im_end|>"),
    ):
        assert oracle.truth(split, oracle.encode("Eight." + end)) == Exact(oracle.encode(added + behind)), end
    assert oracle.truth(split, []) == Exact(oracle.encode("<|im_end|>" + behind))
    assert oracle.truth(split, None) == Exact(oracle.encode(behind))


def test_without_a_generation_config_special_tokens_end_answers_unless_they_stand_inside_or_the_answer_was_cut() -> (
    None
):
    oracle = Oracle(build(Traits(calls="special_closer", config="unknown")), None, DATE)
    split = oracle.split(spelled(USER, CALLING, RESULT), 1)
    closed = Exact(oracle.encode(split.behind or ""))
    assert oracle.truth(split, oracle.encode("<|pad|>")) == closed
    assert oracle.truth(split, oracle.encode("<|pad|>"), cut=True) != closed
    assert oracle.truth(split, oracle.encode("<|call_end|>")) != closed
    assert oracle.truth(split, oracle.encode("<|im_end|>"), cut=True) == closed


def test_the_token_that_begins_the_next_message_follows_an_answer_that_ends_with_another_one() -> None:
    oracle = Oracle(build(Traits("next_begins")), None, DATE)
    split = oracle.split(spelled(USER, ANSWER, RESULT), 1)
    behind = "\nseen<|assistant|>\n"
    assert oracle.truth(split, oracle.encode("<|observation|>")) == Exact(oracle.encode(behind))
    for other in ("<|user|>", "<|endoftext|>"):
        assert oracle.truth(split, oracle.encode(other)) == Exact(oracle.encode("<|observation|>" + behind))


def test_without_ids_an_answer_is_taken_to_have_the_stop_of_its_kind() -> None:
    oracle = Oracle(build(Traits("next_begins")), None, DATE)
    assert oracle.truth(oracle.split(spelled(USER, ANSWER, USER), 1), None) == Exact(
        oracle.encode("\nHello<|assistant|>\n")
    )
    assert oracle.truth(oracle.split(spelled(USER, ANSWER), 1), None) == Exact(oracle.encode("<|assistant|>\n"))


def test_there_is_no_truth_where_the_answer_is_not_rendered_or_not_closed() -> None:
    skipping = Oracle(build(Traits(empty="skipped")), None, DATE)
    empty = {"role": "assistant", "content": ""}
    assert isinstance(skipping.truth(skipping.split(spelled(USER, empty, USER), 1), [1]), Undecidable)
    merging = Oracle(build(Traits(merges="answers")), None, DATE)
    assert isinstance(merging.truth(merging.split(spelled(USER, ANSWER, ANSWER), 1), [1]), Undecidable)


def test_every_trait_makes_a_template_that_says_something_else() -> None:
    plain = build(Traits()).text
    for name, options in grammar.OPTIONS.items():
        for word in options[1:]:
            if name in ("vocabulary", "config"):
                continue
            switched = {"switch": "any_user"} if name == "switch_effect" else {}
            assert build(Traits(**{name: word}, **switched)).text != plain, f"{name}={word}"


# Faults that the judge must detect. The renderer in which they are planted returns the judge's own truth.


class Planted:
    """A renderer that is correct except for its fault."""

    def __init__(self, oracle: Oracle, fault: str = "", naming: Oracle | None = None) -> None:
        self._oracle, self._fault = oracle, fault
        self._naming = naming or oracle
        self._before = 0

    async def append(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        predicted = self._expected(self._naming, [message.text for message in messages], last, last_messages)
        if predicted is None:
            raise RolloutFailed(Failure(Category.TOKENIZER, "no place to cut"))
        return Rendered(predicted)

    async def predict(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        texts = [message.text for message in messages]
        predicted = self._expected(self._oracle, texts, last, last_messages)
        try:
            length = len(self._oracle.prompt(texts))
        except Refused:
            length = self._before
        written = None if last is None or last.token_ids is None else len(last.token_ids)
        longer = None if written is None else length - self._before - written
        self._before = length
        if longer is not None and self._fault == "counts wrong":
            longer += 1
        return Rendered(predicted or Prediction(pack_tokens(), pack_tokens()), longer, exact=predicted is not None)

    def _expected(self, oracle: Oracle, texts: list[str], last: Answered | None, asked: int) -> Prediction | None:
        if self._fault == "declines":
            return None
        try:
            if last is None:
                return Prediction(pack_tokens(), pack_tokens(oracle.prompt(texts)))
            split = oracle.split(texts, asked)
        except Refused as error:
            if self._fault == "goes on" and last is not None:
                return Prediction(pack_tokens(), pack_tokens([1]))
            raise RolloutFailed(Failure(Category.TOKENIZER, str(error))) from error
        if self._fault == "forgets the history" and asked > 1:
            split = oracle.split(texts[asked - 1 :], 1)
        ids = None if last.token_ids is None or self._fault == "never closes" else list(last.token_ids)
        truth = oracle.truth(split, ids, cut=last.finish_reason == "length", message=last.message.fields())
        too_much = self._fault == "says too much"
        if isinstance(truth, Undecidable):
            return Prediction(pack_tokens(), pack_tokens([1])) if too_much else None
        added = oracle.encode("Yes.") if too_much else ()
        return Prediction(pack_tokens(), pack_tokens((*added, *truth.ids)))


def planted(fault: str = "") -> Opens:
    return lambda case, loaded: Planted(case.oracle(), fault, case.oracle(path="append"))


def verdicts(all_of_them: Sequence[Case], fault: str = "") -> Counter[Verdict]:
    played = play(all_of_them, planted(fault))
    return Counter(verdict for boundary in played.boundaries for _, verdict in boundary.verdicts)


def rollout(*turns: Turn, tools: bool = False) -> Conversation:
    return Conversation((USER,), turns, tools)


PLAIN = Turn(ANSWER, (USER,))
STRIPPED = Turn(ANSWER, (USER,), "stripped")


def test_a_renderer_that_tells_the_truth_is_right() -> None:
    for number in range(4):
        found = verdicts(list(cases(7, number)))
        assert found.keys() <= {Verdict.RIGHT, Verdict.REFUSED, Verdict.UNDECIDABLE}, number


@pytest.mark.parametrize(
    ("fault", "traits", "turns", "noticed"),
    [
        ("never closes", Traits(), (PLAIN, STRIPPED), Verdict.DIFFERENT),
        ("says too much", Traits(), (PLAIN,), Verdict.DIFFERENT),
        (
            "says too much",
            Traits(empty="skipped"),
            (Turn({"role": "assistant", "content": ""}, (USER,)),),
            Verdict.FOREIGN,
        ),
        ("forgets the history", Traits(counts="third"), (PLAIN, PLAIN, PLAIN), Verdict.DIFFERENT),
        ("forgets the history", Traits(reminder="once"), (PLAIN, PLAIN), Verdict.DIFFERENT),
        ("goes on", Traits(later_system="raises"), (PLAIN, Turn(ANSWER, (LATER,))), Verdict.WENT_ON),
        ("counts wrong", Traits(), (PLAIN,), Verdict.COUNT),
        ("declines", Traits(), (PLAIN,), Verdict.DECLINED),
    ],
)
def test_a_fault_is_noticed(fault: str, traits: Traits, turns: tuple[Turn, ...], noticed: Verdict) -> None:
    case = [Case(build(traits), rollout(*turns))]
    assert verdicts(case)[noticed] == 0
    assert verdicts(case, fault)[noticed] > 0


def test_a_wrong_prompt_is_noticed() -> None:
    case = Case(build(Traits(date="system")), rollout(PLAIN))
    later = case.oracle(DATE.replace(year=2027))
    found = play([case], lambda case, loaded: Planted(later)).differences
    assert [(each.turn, each.verdict) for each in found] == [(0, Verdict.DIFFERENT)] * 2


def test_random_faults_are_noticed_in_random_rollouts() -> None:
    some = list(cases(7, 2))
    for fault in ("never closes", "says too much", "counts wrong"):
        assert any(verdict in SILENT for verdict in verdicts(some, fault)), fault


def test_declining_everything_shows() -> None:
    some = list(cases(7, 2))
    assert set(shares(play(some, planted("declines"))).values()) == {0.0}
    assert set(shares(play(some, planted())).values()) == {1.0}


def test_a_difference_is_reduced_to_what_it_needs() -> None:
    traits = Traits("headers", bos="first", trim="all", looks_back="names")
    turns = (PLAIN, Turn(CALLING, (RESULT, USER)), STRIPPED, PLAIN)
    case = Case(build(traits), rollout(*turns, tools=True))
    opens = planted("never closes")
    small = list(kinds(play([case], opens).differences, 5, opens))
    assert {signature(each) for each in small} == {
        f"{path}, different, ending=stripped, after an answer, then nothing" for path in ("append", "predict")
    }


def test_the_same_seed_gives_the_same_cases() -> None:
    assert list(cases(5, 3)) == list(cases(5, 3))
    assert list(cases(5, 3)) != list(cases(5, 4))


def test_tools_and_messages_are_those_of_the_protocol() -> None:
    author = conversations.generate(random.Random(1))
    for message in (*author.prompt, *(turn.answer for turn in author.turns)):
        assert Message.parse(author.spelled(message)).fields() == message
    assert load(build(Traits())).probed.refusal == ""
    assert {tool["function"]["name"] for tool in TOOLS} == {"look", "add"}
