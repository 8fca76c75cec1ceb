"""The short form of a history, and when it must be compared with the full one."""

from typing import Any

from rollout_server.edge.tokens.chat_template import Literals, literals
from rollout_server.edge.tokens.short_form import ShortFormProof, shortened

from tests.edge.tokens.conftest import call

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Five and three?" * 100}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 5}')]}
HEARD = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "8"}
SAID = {"role": "assistant", "content": "Eight."}


def test_the_leading_system_messages_the_last_question_and_the_answer_are_kept() -> None:
    history = [SYSTEM, {**SYSTEM, "role": "developer"}, {**ASKED, "content": "Hello"}, SAID, ASKED, CALLED, HEARD]
    messages = [*history, CALLED, HEARD, HEARD]
    assert shortened(messages, 7, "filler") == ([*history[:2], ASKED, CALLED, HEARD, HEARD], 3)
    assert shortened([SYSTEM, ASKED, CALLED, HEARD], 2, "filler") == ([SYSTEM, ASKED, CALLED, HEARD], 2)


def test_a_history_without_a_question_gets_one() -> None:
    assert shortened([SYSTEM, SAID, ASKED], 1, "filler") == (
        [SYSTEM, {"role": "user", "content": "filler"}, SAID, ASKED],
        2,
    )


def due(proof: ShortFormProof, messages: list[Any], *turns: list[Any]) -> list[bool]:
    """Whether each turn is compared; all comparisons succeed."""
    found = []
    for turn in turns:
        answered = len(messages)
        messages += turn
        found.append(proof.due(messages, answered))
        if found[-1]:
            proof.equal()
    return found


def test_the_first_turns_and_every_sixteenth_are_compared() -> None:
    compared = due(ShortFormProof(Literals()), [ASKED], *[[CALLED, HEARD]] * 40)
    assert [turn for turn, each in enumerate(compared, 1) if each] == [1, 2, 18, 34]


def test_every_new_shape_is_compared() -> None:
    """In the turn in which the shape appears, and again when it is in the dropped part of the history."""
    usual = [CALLED, HEARD]
    shapes: list[list[Any]] = [
        [{**CALLED, "content": ""}, HEARD],
        [{**CALLED, "content": "Let me see."}, HEARD],
        [{**CALLED, "reasoning_content": "Let me see."}, HEARD],
        [{**CALLED, "tool_calls": [call("")]}, HEARD],
        [
            {**CALLED, "tool_calls": [call('{"a": 5}'), call('{"a": 6}', call_id="other")]},
            HEARD,
            {**HEARD, "tool_call_id": "other"},
        ],
        [CALLED, {**HEARD, "tool_call_id": "of an earlier call"}],
        [CALLED, HEARD, SYSTEM],
        [CALLED, {**HEARD, "content": ""}],
        [CALLED, {**HEARD, "content": " "}],
        [CALLED, {**HEARD, "content": [{"type": "text", "text": "8"}]}],
        [SAID, ASKED],
    ]
    for shape in shapes:
        proof, messages = ShortFormProof(Literals()), [ASKED]
        assert due(proof, messages, usual, usual, usual) == [True, True, False]
        assert due(proof, messages, shape) == [True]
        due(proof, messages, usual, shape)
        assert due(proof, messages, usual, shape, usual, shape) == [False] * 4


def test_a_string_of_the_template_is_a_new_shape_in_each_role() -> None:
    proof, messages = ShortFormProof(Literals(frozenset({"/brief"}))), [ASKED]
    usual, heard = [CALLED, HEARD], [CALLED, {**HEARD, "content": "a/brief/file"}]
    assert due(proof, messages, usual, usual, usual, heard, usual, usual) == [True, True, False, True, True, False]
    assert due(proof, messages, heard) == [False]  # contents of tool results change in each turn
    switch, asked = [SAID, {**ASKED, "content": "Hello /brief"}], [SAID, ASKED]
    due(proof, messages, asked, asked)
    # It appears, then it is the last user message, which the short form keeps, and then it is dropped.
    assert due(proof, messages, asked, switch, asked, asked, asked) == [False, True, True, True, False]
    assert due(proof, messages, switch, asked, asked) == [True, True, False]


def test_strings_of_dropped_questions_count_in_the_order_in_which_they_came_last() -> None:
    """A template may use the last of several switches, wherever in the conversation it is."""
    for role in ("user", "system"):
        proof, messages = ShortFormProof(Literals(frozenset({"/think", "/no_think"}))), [ASKED]
        asked, loud, quiet = (
            [SAID, {"role": role, "content": text}, ASKED] for text in ("Hello", "/think", "/no_think")
        )
        due(proof, messages, *[asked] * 3, *[quiet, asked, asked], *[loud, asked, asked])
        due(proof, messages, quiet)
        # Both words have been dropped before, but in another order.
        assert due(proof, messages, asked, asked) == [True, False]
        due(proof, messages, loud)
        assert due(proof, messages, asked, asked) == [False, False]


def test_passing_a_number_of_the_template_is_a_new_shape() -> None:
    compared = due(ShortFormProof(Literals(numbers=(9, 20))), [ASKED], *[[CALLED, HEARD]] * 12)
    # At 9, 11 and 21 messages, and at 9 and 10 results.
    assert [turn for turn, each in enumerate(compared, 1) if each] == [1, 2, 4, 5, 9, 10]


def test_calls_and_messages_of_each_role_are_counted() -> None:
    both = [{**CALLED, "tool_calls": [call("{}", call_id="a"), call("{}", call_id="b")]}, HEARD]
    proof, messages = ShortFormProof(Literals(numbers=(13,))), [ASKED]
    # The 13th message comes in turn 6; call 14, and messages of each role, the 13th and the 14th.
    compared = due(proof, messages, *[both] * 16)
    assert [turn for turn, each in enumerate(compared, 1) if each] == [1, 2, 6, 7, 13, 14]


def test_a_very_long_text_is_a_new_shape() -> None:
    for number, late in ((9000, True), (11_000, False), (4000, False)):
        proof, messages = ShortFormProof(Literals(numbers=(number,))), [ASKED]
        due(proof, messages, *[[CALLED, HEARD]] * 3)
        assert due(proof, messages, [CALLED, {**HEARD, "content": "8" * 10_000}], [CALLED, HEARD]) == [late, late]


def test_literals_are_found_in_any_case_if_the_template_changes_it() -> None:
    for any_case in (True, False):
        proof, messages = ShortFormProof(Literals(frozenset({"Error"}), any_case=any_case)), [ASKED]
        due(proof, messages, *[[CALLED, HEARD]] * 3)
        shout, plain = ([CALLED, {**HEARD, "content": text}] for text in ("ERROR", "Error"))
        assert due(proof, messages, shout, [CALLED, HEARD], [CALLED, HEARD]) == [any_case, any_case, False]
        assert due(proof, messages, plain, [CALLED, HEARD], [CALLED, HEARD]) == [True, True, False]


def test_the_dropped_round_is_repeated_and_its_texts_vary() -> None:
    proof, messages = ShortFormProof(Literals(numbers=(2, 5), divisors=(4,))), [SYSTEM, ASKED]
    due(proof, messages, [CALLED, HEARD], [CALLED, HEARD])
    own, short, long = proof.variations(messages, 4)
    (repeated,) = own
    assert repeated == [*messages[:2], *[CALLED, HEARD] * 9, CALLED, HEARD]
    assert [each[-1] for each in (short, long)] == [
        [SYSTEM, ASKED, CALLED, {**HEARD, "content": each[-1][3]["content"]}, CALLED, HEARD] for each in (short, long)
    ]
    assert short[-1][3]["content"] == "q"
    assert len(long[-1][3]["content"]) > 5
    assert len(long[0]) == len(repeated)
    assert {each["content"] for each in long[0][2:-2]} == {None, long[1][3]["content"]}


def test_a_round_that_cannot_be_repeated_is_not() -> None:
    first = ShortFormProof(Literals())
    due(first, [ASKED, SAID], [CALLED, HEARD])
    long = ShortFormProof(Literals(divisors=(127, 3)))
    due(long, messages := [ASKED], [CALLED, HEARD], [CALLED, HEARD])
    for proof, given, answered in ((first, [ASKED, SAID, CALLED, HEARD], 2), (long, messages, 3)):
        assert [len(each) for each in proof.variations(given, answered)] == [0, 1, 1]


def test_residues_of_divisors_are_new_shapes() -> None:
    """A template may treat every second or third message of a role differently."""
    proof, messages = ShortFormProof(Literals(divisors=(3,))), [ASKED]
    # The fourth turn is the first of its residue that has a tool result before the completion.
    assert due(proof, messages, *[[CALLED, HEARD]] * 7) == [True, True, True, True, False, False, False]
    # Two results in one turn shift the count of tool messages against that of completions.
    two = [CALLED, HEARD, {**HEARD, "tool_call_id": "other"}]
    due(proof, messages, two)
    assert due(proof, messages, *[[CALLED, HEARD]] * 4) == [True, True, True, False]


def test_a_message_of_another_kind_before_the_completion_is_a_new_shape() -> None:
    """A template that wants roles to alternate refuses two completions in a row, which a short history would hide."""
    proof, messages = ShortFormProof(Literals()), [ASKED]
    late = [CALLED, HEARD, SAID]
    assert due(proof, messages, *[[CALLED, HEARD]] * 3, late) == [True, True, False, True]
    due(proof, messages, [CALLED, HEARD])
    # Before the first of these stands a tool result, before the others a completion.
    assert due(proof, messages, late, late, late) == [True, True, False]


def test_calls_and_parts_are_counted_up_to_three() -> None:
    def called(number: int) -> list[Any]:
        return [{**CALLED, "tool_calls": [call("{}", call_id=f"c{index}") for index in range(number)]}, HEARD]

    def heard(number: int) -> list[Any]:
        return [CALLED, {**HEARD, "content": [{"type": "text", "text": "8"}] * number}]

    for shape in (called, heard):
        proof, messages = ShortFormProof(Literals()), [ASKED]
        assert due(proof, messages, *map(shape, (1, 1, 2, 3)))[2:] == [True, True]
        due(proof, messages, shape(1))
        # The message before the completion has another kind once more than one part was received.
        assert due(proof, messages, shape(3), shape(4), shape(4)) == [True, shape is heard, False]


def test_a_question_of_another_kind_is_compared_when_it_is_dropped() -> None:
    usual, asked = [CALLED, HEARD], [SAID, ASKED]
    messages = [ASKED, SAID, {**ASKED, "name": "ann"}]
    compared = due(ShortFormProof(Literals()), messages, usual, usual, usual, asked, asked, asked)
    assert compared == [True, True, False, True, True, False]


def test_a_late_system_message_is_compared_when_it_is_dropped() -> None:
    proof, messages, late = ShortFormProof(Literals()), [SYSTEM, ASKED], [CALLED, HEARD, SYSTEM]
    due(proof, messages, *[[CALLED, HEARD]] * 3)
    assert due(proof, messages, late, late, late) == [True, True, False]


def test_what_a_fork_has_seen_is_new_to_the_other() -> None:
    proof, messages = ShortFormProof(Literals(frozenset({"/brief"}))), [ASKED]
    due(proof, messages, *[[CALLED, HEARD]] * 3)
    heard = [CALLED, {**HEARD, "content": "/brief"}]
    assert due(proof.fork(), list(messages), heard) == [True]
    assert due(proof, messages, heard) == [True]


def test_a_fork_goes_on_with_what_was_proved() -> None:
    proof, messages = ShortFormProof(Literals()), [ASKED]
    due(proof, messages, [CALLED, HEARD], [CALLED, HEARD])
    fork, branch = proof.fork(), list(messages)
    assert due(fork, branch, [CALLED, HEARD], [SAID, ASKED]) == [False, True]
    assert due(proof, messages, [CALLED, HEARD], [SAID, ASKED]) == [False, True]
    fork.differs()
    assert (fork.usable, proof.usable) == (False, True)


def test_the_literals_of_a_template_are_those_of_its_expressions() -> None:
    from jinja2 import Environment

    text = "Never this 99.{% if 'this' in messages[0].content and messages | length > 12 - 2 + 1 %}{{ '' ~ \"that\" }}{% endif %}"
    assert literals([text, "{{ 'more' }}"], Environment()) == Literals(frozenset({"this", "that", "more"}), (2, 12))
    divided = (
        "{{ (loop.index0 + 1) % 5 }}{{ 1 is even }}{{ 3 is divisibleby 7 }}{{ loop.cycle('a', 'b', 'c') }}{{ 1 % x }}"
    )
    found = literals([divided], Environment())
    assert found is not None
    assert found.divisors == (2, 3, 5, 7)
    assert literals(["{% if %}"], Environment()) is None
    assert literals([f"{{{{ {'(' * 10_000}1{')' * 10_000} }}}}"], Environment()) is None
    for quote in ("'", ""):
        many = f"{quote} ~ {quote}".join(str(number) for number in range(1000))
        assert literals([f"{{{{ {quote}{many}{quote} }}}}"], Environment()) is None
