"""The end of a completion, in templates that are plain functions, each with one property of a real template."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any

import pytest
from rollout_server.core.ledger import Ledger, Prediction, pack_tokens
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.tokens.chat_template import Literals
from rollout_server.edge.tokens.drift_excerpt import drift_excerpt
from rollout_server.edge.tokens.rendering_form import Arguments, RenderingForm, parsed
from rollout_server.edge.tokens.template_probe import StopToken, probe
from rollout_server.edge.tokens.turn_boundary import (
    RenderedTurn,
    environment_text,
    likely_environment,
    repeats_completion,
    text_after_completion,
    unseen_messages,
)
from rollout_server.runtime.errors import RolloutFailed

from tests.edge.tokens.conftest import call, packed

Fields = Mapping[str, Any]
STOP = "<stop>"
ASKED = {"role": "user", "content": "Five and three?"}
SAID = {"role": "assistant", "content": "Eight."}
MORE = {"role": "user", "content": "And twice that?"}
HEARD = {"role": "tool", "content": "8"}


def template(
    each: Callable[[Fields], str] = lambda message: f"{message['role']}:{message['content']}{STOP}\n",
    prompt: str = "assistant:",
    head: Callable[[Sequence[Fields]], str] = lambda _: "",
) -> Callable[[Sequence[Fields], bool], str]:
    """A template that renders a head computed from all messages, each message, and the generation prompt."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        return head(messages) + "".join(map(each, messages)) + (prompt if generation_prompt else "")

    return render


def environment(render: Callable[..., str], *messages: Fields, first: int = 2) -> str | None:
    return environment_text(rendered(render, messages, first - 1), STOP)


def rendered(render: Callable[..., str], messages: Sequence[Fields], answered: int) -> RenderedTurn:
    return RenderedTurn(render, messages, answered, render(messages, True), render(messages[:answered], True))


def behind_text(render: Callable[..., str], messages: Sequence[Fields], answered: int) -> str | None:
    return text_after_completion(RenderedTurn(render, messages, answered, render(messages, True), ""))


@pytest.mark.parametrize(
    ("following", "expected"),
    [
        ([MORE], f"\nuser:And twice that?{STOP}\nassistant:"),
        ([{**HEARD, "content": " 8 \n"}, MORE], f"\ntool:8{STOP}\nuser:And twice that?{STOP}\nassistant:"),
        ([{**MORE, "content": [{"type": "text", "text": f"{STOP} or"}]}], f"\nuser:{STOP} or{STOP}\nassistant:"),
        ([], None),
    ],
)
def test_the_likely_environment_takes_one_rendering(following: Sequence[Fields], expected: str | None) -> None:
    def shown(message: Fields) -> str:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return f"{message['role']}:{text.strip()}{STOP}\n"

    renderings = list[Sequence[Fields]]()

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        renderings.append(messages)
        return template(shown)(messages, generation_prompt)

    assert likely_environment(render, [ASKED, SAID, *following], 1, STOP) == expected
    assert len(renderings) == min(len(following), 1)


def test_no_environment_is_likely_if_its_first_message_is_hidden_or_quoted_or_nothing_is_closed() -> None:
    def refuses(messages: Sequence[Fields], generation_prompt: bool) -> str:
        raise RolloutFailed(Failure(Category.TOKENIZER, "no"))

    for render in (
        refuses,
        template(lambda message: f"{message['role']}{STOP}\n"),
        template(head=lambda messages: messages[-1]["content"]),
        template(lambda message: f"{message['content']}\n"),
    ):
        assert likely_environment(render, [ASKED, SAID, MORE], 1, STOP) is None


def test_nothing_new_behind_a_generation_prompt_that_holds_the_stop() -> None:
    assert environment(template(prompt=f"{STOP}assistant:"), ASKED, SAID) == f"\n{STOP}assistant:"


def test_nothing_new_behind_an_answer_that_is_closed_in_another_way_at_the_very_end() -> None:
    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        text = template(prompt="assistant:")(messages, generation_prompt)
        return text if generation_prompt else text.removesuffix(f"{STOP}\n") + "<end>"

    said = [ASKED, SAID, {**MORE, "content": f"No {STOP}"}, SAID]
    assert environment(render, *said, first=4) == "\nassistant:"
    assert environment(render, ASKED, SAID) == "\nassistant:"


def test_nothing_new_behind_calls() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    assert environment(template(prompt=f"{STOP}assistant:"), ASKED, called) == f"\n{STOP}assistant:"

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        text = template()(messages, generation_prompt)
        ended = not generation_prompt and messages[-1]["role"] == "assistant"
        return text.removesuffix(f"{STOP}\n") + "<end>" if ended else text

    assert environment(render, ASKED, called) is None  # the last stop belongs to the user message
    assert environment(render, ASKED, SAID, MORE, called, first=4) is None


def test_a_template_that_looks_for_the_generation_prompt_from_the_start() -> None:
    def looks(head: Callable[[Sequence[Fields]], str]) -> Callable[[Sequence[Fields], bool], str]:
        return lambda messages, prompt: ("asked " if prompt else "shown ") + template(head=head)(messages, prompt)

    expected = f"\nuser:Five and three?{STOP}\nassistant:"
    assert environment(looks(lambda messages: str(messages.count(messages[-1]))), ASKED, SAID, ASKED) == expected
    assert environment(looks(lambda messages: str(messages[0]["content"])), ASKED, SAID, ASKED) == expected


def test_an_answer_of_nothing_at_the_start_of_the_text() -> None:
    render = template(lambda message: f"{message['content']}{STOP}\n")
    nothing = {"role": "assistant", "content": ""}
    assert environment(render, nothing, MORE, first=1) == f"\nAnd twice that?{STOP}\nassistant:"


def test_no_place_without_a_stop_and_none_without_what_was_said_next() -> None:
    assert environment(template(lambda message: f"{message['content']}\n"), ASKED, SAID, MORE) is None
    silent = template(lambda message: f"{message['role']}{STOP}\n")
    assert environment(silent, ASKED, SAID, MORE) is None
    assert environment(silent, ASKED, SAID, MORE, MORE) is None


def test_a_template_that_looks_at_both_ends_of_the_content() -> None:
    def head(messages: Sequence[Fields]) -> str:
        content = messages[-1]["content"]
        return f"tool{STOP}" if content.startswith("<r>") and content.endswith("</r>") else f"people{STOP}"

    heard = {"role": "user", "content": "<r>8 or nine</r>"}
    assert environment(template(head=head), ASKED, SAID, heard) == f"\nuser:<r>8 or nine</r>{STOP}\nassistant:"


@pytest.mark.parametrize(
    ("messages", "first"),
    [
        ([ASKED, SAID, ASKED], 2),
        ([ASKED, SAID, ASKED, SAID, ASKED], 4),
        ([ASKED, SAID, ASKED, ASKED], 2),
        ([MORE, SAID, ASKED, SAID, MORE, ASKED], 4),
        ([ASKED, SAID, MORE, ASKED, MORE, SAID], 2),
    ],
)
def test_a_template_that_looks_for_the_same_message_elsewhere(messages: list[Fields], first: int) -> None:
    """It writes the tools before each message that equals the last user message, as Mistral's does."""

    def render(said: Sequence[Fields], generation_prompt: bool) -> str:
        last = next(message for message in reversed(said) if message["role"] == "user")
        each = (f"{'<tools>' if m == last else ''}{m['role']}:{m['content']}{STOP}\n" for m in said)
        return "".join(each) + ("assistant:" if generation_prompt else "")

    full = render(messages, True)
    assert environment(render, *messages, first=first) == full.split(STOP, first)[first]


def test_an_answer_without_a_stop_ends_with_its_text() -> None:
    render = template(lambda message: f"{message['role']}:{message['content']}\n")
    messages = [ASKED, SAID, MORE, SAID, MORE]
    full = render(messages, True)
    assert behind_text(render, messages, 3) == f"\nuser:{MORE['content']}\nassistant:"
    assert behind_text(render, messages, 1) == full.partition("Eight.")[2]
    assert behind_text(render, [SAID], 0) == "\nassistant:"


def test_an_answer_that_begins_the_text() -> None:
    render = template(lambda message: str(message["content"]) + "\n")
    assert behind_text(render, [SAID, MORE], 0) == "\nAnd twice that?\nassistant:"
    nothing = {"role": "assistant", "content": ""}
    assert behind_text(render, [nothing, MORE], 0) == "\nAnd twice that?\nassistant:"


@pytest.mark.parametrize(
    "render",
    [
        template(head=lambda messages: f"{len(messages[1]['content'])}:"),
        template(head=lambda messages: "long" if len(messages[1]["content"]) > 10 else "short"),
        template(head=lambda messages: "a lot" if len(messages[1]["content"]) > 10 else "a bit"),
        template(lambda message: f"{message['content']}|{message['content']}\n"),
        template(lambda message: f"{message['content'][:3]}\n"),
    ],
    ids=["counted in front", "judged in front", "judged as shortly", "said twice", "cut short"],
)
def test_an_answer_whose_text_is_elsewhere_too(render: Callable[..., str]) -> None:
    messages = [ASKED, SAID, MORE]
    assert behind_text(render, messages, 1) is None


@pytest.mark.parametrize("length", range(15, 30))
def test_a_text_of_any_length_that_leaves_the_answer_out(length: int) -> None:
    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        return "x" * length

    assert behind_text(render, [ASKED, SAID, MORE], 1) is None
    assert environment(render, ASKED, SAID, MORE) is None
    assert environment(render, ASKED, SAID) is None


def test_answers_that_end_with_something_else_than_text() -> None:
    render = template()
    for said in ({**SAID, "tool_calls": [call("{}")]}, {**SAID, "content": None}, {**SAID, "content": [SAID]}):
        messages = [ASKED, said, MORE]
        assert behind_text(render, messages, 1) is None


def test_a_template_that_refuses_the_mark() -> None:
    def each(message: Fields) -> str:
        if len(message["content"]) > 16:
            raise RolloutFailed(Failure(Category.TOKENIZER, "too long"))
        return f"{message['content']}{STOP}\n"

    render = template(each)
    assert behind_text(render, [ASKED, SAID], 1) is None
    assert environment(render, ASKED, SAID, MORE) is None


def test_the_longest_of_the_tokens_that_begin_behind_an_answer_is_its_stop() -> None:
    special = {7: "<stop", 8: STOP, 9: "<st"}
    probed = probe(template(lambda message: f"{message['content']}{STOP}\n"), special)
    assert probed.final == probed.calls == StopToken(STOP, 8)


@pytest.mark.parametrize(
    ("closing", "alone", "opening", "eos", "expected"),
    [
        ("</call></calls><stop>", "</call></calls><stop>", "", None, "<stop>"),
        ("</call>, {}</calls>\n<stop>\n", "</call></calls>\n<stop>\n", "", None, "<stop>"),
        ("<stop><end>", "<return>", "", None, "<stop>"),  # another token closes the last message of all (gpt-oss)
        ("<stop>\n", "<stop>\n<end>", "", None, "<stop>"),  # and the whole text (phi-3)
        ("<stop><begin>", "<stop><begin>", "", 8, "<stop>"),
        (
            "</call><stop>",
            "</call><stop>",
            "<begin>assistant:",
            None,
            "<stop>",
        ),  # opens another completion without being asked to
        ("<stop>", "<stop><begin>rules:Be brief.<end>", "", None, "<stop>"),  # and a reminder behind it (Command R+)
        ("<stop>", "<stop>", "<stop><begin>assistant:", None, "<stop>"),
        ("<stop>", "<stop>", "<begin>assistant:", None, "<stop>"),
        ("", "", "<begin>assistant:", None, "<begin>"),  # only the next message closes it
        ("", "", "", None, "<begin>"),
    ],
)
def test_the_token_that_closes_an_answer_is_the_last_of_those_behind_it(
    closing: str, alone: str, opening: str, eos: int | None, expected: str
) -> None:
    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        last = len(messages) - 1
        each = (
            f"{m['content'] or m['tool_calls']}{(alone if place == last else closing) if place in said else '<end>'}"
            for place, m in enumerate(messages)
        )
        return "<begin>".join(each) + (opening or "<begin>assistant:" * generation_prompt)

    special = dict(enumerate(("</call>", "</calls>", "<begin>", "<end>", "<return>"), 1)) | {8: STOP}
    probed = probe(render, special, eos)
    assert probed.calls is not None
    assert (probed.calls.text, probed.final) == (expected, probed.calls)


def test_answers_that_end_with_the_token_of_the_next_message() -> None:
    """Like GLM's; the end token of a call then belongs to the completion."""

    def each(message: Fields) -> str:
        calls = "".join(f"{each['function']}</call>" for each in message.get("tool_calls") or ())
        return f"<{message['role']}>{message['content']}{calls}"

    special = dict(enumerate(("<user>", "<assistant>", "<tool>", "</call>"), 1))
    probed = probe(template(each, prompt="<assistant>"), special)
    assert (probed.final, probed.calls) == (
        StopToken("<user>", 1, opens_next=True),
        StopToken("<tool>", 3, opens_next=True),
    )
    assert probed.inside == {4}


def test_an_end_that_is_the_same_before_all_roles_is_not_that_of_the_next_message() -> None:
    """The template leaves the last message open."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        texts = [f"<{m['role']}>{m['content'] or m.get('tool_calls')}" for m in messages]
        return "<end>".join([*texts, *(["<assistant>"] if generation_prompt else [])])

    special = dict(enumerate(("<user>", "<assistant>", "<tool>", "<system>", "<end>"), 1))
    probed = probe(render, special)
    assert (probed.final, probed.calls) == (StopToken("<end>", 5), StopToken("<end>", 5))


@pytest.mark.parametrize(
    ("refused", "accepted"), [((), set(Arguments)), (str, {Arguments.PARSED}), (dict, {Arguments.RECEIVED})]
)
def test_calls_that_are_not_shown_may_be_closed_by_a_token_of_their_own(refused: Any, accepted: set[Arguments]) -> None:
    def each(message: Fields) -> str:
        calls = message.get("tool_calls") or ()
        if any(isinstance(called["function"]["arguments"], refused) for called in calls):
            raise RolloutFailed(Failure(Category.TOKENIZER, "not these arguments"))
        return f"{message['role']}:{message['content']}{'</call>' if calls else STOP}\n"

    probed = probe(template(each), {7: "</call>", 8: STOP})
    assert (probed.final, probed.calls) == (StopToken(STOP, 8), StopToken("</call>", 7))
    assert probed.arguments == accepted


def test_a_generation_prompt_that_ends_as_answers_do() -> None:
    closed = template(lambda m: f"{m['content'] or m['tool_calls']}</call>{STOP}", prompt=f"assistant:{STOP}")
    assert probe(closed, {7: "</call>", 8: STOP}).final == StopToken(STOP, 8)


def left_open(messages: Sequence[Fields], generation_prompt: bool) -> str:
    """A template that closes only final completions: calls and their results share one message."""
    each = (f"{m['tool_calls']}|" if m.get("tool_calls") else f"{m['content']}{STOP}" for m in messages)
    return "".join(each) + "<begin>assistant:" * generation_prompt


def test_no_stop_is_borrowed_from_behind_the_next_message() -> None:
    probed = probe(left_open, {8: STOP, 9: "<begin>"})
    assert (probed.final, probed.calls) == (StopToken(STOP, 8), None)
    unclosed = template(lambda message: f"{message['role']}:{message['content']}\n", prompt="<begin>")
    assert probe(unclosed, {9: "<begin>"}).final is None


def test_the_stop_of_an_earlier_message_is_not_that_of_the_answer() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    assert environment(left_open, ASKED, called, MORE) is None
    assert environment(left_open, ASKED, SAID, MORE) == f"{MORE['content']}{STOP}<begin>assistant:"
    nothing = template(prompt="assistant:<st>")
    assert (
        environment(nothing, ASKED, {**SAID, "content": ""}, MORE) == f"\nuser:{MORE['content']}{STOP}\nassistant:<st>"
    )


@pytest.mark.parametrize("end", ["", "\n", "[end]\n", "\n\n"])
@pytest.mark.parametrize("asked", ["user", "\nUser: "])
def test_a_token_behind_the_name_of_the_next_role_closes_no_completion(end: str, asked: str) -> None:
    """The end of a message is plain text, or a token that is not special, and headers begin with the name of a role."""
    names = {"user": asked, "assistant": "bot", "tool": "result", "system": "system"}
    texts = template(lambda m: f"{names[m['role']]}<sep>{m['content'] or m['tool_calls']}{end}", prompt="bot<sep>")
    probed = probe(texts, {8: "<sep>"})
    assert (probed.final, probed.calls) == (None, None)
    closed = template(
        lambda m: f"{names[m['role']]}<sep>{m['content'] or m['tool_calls']}{STOP}{end}", prompt="bot<sep>"
    )
    assert probe(closed, {7: STOP, 8: "<sep>"}).stops == (StopToken(STOP, 7), StopToken(STOP, 7))


def test_a_call_with_an_id_only_if_a_message_follows_has_the_stop_token_of_its_kind() -> None:
    """Apriel's template: the last message has neither the id nor the stop token."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        texts = []
        for at, message in enumerate(messages):
            last = at == len(messages) - 1 and message["role"] == "assistant"
            calls = [each["function"]["arguments"] for each in message.get("tool_calls") or ()]
            made = "".join(f"{arguments}{'' if last else ', id'}]</calls>" for arguments in calls)
            texts.append(f"<{message['role']}>{message['content']}{made}" + ("" if last else f"{STOP}\n"))
        return "".join(texts) + ("<assistant>" if generation_prompt else "")

    assert probe(render, {8: STOP}).stops == (StopToken(STOP, 8), StopToken(STOP, 8))


def test_a_probe_renders_each_conversation_once() -> None:
    seen = []

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        seen.append(json.dumps([messages, generation_prompt]))
        if messages[-1]["role"] == "tool":
            raise RolloutFailed(Failure(Category.TOKENIZER, "no results"))
        return template()(messages, generation_prompt)

    assert probe(render, {8: STOP}).final == StopToken(STOP, 8)
    assert any('"tool"' in conversation for conversation in seen)
    assert len(seen) == len(set(seen))


def test_a_template_for_conversations_with_tools_only() -> None:
    def none(messages: Sequence[Fields], generation_prompt: bool) -> str:
        raise RolloutFailed(Failure(Category.TOKENIZER, "no tools"))

    assert "no tools" in probe(none, {8: STOP}).refusal
    probed = probe(none, {8: STOP}, None, template(lambda m: f"{m['content'] or m['tool_calls']}{STOP}"))
    assert (probed.refusal, probed.final, probed.calls, probed.short_form) == (
        "",
        StopToken(STOP, 8),
        StopToken(STOP, 8),
        True,
    )


def test_what_was_said_may_begin_the_text_and_its_stop_follow_at_once() -> None:
    render = template(lambda message: f"{message['content']}{STOP}\n" if message["role"] == "assistant" else "")
    probed = probe(render, {8: STOP, 9: "", 10: "elsewhere"})
    assert probed.final == probed.calls == StopToken(STOP, 8)
    assert environment(render, ASKED, SAID, SAID) == f"\nEight.{STOP}\nassistant:"


def test_a_stop_of_one_character_with_which_the_next_message_begins() -> None:
    messages = [ASKED, SAID, {"role": "user", "content": "|or more?"}]
    render = template(lambda message: f"{message['content']}|\n")
    assert environment_text(rendered(render, messages, 1), "|") == "\n|or more?|\nassistant:"


def test_content_keeps_its_parts() -> None:
    parts = [{"type": "text", "text": "And twice"}, {"type": "text", "text": "that?"}]

    def each(message: Fields) -> str:
        content = message["content"]
        said = [content] if isinstance(content, str) else [part["text"] for part in content]
        return " ".join(said) + f"{STOP}\n"

    render = template(each, head=lambda messages: str([len(message["content"]) for message in messages[2:]]))
    expected = f"\nAnd twice that?{STOP}\nassistant:"
    assert environment(render, ASKED, SAID, {"role": "user", "content": parts}) == expected


def test_a_template_that_says_how_many_messages_there_are_and_how_they_begin() -> None:
    render = template(head=lambda messages: f"{len(messages)} {messages[0]['content']} ")
    expected = f"\nuser:Five and three?{STOP}\nuser:And twice that?{STOP}\nassistant:"
    assert environment(render, ASKED, SAID, ASKED, MORE) == expected


def test_the_first_part_of_content_decides() -> None:
    parts = [{"type": "text", "text": "<r>And twice"}, {"type": "text", "text": "that?"}]

    def said(message: Fields) -> str:
        content = message["content"]
        return content if isinstance(content, str) else " ".join(part["text"] for part in content)

    render = template(
        lambda message: f"{said(message)}{STOP}\n",
        head=lambda messages: "tool" if said(messages[-1]).startswith("<r>") else "user",
    )
    expected = f"\n<r>And twice that?{STOP}\nassistant:"
    assert environment(render, ASKED, SAID, {"role": "user", "content": parts}) == expected


def once(messages: Sequence[Fields], generation_prompt: bool) -> str:
    """Write something before the first tool result only, as DeepSeek's templates do."""
    first = next((place for place, message in enumerate(messages) if message["role"] == "tool"), -1)
    each = (
        f"{'<first>' if place == first else ''}{m['content'] or m['tool_calls']}{STOP}"
        for place, m in enumerate(messages)
    )
    return "".join(each) + ("assistant:" if generation_prompt else "")


def questioning(messages: Sequence[Fields], generation_prompt: bool) -> str:
    """Refuse a conversation that begins with a question mark."""
    if messages[0]["content"] == "?":
        raise RolloutFailed(Failure(Category.TOKENIZER, "no question"))
    return template(lambda m: f"{m['content'] or m['tool_calls']}{STOP}")(messages, generation_prompt)


def prompting(messages: Sequence[Fields], generation_prompt: bool) -> str:
    """Use another generation prompt after two turns with tools."""
    text = "".join(f"{m['content'] or m['tool_calls']}{STOP}" for m in messages)
    again = sum(message["role"] == "tool" for message in messages) > 1
    return text + ("again:" if again else "assistant:") * generation_prompt


def repeating(messages: Sequence[Fields], generation_prompt: bool) -> str:
    """Repeat the text beside the calls after the results, as Gemma's template does."""
    said, text = "", ""
    for m in messages:
        text += f"{m['tool_calls'] if m.get('tool_calls') else m['content']}{STOP}{said if m['role'] == 'tool' else ''}"
        said = m["content"]
    return text + "assistant:" * generation_prompt


@pytest.mark.parametrize(
    ("render", "holds"), [(once, False), (prompting, False), (questioning, True), (repeating, True)]
)
def test_a_short_form_holds_where_what_it_keeps_decides_the_environment(
    render: Callable[..., str], holds: bool
) -> None:
    probed = probe(render, {8: STOP})
    assert (probed.final, probed.refusal, probed.short_form) == (StopToken(STOP, 8), "", holds)


@pytest.mark.parametrize(("numbers", "holds"), [((5,), False), ((2,), True)])
def test_templates_are_tried_with_as_many_messages_as_their_numbers(numbers: tuple[int, ...], holds: bool) -> None:
    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        text = "".join(f"{m['content'] or m['tool_calls']}{STOP}" for m in messages)
        again = sum(message["role"] == "tool" for message in messages) > 5
        return text + ("again:" if again else "assistant:") * generation_prompt

    assert probe(render, {8: STOP}, literals=Literals(numbers=numbers)).short_form is holds


def test_a_template_that_shows_no_answers_closes_none() -> None:
    assert probe(template(lambda message: f"{message['role']}|", prompt="|"), {8: "|"}).final is None


def test_where_nothing_was_seen_there_is_no_short_form() -> None:
    assert not probe(template(lambda message: f"{message['content']}{STOP}\n"), {}).short_form


def test_what_stands_before_an_answer_does_not_matter_to_the_short_form() -> None:
    """The history may change after a tool result, but the text after a completion is the same in the short form."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        before = ["", *(message["role"] for message in messages[:-1])]
        pairs = zip(before, messages, strict=True)
        each = (f"{'so ' if b == 'tool' else ''}{m['content'] or m['tool_calls']}{STOP}" for b, m in pairs)
        return "".join(each) + ("assistant:" if generation_prompt else "")

    assert probe(render, {8: STOP}).short_form


def test_a_refusal_shows_the_end_of_what_was_rendered() -> None:
    render = template(lambda message: f"{message['content']}\n", head=lambda _: "x" * 500)
    last_only = probe(lambda messages, prompt: render(messages[-1:], prompt), {})
    assert "drops earlier messages" in last_only.refusal
    assert last_only.refusal.endswith(repr("x" * 144 + "Hello\nassistant:"))


def test_a_template_that_only_works_without_a_generation_prompt_is_refused() -> None:
    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        if len(messages) == 1 and generation_prompt:
            raise RolloutFailed(Failure(Category.TOKENIZER, "no prompt"))
        return template()(messages, generation_prompt)

    assert "no prompt" in probe(render, {}).refusal


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a":8.0,"b":1e400}', {"a": 8.0, "b": float("inf")}),
        ('{"a": -Infinity, "a": Infinity}', {"a": float("inf")}),
        ('{"b": "\\u00e9"}', {"b": "é"}),
        ("[1]", "[1]"),
        ("{not json", "{not json"),
        ('{"a":' * 100_000, '{"a":' * 100_000),
        ("", ""),
    ],
)
def test_arguments_are_parsed_as_the_fronts_of_trainers_do(written: str, read: Any) -> None:
    (message,) = packed({"role": "assistant", "content": "", "tool_calls": [call(written)]})
    fields: Any = parsed(message, 0, Arguments.PARSED)
    assert fields["tool_calls"][0]["function"]["arguments"] == read
    fields = parsed(message, 0, Arguments.RECEIVED)
    assert fields["tool_calls"][0]["function"]["arguments"] == written


def test_not_a_number_is_an_argument_too() -> None:
    (message,) = packed({"role": "assistant", "content": "", "tool_calls": [call('{"a": NaN}')]})
    fields: Any = parsed(message, 0, Arguments.PARSED)
    assert isnan(fields["tool_calls"][0]["function"]["arguments"]["a"])


def test_forms_are_values() -> None:
    assert RenderingForm() == RenderingForm()
    assert len({RenderingForm(), RenderingForm(), *RenderingForm().others()}) == 12


async def test_as_much_is_told_around_a_parting_as_is_said(ours: Any) -> None:
    loaded = ours("toy")
    ids = loaded.encode("".join(chr(97 + number % 26) + "\n" for number in range(60)))
    reported = ids[:20] + pack_tokens([0]) + ids[21:]
    expected = await drift_excerpt(loaded, Ledger().main, Prediction(pack_tokens(), ids), reported)
    assert expected == (loaded.decode(ids[12:36]), loaded.decode(reported[12:36]))


def test_a_stop_in_the_parts_of_an_answer() -> None:
    def each(message: Fields) -> str:
        content = message["content"]
        return (content if isinstance(content, str) else "".join(part["text"] for part in content)) + f"{STOP}\n"

    said = {"role": "assistant", "content": [{"type": "text", "text": "Eight"}, {"type": "text", "text": f"{STOP}?"}]}
    assert environment(template(each), ASKED, said) == "\nassistant:"
    assert environment(template(each), ASKED, said, MORE) == f"\nAnd twice that?{STOP}\nassistant:"


@pytest.mark.parametrize(("more", "text"), [([], ""), ([MORE], f"user:And twice that?{STOP}\n")])
def test_the_stop_of_an_empty_answer_may_begin_as_the_prompt_goes_on(more: list[Fields], text: str) -> None:
    render = template(prompt="assistant:<think>")
    assert environment(render, ASKED, {**SAID, "content": ""}, *more) == f"\n{text}assistant:<think>"


def test_no_place_where_tool_results_are_not_shown() -> None:
    deaf = template(lambda m: f"{m['role']}:{'' if m['role'] == 'tool' else m['content']}{STOP}\n")
    assert environment(deaf, ASKED, SAID, HEARD) is None


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_are_not_shown_add_nothing(role: str) -> None:
    render = template(lambda m: "" if m["role"] == role else f"{m['role']}:{m['content']}{STOP}\n")
    assert environment(render, ASKED, SAID, {"role": role, "content": "Be kind."}) == "\nassistant:"


def test_no_place_where_an_instruction_that_is_not_shown_changes_the_rest() -> None:
    def each(message: Fields) -> str:
        return "" if message["role"] == "system" else f"{message['role']}:{message['content']}{STOP}\n"

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        told = f"told{STOP}" if messages[-1]["role"] == "system" else ""
        return "".join(map(each, messages)) + told + ("assistant:" if generation_prompt else "")

    assert environment(render, ASKED, SAID, {"role": "system", "content": "Be kind."}) is None


def test_a_reminder_behind_an_answer_that_the_template_strips() -> None:
    def each(message: Fields) -> str:
        reminder = f"Stay brief.{STOP}" if message["role"] == "assistant" else ""
        return f"{message['role']}:{message['content'].strip()}{STOP}\n{reminder}"

    expected = f"\nStay brief.{STOP}user:And twice that?{STOP}\nassistant:"
    assert environment(template(each), ASKED, {**SAID, "content": "Eight.\n"}, MORE) == expected


def test_a_stop_in_an_argument_behind_which_the_template_writes_syntax() -> None:
    def each(message: Fields) -> str:
        calls = [each["function"]["arguments"] for each in message.get("tool_calls") or ()]
        written = "".join(f"<parameter={name}>{value}</parameter>" for each in calls for name, value in each.items())
        return f"{message['role']}:{message['content']}{written}{STOP}\n"

    function = {"name": "add", "arguments": {"a": f"5{STOP}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    assert environment(template(each), ASKED, called, HEARD) == f"\ntool:8{STOP}\nassistant:"


@pytest.mark.parametrize("shown", [0, 1, 2])
@pytest.mark.parametrize("argument", ["5", f"5{STOP}"])
def test_a_template_that_renders_only_the_first_calls(shown: int, argument: str) -> None:
    """Each part of a completion has its own stop token (GigaChat 3); with `shown` 0 no call is rendered (SmolLM3)."""

    def each(message: Fields) -> str:
        calls = [each["function"]["arguments"] for each in message.get("tool_calls") or ()]
        written = "".join(f"call:{arguments}{STOP}\n" for arguments in calls[:shown])
        return f"{message['role']}:{message['content']}{STOP}\n{written}"

    called = {"role": "assistant", "content": "Let me add.", "tool_calls": [call(f'{{"a": "{argument}"}}')] * 2}
    assert environment(template(each), ASKED, called, HEARD) == f"\ntool:8{STOP}\nassistant:"


def test_a_thousand_calls_of_which_one_is_rendered_take_few_renderings() -> None:
    renderings: list[int] = []

    def each(message: Fields) -> str:
        renderings.append(1)
        calls = [each["function"]["arguments"] for each in message.get("tool_calls") or ()][:1]
        return f"{message['role']}:{message['content']}{STOP}\n" + "".join(f"call:{one}{STOP}\n" for one in calls)

    called = {"role": "assistant", "content": "Let me add.", "tool_calls": [call('{"a": 5}')] * 1000}
    assert environment(template(each), ASKED, called, HEARD) == f"\ntool:8{STOP}\nassistant:"
    assert len(renderings) < 100


def test_a_message_in_another_spelling_is_seen_and_one_in_front_of_everything_is_not() -> None:
    spelled = rendered(template(lambda m: f"{m['content'].replace(' ', '_')}{STOP}\n"), [ASKED, SAID, MORE], 1)
    assert unseen_messages(spelled, f"\nAnd_twice_that?{STOP}\nassistant:") == []
    kind = {"role": "system", "content": "Be kind."}
    in_front = template(
        lambda m: "" if m["role"] == "system" else f"{m['content']}{STOP}\n",
        head=lambda messages: "".join(m["content"] for m in messages if m["role"] == "system"),
    )
    turn = rendered(in_front, [ASKED, SAID, kind, MORE], 1)
    assert unseen_messages(turn, f"\nAnd twice that?{STOP}\nassistant:") == [2]


def behind_results(messages: Sequence[Fields], generation_prompt: bool) -> str:
    """A template that writes results in front of the content of the completion that made the calls (Gemma 4)."""
    texts, content = "", ""
    for message in messages:
        if message["role"] != "tool":
            texts, content = f"{texts}{content}", ""
        if message.get("tool_calls"):
            texts, content = f"{texts}call{STOP}", f"{message['content']}{STOP}\n" if message["content"] else ""
        else:
            texts += f"{message['role']}:{message['content']}{STOP}\n"
    return f"{texts}{content}{'assistant:' if generation_prompt else ''}"


@pytest.mark.parametrize(
    ("said", "heard", "repeats"),
    [
        ("Let me look.", "8", True),
        ("First.\nLet me look.\n", "8", True),
        ("8", "8", True),
        ("Let me look.", "Let me look.", True),
        ("", "8", False),
        (" \n", "8", False),
        (None, "8", False),
    ],
)
def test_a_completion_that_the_template_writes_again_behind_its_end(
    said: str | None, heard: str, repeats: bool
) -> None:
    called = {"role": "assistant", "content": said, "tool_calls": [call("{}")]}
    turn = rendered(behind_results, [ASKED, called, {**HEARD, "content": heard}], 1)
    text = environment_text(turn, STOP)
    assert text is not None
    assert repeats_completion(turn, text) is repeats


def test_a_message_with_the_words_of_the_completion_is_no_repetition() -> None:
    render = template()
    for said in ("Eight.", "assistant", "8"):
        turn = rendered(render, [ASKED, {**SAID, "content": said}, {**MORE, "content": f"{said}\n8"}], 1)
        assert not repeats_completion(turn, f"\nuser:{said}\n8{STOP}\nassistant:")


@pytest.mark.parametrize("more", [[], [HEARD]])
def test_the_stop_of_a_rewritten_message_is_not_that_of_the_answer(more: list[Fields]) -> None:
    """A completion with calls consists only of an end that is not a stop token. Each result contains the number of calls."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        calls = sum("tool_calls" in message for message in messages)
        texts = {"user": "hello", "tool": f"after {calls}"}
        ended = (
            texts.get(message["role"], "") + ("<call>" if "tool_calls" in message else STOP) for message in messages
        )
        roles = (message["role"] for message in messages)
        text = "".join(f"{role}:{end}" for role, end in zip(roles, ended, strict=True))
        return text + ("assistant:" if generation_prompt else "")

    called = {"role": "assistant", "tool_calls": [call("{}")]}
    assert environment(render, ASKED, called, HEARD, called, *more, first=4) is None


@pytest.mark.parametrize("length", [6, 99])
def test_no_place_where_the_head_quotes_what_stands_behind_an_empty_answer(length: int) -> None:
    """The quotation contains the whole mark, or only its beginning."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        answers = (message["content"] for message in messages if message["role"] == "assistant")
        quoted = next(filter(None, answers), "")[:length]
        return template(head=lambda _: f"({quoted}){STOP}")(messages, generation_prompt)

    assert environment(render, ASKED, {**SAID, "content": ""}, {**SAID, "content": "And twice that?"}) is None


def test_a_part_that_is_not_last_does_not_tell_the_end() -> None:
    """The mark makes the content longer, and the next message says so: only the reasoning in front of it can be marked."""

    def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
        text, before = "", ""
        for message in messages:
            thoughts = f"thoughts:{message['reasoning']}{STOP}" if "reasoning" in message else ""
            much = "(You said much.) " if len(before) > 20 else ""
            text += f"{thoughts}{message['role']}:{much}{message['content']}{STOP}\n"
            before = message["content"]
        return text + ("assistant:" if generation_prompt else "")

    thought = {**SAID, "reasoning": "Five and three."}
    found = environment(render, ASKED, thought, MORE)
    assert found in (None, f"\nuser:And twice that?{STOP}\nassistant:")
