"""Faults planted in copies of the renderer: a check that the renderer passes must catch each one.

The checks need only the repository's own tokenizer. The expected values come from the strict trainer's judge, from plain
rendering, or are written down.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from rollout_server.core.ledger import Ledger, Turn, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.testing.checks.judge import RequestJudge
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.http.wire import masked_call
from rollout_server.testing.script import ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer

from tests.exact.planted import Copy, Fault, copied
from tests.support.tokenizers import tokenizer_of

Check: TypeAlias = Callable[[Copy], Awaitable[None]]

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
ASKED = {"role": "user", "content": "What is 5 + 3?"}
SAID = {"role": "assistant", "content": "Eight."}
MORE = {"role": "user", "content": "And twice that?"}
CALLED = ScriptedReply(content="Adding.", tool_calls=(tool_call("call00001", "add", '{"a":5,"b":8.0}'),))
HEARD = {"role": "tool", "tool_call_id": "call00001", "content": "8<|im_end|>\n<|im_start|>tool\n<|im_end|>"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- PROMPT ~ '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def toy(template: str | None = None) -> Any:
    return tokenizer_of(TOY_TOKENIZER, template)


def packed(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message.parse(json.dumps(message)) for message in messages)


def answered(message: Mapping[str, Any], ids: Sequence[int], finish_reason: str = "stop") -> Answered:
    return Answered(1, packed([message])[0], finish_reason, pack_tokens(ids))


async def judged(copy: Copy) -> None:
    """The strict trainer's judge accepts a conversation, mask by mask, with its own token counts."""
    tokenizer = toy()
    judge, renderer = RequestJudge(PlainRenderer(tokenizer)), copy.renderer(tokenizer, TOOLS)
    turns = (
        (CALLED, [HEARD, HEARD]),
        (ScriptedReply(content="Cut off", cut=True), [MORE]),
        (ScriptedReply(content="Sixteen."), [ASKED]),
    )
    messages, last, asked = [ASKED], None, 0
    held = list[int]()
    for reply, heard in turns:
        rendered = await renderer.predict(packed(messages), last, asked)
        mask = [0] * rendered.mask_length if rendered.mask_length else None
        body = {"rollout_id": "r", "messages": messages, "response_mask": mask}
        prompt = judge.check(masked_call(body, TOOLS))
        predicted = rendered.predicted
        assert list(predicted.closing + predicted.environment) == prompt.ids[len(held) :]
        answer = judge.accept(prompt, reply)
        held = prompt.ids + answer.token_ids
        last, asked = answered(answer.message, answer.token_ids, answer.finish_reason), len(messages)
        messages = [*messages, answer.message, *heard]


async def closed(copy: Copy) -> None:
    """A completion that was truncated after another special token is not closed by that token."""
    tokenizer = toy()
    renderer = copy.renderer(tokenizer)
    ids = tokenizer.encode("Eight.<|endoftext|>", add_special_tokens=False)
    await renderer.predict(packed([ASKED]), None, 0)
    rendered = await renderer.predict(packed([ASKED, SAID, MORE]), answered(SAID, ids, "length"), 1)
    assert list(rendered.predicted.closing) == tokenizer.encode("<|im_end|>", add_special_tokens=False)


async def closed_with_more(copy: Copy) -> None:
    """A completion ends with the stop token and a part of what the template writes after it; the next message is no such part."""
    tokenizer = toy(CHATML.replace("PROMPT", "''").replace("'<|im_end|>\n'", "'<|im_end|><|endoftext|>\n'"))
    behind = f"<|endoftext|>\n<|im_start|>user\n{MORE['content']}<|im_end|><|endoftext|>\n<|im_start|>assistant\n"
    for more, rest in (
        ("<|endoftext|>", behind.removeprefix("<|endoftext|>")),
        (behind.partition("?")[0] + "?", behind),
    ):
        said = answered(SAID, tokenizer.encode(f"Eight.<|im_end|>{more}", add_special_tokens=False))
        rendered = await copy.renderer(tokenizer).append(packed([ASKED, SAID, MORE]), said, 1)
        assert str(tokenizer.decode(list(rendered.predicted.environment))) == rest


async def named(copy: Copy) -> None:
    """A template that refuses a tool result without the name of its tool."""
    result = "{{- raise_exception('name?') if message.role == 'tool' and not message.name -}}{{- message.name -}}"
    tokenizer = toy(CHATML.replace("PROMPT", "''").replace("~ message.content", "-}}" + result + "{{- message.content"))
    calls = [
        {**CALL, "id": f"call0000{number}", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate("fgh")
    ]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    ids = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    rendered = await copy.renderer(tokenizer).append(packed([ASKED, called, HEARD]), answered(called, ids), 1)
    text = str(tokenizer.decode(list(rendered.predicted.environment)))
    assert text.startswith("\n<|im_start|>tool\ng8")


async def counted(copy: Copy) -> None:
    """A template that counts the results with a word and their characters, in which only every second result has the word."""
    for condition, amount in (("ns.n > 3", 1), ("ns.n > 60", "message.content | length")):
        count = (
            "{%- set ns = namespace(n=0) -%}{%- for message in messages -%}{%- if message.role == 'tool' and 'error' in "
            f"message.content -%}}{{%- set ns.n = ns.n + {amount} -%}}{{%- endif -%}}{{%- endfor -%}}"
        )
        again = "{{- '<|im_start|>assistant' ~ (' again' if " + condition + ") ~ '\n' -}}"
        template = CHATML.replace("{{- PROMPT ~ '<|im_start|>assistant\n' -}}", again)
        tokenizer = toy(count + template)
        renderer, messages = copy.renderer(tokenizer), packed([ASKED])
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        last = answered(called, tokenizer.encode("<|im_end|>", add_special_tokens=False))
        for turn in range(12):
            asked = len(messages)
            messages += packed([called, {**HEARD, "content": "error: 8" if turn % 2 else "8"}])
            whole = await copy.renderer(tokenizer).predict(messages, last, asked)
            assert (await renderer.append(messages, last, asked)).predicted == whole.predicted


async def environment(copy: Copy, tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text after the last completion, one message before the end."""
    asked = len(messages) - 2
    stop = copy.loaded(tokenizer).probed.final
    assert stop is not None
    ids = [*tokenizer.encode("Eight.", add_special_tokens=False), stop.id]
    last = answered(messages[asked], ids)
    rendered = await copy.renderer(tokenizer).predict(packed(messages), last, asked)
    assert rendered.exact
    return str(tokenizer.decode(list(rendered.predicted.environment)))


async def stop_said(copy: Copy) -> None:
    """The model's text contains the stop token's text."""
    said = {"role": "assistant", "content": "It is <|im_end|>, I think."}
    text = await environment(copy, toy(), [ASKED, said, MORE])
    assert text == f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"


async def reminded(copy: Copy) -> None:
    """A template that writes a reminder after each completion, closed with the same stop token."""
    reminder = "{{- '<|im_start|>system\nStay brief.<|im_end|>\n' if message.role == 'assistant' -}}{%- endfor -%}"
    tokenizer = toy(CHATML.replace("PROMPT", "''").replace("{%- endfor -%}", reminder))
    text = await environment(copy, tokenizer, [ASKED, SAID, MORE])
    assert text.startswith("\n<|im_start|>system\nStay brief.<|im_end|>\n<|im_start|>user\n")


async def closing_calls(copy: Copy) -> None:
    """A template that ends calls with a special token, after which the engine has stripped the stop token."""
    content = "(message.content or message.tool_calls | tojson ~ '<|endoftext|>')"
    tokenizer = toy(CHATML.replace("PROMPT", "''").replace("message.content", content))
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    renderer = copy.renderer(tokenizer)
    ids = tokenizer.encode("add<|endoftext|>", add_special_tokens=False)
    rendered = await renderer.predict(packed([ASKED, called, HEARD]), answered(called, ids), 1)
    assert rendered.exact
    assert list(rendered.predicted.closing) == tokenizer.encode("<|im_end|>", add_special_tokens=False)


async def grown_long(copy: Copy) -> None:
    """A template that adds a reminder once a conversation is long."""
    tokenizer = toy(CHATML.replace("PROMPT", "('Be brief.' if messages | length > 40 else '')"))
    text = await environment(copy, tokenizer, [*[ASKED, SAID] * 21, MORE])
    assert text == f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\nBe brief.<|im_start|>assistant\n"


async def dated(copy: Copy) -> None:
    """A date that changes during a rollout, here each microsecond, stays constant in the renderings."""
    renderer = copy.renderer(toy("{{- strftime_now('%H:%M:%S.%f') -}}" + CHATML.replace("PROMPT", "''")))
    first, second = [(await renderer.predict(packed([text]), None, 0)).predicted for text in (ASKED, MORE)]
    date = toy().decode(list(first.environment)).partition("<")[0]
    assert toy().decode(list(second.environment)).startswith(date)
    known = copy.renderer(toy("{{- strftime_now('%Y') -}}" + CHATML.replace("PROMPT", "''")), date=datetime(1999, 1, 1))
    assert toy().decode(list((await known.predict(packed([ASKED]), None, 0)).predicted.environment)).startswith("1999")


async def without_tools(copy: Copy) -> None:
    """A trainer that renders no tools is detected from its first prompt on."""
    plain = PlainRenderer(toy())
    renderer = copy.renderer(toy(), TOOLS)
    predicted = (await renderer.predict(packed([ASKED]), None, 0)).predicted
    reported = pack_tokens(plain.prompt([ASKED], None))
    assert (await renderer.learn(predicted, reported)).environment == reported
    assert (await renderer.predict(packed([MORE]), None, 0)).predicted.environment == pack_tokens(
        plain.prompt([MORE], None)
    )


async def forgotten(copy: Copy) -> None:
    """A turn has the same count if it is rendered again, or by a renderer that has not seen the earlier turns."""
    plain, renderer = PlainRenderer(toy()), copy.renderer(toy())
    messages = [ASKED, SAID, MORE]
    expected = len(plain.prompt(messages, None)) - len(plain.prompt([ASKED], None)) - 2
    for each in (renderer, renderer, copy.renderer(toy())):
        assert (await each.predict(packed(messages), answered(SAID, [5, 6]), 1)).mask_length == expected


async def closed_by_several(copy: Copy) -> None:
    """A completion ends with two tokens, both generated by the model."""
    tokenizer = toy(CHATML.replace("PROMPT", "''").replace("<|im_end|>", "<|im_start|><|endoftext|>"))
    text = await environment(copy, tokenizer, [ASKED, SAID, MORE])
    assert text == f"\n<|im_start|>user\n{MORE['content']}<|im_start|><|endoftext|>\n<|im_start|>assistant\n"


async def unannounced(copy: Copy) -> None:
    """User messages begin with the token that ends completions; other messages after a completion begin with plain text."""
    tokenizer = toy(
        "{%- for message in messages -%}{{- '<|im_start|>' if message.role == 'user' else '/' -}}"
        "{{- message.content -}}{%- endfor -%}"
        "{{- '<|endoftext|>' if add_generation_prompt -}}"
    )
    late = {"role": "system", "content": "Be kind."}
    rendered = await copy.renderer(tokenizer).predict(packed([ASKED, SAID, late]), answered(SAID, [5]), 1)
    assert not rendered.exact


async def in_python(copy: Copy) -> None:
    """A tokenizer without the Rust library, which reports no offsets in the text."""
    stop = "<extra_id_0>"
    tokenizer = ByT5Tokenizer(chat_template=CHATML.replace("PROMPT", "''").replace("<|im_end|>", stop))
    text = await environment(copy, tokenizer, [ASKED, SAID, MORE])
    assert text == f"\n<|im_start|>user\n{MORE['content']}{stop}\n<|im_start|>assistant\n"


async def encoded(copy: Copy) -> None:
    """A longer added token that begins before a shorter one and contains it."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<x>", normalized=False), AddedToken("a<x>b", normalized=False)])
    encoder = copy.modules["encoding"].GrowingEncoder(tokenizer, tokenizer.get_added_tokens_decoder())
    for before, after in (("b a<x>", "b a<x>b a"), ("a<x> a b", "a<x> a b a<x>b"), ("a<x>b a", "a<x> a")):
        assert list(encoder.grown(encoder.whole(before), after).ids) == tokenizer.encode(after).ids


async def parted(copy: Copy) -> None:
    """The excerpts around the first differing token, also in later turns."""
    excerpt, prediction = copy.modules["drift_excerpt"].drift_excerpt, copy.modules["drift_excerpt"].Prediction
    ledger, loaded = Ledger().main, copy.loaded(toy())
    ids = [
        pack_tokens(toy().encode(text, add_special_tokens=False)) for text in ("Hello there.", " Tuesday", " Friday")
    ]
    nothing = pack_tokens()
    assert await excerpt(loaded, ledger, prediction(nothing, ids[0]), ids[0]) == ("", "")
    ledger.commit(Turn(1, ids[1], None, None, ids[0]))
    texts = await excerpt(loaded, ledger, prediction(nothing, ids[1]), ids[0] + ids[1] + ids[2])
    assert [("Tuesday Tuesday" in text, "Friday" in text) for text in texts] == [(True, False), (False, True)]


PLANTED: Sequence[tuple[Check, Fault]] = (
    (
        stop_said,
        Fault(
            "the first stop is always taken",
            "turn_boundary",
            "if end == first and plain and not rewritten:",
            "if (text := turn.full[first:]):",
        ),
    ),
    (
        reminded,
        Fault(
            "the last stop is always taken",
            "turn_boundary",
            "else _first_stop(turn.full, stop, max(0, written - len(stop) + 1))",
            "else end",
        ),
    ),
    (
        closing_calls,
        Fault("what ends a call ends an answer", "tokenizer", " and token_id not in self.probed.inside", ""),
    ),
    (
        closed_by_several,
        Fault(
            "the first token behind an answer closes it",
            "template_probe",
            "self._stops[closing[-1]]",
            "self._stops[own[0]]",
        ),
    ),
    (
        unannounced,
        Fault(
            "any text may follow an answer that is left open",
            "renderer",
            "if stop is not None and not (first and self.loaded.is_special(first[0])):",
            "if False:",
        ),
    ),
    (
        in_python,
        Fault("one id too many is dropped behind the stop", "completion_end", "ids = encoded[1:]", "ids = encoded[2:]"),
    ),
    (in_python, Fault("the stop itself is kept", "completion_end", "ids = encoded[1:]", "ids = encoded[:]")),
    (
        judged,
        Fault(
            "one id too many is dropped, by place", "encoding", "self.offsets[index] + 1 :", "self.offsets[index] + 2 :"
        ),
    ),
    (judged, Fault("the tools are left out", "renderer", "tools=form.convert_tools(self._tools)", "tools=None")),
    (
        without_tools,
        Fault(
            "the tools stay what they were",
            "renderer",
            "tools=form.convert_tools(self._tools)",
            "tools=RenderingForm().convert_tools(self._tools)",
        ),
    ),
    (
        dated,
        Fault(
            "another date each turn",
            "renderer",
            "tools=form.convert_tools(self._tools)",
            "tools=form.convert_tools(self._tools), date=datetime.now()",
        ),
    ),
    (
        judged,
        Fault(
            "arguments in the other form",
            "rendering_form",
            "if arguments is Arguments.PARSED and",
            "if arguments is Arguments.RECEIVED and",
        ),
    ),
    (
        grown_long,
        Fault(
            "what stands behind a short history is not compared",
            "turn_boundary",
            "if hint is not None and turn.full[first:] == hint and plain and not rewritten:",
            "if hint is not None:",
        ),
    ),
    (
        encoded,
        Fault(
            "no margin for the longest token",
            "encoding",
            "common_prefix(before.text, text) - self._longest",
            "common_prefix(before.text, text)",
        ),
    ),
    (
        forgotten,
        Fault(
            "the length of some earlier prompt is taken for the last one's",
            "renderer",
            "if before.messages != turn.messages[: turn.answered]:",
            "if not before.messages:",
        ),
    ),
    (
        judged,
        Fault(
            "a cut answer is not closed",
            "completion_end",
            "Prediction(closing, ids)",
            "Prediction(pack_tokens(), ids)",
        ),
    ),
    (
        judged,
        Fault(
            "an answer is closed twice",
            "completion_end",
            "PredictedTokens(Prediction(pack_tokens(), ids))",
            "PredictedTokens(Prediction(pack_tokens([stop.id]), ids))",
        ),
    ),
    (
        closed_with_more,
        Fault(
            "a token behind the stop is written twice",
            "completion_end",
            "Prediction(pack_tokens(), ids[len(more) :])",
            "Prediction(pack_tokens(), ids)",
        ),
    ),
    (
        closed_with_more,
        Fault(
            "a turn that the model made up is the next message",
            "completion_end",
            "all(_is_syntax(loaded, each)",
            "all(each >= 0",
        ),
    ),
    (counted, Fault("the dropped round is not repeated", "short_form", "all_other[self._round :] * times", "[]")),
    (
        counted,
        Fault(
            "other messages show nothing", "renderer", "if text is not None and not text.endswith(end):", "if False:"
        ),
    ),
    (
        named,
        Fault("the name of another call", "rendering_form", "names.get(call_id)", "next(iter(names.values()))"),
    ),
    (
        closed,
        Fault("any special token closes a cut answer", "tokenizer", "self._ends or cut or any", "self._ends or any"),
    ),
    (
        judged,
        Fault(
            "the count includes what the model wrote",
            "renderer",
            "prompt.length - before.length - len(last.token_ids)",
            "prompt.length - before.length",
        ),
    ),
    (
        judged,
        Fault(
            "a mask of the truth's length",
            "renderer",
            "return Rendered(truth.tokens, longer,",
            "return Rendered(truth.tokens, len(truth.tokens.environment),",
        ),
    ),
    (
        parted,
        Fault(
            "what the ledger holds is not expected",
            "drift_excerpt",
            "ledger.prefix() + predicted.closing",
            "predicted.closing",
        ),
    ),
)


@pytest.mark.parametrize(("check", "fault"), [pytest.param(*each, id=each[1].name) for each in PLANTED])
async def test_planted_faults_are_caught(check: Check, fault: Fault, tmp_path: Path) -> None:
    with copied(tmp_path, fault) as copy, pytest.raises(Exception) as caught:  # noqa: PT011 - in whatever way
        await check(copy)
    assert not isinstance(caught.value, ImportError | NameError | SyntaxError | TypeError | AttributeError)


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _ in PLANTED), ids=lambda check: check.__name__)
async def test_the_renderer_passes(check: Check, tmp_path: Path) -> None:
    with copied(tmp_path, None) as copy:
        await check(copy)
