"""Random chat templates, composed of traits of real ones, each with a twin that marks where completions begin and end.

The twin renders the same text with four marks per assistant message: the start and the end of its own text, the start of its
stop token and the end of its stop token. The generator of a template knows these places, so the twin determines exactly what
follows a completion.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias

from tests.hostile.templates.framing import FRAMINGS, Framing
from tests.hostile.templates.vocabulary import BOS, CALL_TOKENS, VOCABULARIES, Words, tokenizer

MARK: Final = re.compile("\ue000([ABSE])(\\d+)\ue001")
"""A mark of a twin: its kind and the index of the assistant message.

Kinds are the start of the completion, the end of its own text, the start and the end of the stop.
"""


Style: TypeAlias = str


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of a template, one word each. The first of a trait's `OPTIONS` is the plain one."""

    framing: Style = "chatml"
    vocabulary: Style = "gpt2"
    config: Style = "known"
    bos: Style = "none"
    default_system: Style = "none"
    tools_at: Style = "system"
    calls: Style = "json"
    results: Style = "own_role"
    result_names: Style = "unread"
    reasoning: Style = "none"
    prompt: Style = "plain"
    switch: Style = "none"
    switch_effect: Style = "prompt"
    counts: Style = "none"
    reminder: Style = "none"
    later_system: Style = "rendered"
    order: Style = "free"
    date: Style = "none"
    trim: Style = "none"
    looks_back: Style = "none"
    merges: Style = "none"
    empty: Style = "rendered"
    last: Style = "closed"
    closing: Style = "none"

    def unusual(self) -> dict[str, str]:
        """The traits that are not plain."""
        return {name: value for name, value in self.items() if value != OPTIONS[name][0]}

    def items(self) -> list[tuple[str, str]]:
        """All traits with their words."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "framing": tuple(FRAMINGS),
    "vocabulary": VOCABULARIES,
    "config": ("known", "unknown"),
    "bos": ("none", "first"),
    "default_system": ("none", "written"),
    "tools_at": ("system", "nowhere", "block", "first_user", "last_user"),
    "calls": (
        "json",
        "text",
        "text_only",
        "pythonic",
        "special_closer",
        "wrapped",
        "numbered",
        "unseen",
        "own_message",
        "first_only",
    ),
    "results": ("own_role", "user_turn", "merged", "named_by_id", "numbered", "listed", "of_calls"),
    "result_names": ("unread", "written", "as_json", "required", "or_default", "if_any"),
    "reasoning": ("none", "shown", "dropped", "stripped"),
    "prompt": (
        "plain",
        "open_think",
        "empty_think",
        "after_results",
        "not_after_answer",
        "counts_messages",
        "counts_calls",
    ),
    "switch": ("none", "any_user", "first_user", "last_user", "system", "answer"),
    "switch_effect": ("prompt", "user"),
    "counts": ("none", "third", "fifth", "index", "first_result", "even", "result_number"),
    "reminder": ("none", "before_results", "before_user", "once"),
    "later_system": ("rendered", "ignored", "raises", "hoisted", "folded"),
    "order": ("free", "alternates", "results_after_calls"),
    "date": ("none", "system", "prompt", "user"),
    "trim": ("none", "users", "results", "all"),
    "looks_back": (
        "none",
        "reasoning",
        "content",
        "names",
        "arguments",
        "first_question",
        "first_answer",
        "null",
        "length",
    ),
    "merges": ("none", "answers", "users"),
    "empty": ("rendered", "skipped"),
    "last": ("closed", "open"),
    "closing": ("none", "text", "lines", "token", "numbered", "if_any", "of_calls"),
}
DATES: Final = (
    "%d %b %Y",
    "%Y-%m-%d",
    "%A, %-d %B %Y",
    "%B %d, %Y %H:%M",
    "%j/%y 100%%",
    "%x %p",
    "%D",
    "%C-%g",
    "%e %h %Y",
    "%-m/%-d, %-I%p",
)


@dataclass(frozen=True, slots=True)
class Template:
    """A template, its twin and what its generator knows.

    Args:
        date: the format in which it prints a date, if it does.
        arguments: the form of arguments passed to it if they are received as text.
        stops: the tokens with which a model trained on it ends completions, without calls and with calls.
    """

    traits: Traits
    text: str
    twin: str
    arguments: Literal["text", "object"]
    stops: tuple[str, str]
    words: Words
    date: str = DATES[0]

    @property
    def ends(self) -> frozenset[str]:
        """The end tokens in the model's generation config, if it has one."""
        return frozenset({*self.stops, self.words.eos} - {""})

    @property
    def inside(self) -> frozenset[str]:
        """The special tokens that it may write inside a completion."""
        written = self.text.partition("m.role == 'assistant'")[2] if self.traits.framing == "channels" else ""
        calls = {"special_closer": CALL_TOKENS[:2], "wrapped": CALL_TOKENS}.get(self.traits.calls, ())
        calls = (*calls, *(CALL_TOKENS[-1:] if self.traits.closing == "token" else ()))
        return frozenset({*calls, *(text for text in self.words.special if text in written)})

    @property
    def needs_names(self) -> bool:
        """Whether a result needs the name of its tool: without it the template refuses, or leaves the place empty."""
        return self.traits.result_names in ("written", "as_json", "required")

    @property
    def vocabulary(self) -> Any:
        """Its tokenizer, without the template."""
        return tokenizer(self.traits.vocabulary, self.words)


def generate(rng: random.Random) -> Template:
    """Generate a random template."""
    most = rng.choice((1, 2, 3, 4, 6, 8))
    names = rng.sample([name for name in OPTIONS if name != "framing"], most)
    chosen = {name: rng.choice(OPTIONS[name][1:]) for name in names}
    if "switch_effect" in chosen and "switch" not in chosen:
        chosen["switch"] = rng.choice(OPTIONS["switch"][1:])
    if chosen.get("reasoning") is None and rng.random() < 0.3:
        chosen["reasoning"] = rng.choice(OPTIONS["reasoning"][1:])
    framing = rng.choice(("chatml", *OPTIONS["framing"]))
    return build(Traits(framing, **chosen), rng.choice(DATES))


def settle(traits: Traits) -> Traits:
    """Drop traits that contradict each other, so that the generator always knows what ends a completion."""
    framing = FRAMINGS[traits.framing]
    if not framing.stop and traits.calls in ("special_closer", "wrapped"):
        traits = replace(traits, calls="json")  # otherwise only the closer of a call would end a completion
    if not framing.stop:
        traits = replace(
            traits, closing="none"
        )  # a text behind a completion belongs to the text that separates messages
    if framing.part[0] and traits.calls == "unseen":
        traits = replace(traits, calls="json")  # an empty part for calls would not show them
    if traits.calls in ("own_message", "first_only") and (
        framing.next_begins or not framing.stop or framing.stop != framing.calls_stop
    ):
        traits = replace(traits, calls="json")  # content and calls would be closed by different tokens, or by none
    if framing.next_begins:
        # The stop token is the first token of the next message. A model would also have learned any other token that can
        # stand there.
        traits = replace(traits, merges="none" if traits.merges == "answers" else traits.merges)
        traits = replace(traits, reminder="none", last="closed")
        if traits.closing == "token":
            traits = replace(traits, closing="text")  # that token would end the completion
        if traits.results in ("user_turn", "merged"):
            traits = replace(traits, results="own_role")
    if traits.last == "open" and traits.merges == "answers":
        traits = replace(traits, last="closed")
    return traits


def build(traits: Traits, date: str = DATES[0]) -> Template:
    """Build the template of these traits; `date` is the format in which it prints a date, if it does."""
    traits = settle(traits)
    source = _Writer(traits, date).source().replace("-%}{", "-%}\n{").replace("-}}{", "-}}\n{")
    framing = FRAMINGS[traits.framing]
    plain = twin = source
    for name, marking in _marks(framing).items():
        plain, twin = plain.replace(name, ""), twin.replace(name, marking)
    stops = (framing.stop, framing.calls_stop)
    form: Literal["text", "object"] = "object" if traits.calls == "pythonic" else "text"
    return Template(traits, plain, twin, form, stops, framing.words, date)


def _marks(framing: Framing) -> dict[str, str]:
    def mark(name: str, index: str) -> str:
        return "{{- '\ue000" + name + "' ~ " + index + " ~ '\ue001' -}}"

    if not framing.next_begins:
        return {f"⟦{name}⟧": mark(name, "i") for name in "ABSE"} | {"⟦O⟧": ""}
    pending = "{%- if ns.open >= 0 -%}"
    return {
        "⟦A⟧": mark("A", "i"),
        "⟦B⟧": mark("B", "i"),
        "⟦O⟧": "{%- set ns.open = i -%}",
        "⟦S⟧": pending + mark("S", "ns.open") + "{%- endif -%}",
        "⟦E⟧": pending + mark("E", "ns.open") + "{%- set ns.open = -1 -%}{%- endif -%}",
    }


def _put(text: str) -> str:
    """Write a constant."""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}" if text else ""


def _say(expression: str) -> str:
    return "{{- " + expression + " -}}"


def _set(assignment: str) -> str:
    return "{%- set " + assignment + " -%}"


def _if(condition: str, then: str, otherwise: str = "") -> str:
    return "{%- if " + condition + " -%}" + then + ("{%- else -%}" + otherwise if otherwise else "") + "{%- endif -%}"


def _each(loop: str, body: str) -> str:
    return "{%- for " + loop + " -%}" + body + "{%- endfor -%}"


_TEXT: Final = (
    "{%- macro text(m) -%}{%- if m.content is string -%}{{- m.content -}}"
    "{%- elif m.content is defined and m.content is not none -%}"
    "{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
_FIRST_SYSTEM: Final = "messages[0].role in ('system', 'developer')"
_CALLING: Final = "m.tool_calls is defined and m.tool_calls"
_BEFORE: Final = "messages[i - 1]"
_ASKS_QUIET: Final = "'/no_think' in text({0})"


class _Writer:
    """Writer of a template's source, with marks for the start and stop of a completion and the end of its stop."""

    def __init__(self, traits: Traits, date: str) -> None:
        self._is = traits
        self._framing = FRAMINGS[traits.framing]
        self._date = _say(f"strftime_now({json.dumps(date)})")

    def source(self) -> str:
        """Write the whole template."""
        branches = (
            ("m.role in ('system', 'developer')", self._system()),
            ("m.role == 'user'", self._user()),
            ("m.role == 'assistant'", self._answer()),
            ("m.role == 'tool'", self._result()),
        )
        chain = "".join(
            ("{%- if " if number == 0 else "{%- elif ") + condition + " -%}" + body
            for number, (condition, body) in enumerate(branches)
        )
        unknown = "{%- else -%}{{- raise_exception('Unknown role ' ~ m.role) -}}{%- endif -%}"
        loop = _each("m in messages", _set("i = loop.index0") + chain + unknown)
        return _TEXT + self._scan() + self._opening() + loop + self._prompt()

    def _scan(self) -> str:
        first = _set(
            "ns = namespace(open=-1, first_user=-1, last_user=-1, calls=0, results=0, listing=false, quiet=false, "
            "once=false, folded='', hoisted='', question='', answer='', name='', number=0)"
        )
        user, answer = self._scan_user(), ""
        if self._is.looks_back == "first_answer":
            answer += _if("not ns.answer", _set("ns.answer = text(m)"))
        if "counts_calls" in self._is.prompt or self._is.results == "of_calls":
            answer += _if(_CALLING, _set("ns.calls = ns.calls + m.tool_calls | length"))
        if self._is.switch == "answer":
            answer += _if(_ASKS_QUIET.format("m"), _set("ns.quiet = true"))
        system = ""
        if self._is.switch == "system":
            system += _if(f"loop.first and {_ASKS_QUIET.format('m')}", _set("ns.quiet = true"))
        if self._is.later_system == "hoisted":
            system += _if("not loop.first", _set("ns.hoisted = ns.hoisted ~ '\\n' ~ text(m)"))
        by_role = (("== 'user'", user), ("== 'assistant'", answer), ("in ('system', 'developer')", system))
        scan = "".join(_if(f"m.role {role}", body) for role, body in by_role if body)
        return first + (_each("m in messages", scan) if scan else "")

    def _scan_user(self) -> str:
        first = _if("ns.first_user < 0", _set("ns.first_user = loop.index0") + _set("ns.question = text(m)"))
        last = _set("ns.last_user = loop.index0")
        quiet = _set("ns.quiet = " + _ASKS_QUIET.format("m"))
        switched = {
            "any_user": _if(_ASKS_QUIET.format("m"), _set("ns.quiet = true"))
            + _if("'/think' in text(m)", _set("ns.quiet = false")),
            "first_user": first + _if("ns.first_user == loop.index0", quiet),
            "last_user": quiet,
        }.get(self._is.switch, "")
        if self._is.tools_at == "first_user" or self._is.looks_back == "first_question":
            switched += first
        return switched + (
            last if self._is.tools_at == "last_user" or self._is.reasoning in ("dropped", "stripped") else ""
        )

    def _opening(self) -> str:
        """Write the text before the first message that is not a system message."""
        inside = _if(_FIRST_SYSTEM, _say(self._trimmed("text(messages[0])", "all")))
        condition = [_FIRST_SYSTEM]
        if self._is.default_system == "written":
            inside = _if(_FIRST_SYSTEM, _say(self._trimmed("text(messages[0])", "all")), _put("You are helpful."))
            condition = ["true"]
        if self._is.later_system == "hoisted":
            inside += _say("ns.hoisted")
            condition.append("ns.hoisted")
        if self._is.tools_at == "system":
            inside += _if("tools", self._tools())
            condition.append("tools")
        if self._is.date == "system":
            inside += _put("\nToday: ") + self._date
            condition.append("true")
        frame = self._head("system") + inside + _put(self._framing.ending("system"))
        block = _if("tools", self._tools()) if self._is.tools_at == "block" else ""
        return (_put(BOS) if self._is.bos == "first" else "") + block + _if(" or ".join(condition), frame)

    def _tools(self) -> str:
        return _put("\nTools:") + _each("tool in tools", _put("\n") + _say("tool | tojson")) + _put("\n")

    def _head(self, role: str, extra: str = "") -> str:
        """Write the start of a message. If it also ends the completion before it, its first token does so."""
        head = self._framing.heads[role]
        if not self._framing.next_begins:
            return _put(head) + extra
        token, bracket, rest = head.partition("|>")
        return "⟦S⟧" + _put(token + bracket) + "⟦E⟧" + _put(rest) + extra

    def _trimmed(self, expression: str, *words: str) -> str:
        return expression + (" | trim" if self._is.trim in words else "")

    def _counted(self) -> str:
        """Write the start of a message that depends on its position in the conversation."""
        return {
            "third": _if("(i + 1) % 3 == 0", _put("(Remember to be brief.)\n")),
            "fifth": _if("(i + 1) % 5 == 0", _put("(Remember to be brief.)\n")),
            "even": _if("i % 2 == 0", _put("(even) ")),
            "index": _put("[") + _say("i") + _put("] "),
        }.get(self._is.counts, "")

    def _system(self) -> str:
        later = {
            "rendered": self._head("system") + _say("text(m)") + _put(self._framing.ending("system")),
            "raises": _say("raise_exception('A system message must be the first.')"),
            "folded": _set("ns.folded = ns.folded ~ text(m) ~ '\\n'"),
        }.get(self._is.later_system, "")
        return _if("i > 0", later) if later else ""

    def _user(self) -> str:
        after_answer = f"i > 0 and {_BEFORE}.role == 'assistant'"
        body = self._counted()
        if self._is.date == "user":
            body += self._date + _put(" ")
        if self._is.tools_at == "first_user":
            body += _if("tools and i == ns.first_user", self._tools())
        if self._is.tools_at == "last_user":
            body += _if("tools and i == ns.last_user", self._tools())
        if self._is.later_system == "folded":
            body += _say("ns.folded") + _set("ns.folded = ''")
        body += self._looks_back(after_answer) + _say(self._trimmed("text(m)", "users", "all"))
        if self._is.switch_effect == "user":
            body += _if("ns.quiet", _put(" (quietly)"))
        head, tail = self._head("user"), _put(self._framing.ending("user"))
        if self._is.merges == "users":
            head = _if(f"i > 0 and {_BEFORE}.role == 'user'", _put("\n\n"), head)
            tail = _if("not loop.last and messages[i + 1].role == 'user'", "", tail or "{{- '' -}}")
        return self._in_order("user") + self._reminded("before_user", after_answer) + head + body + tail

    def _in_order(self, role: str) -> str:
        if self._is.order == "alternates" and role in ("user", "assistant"):
            wrong = f"i > 0 and {_BEFORE}.role == '{role}'"
            return _if(wrong, _say("raise_exception('Roles must alternate user/assistant/user/assistant/...')"))
        if self._is.order == "results_after_calls" and role == "tool":
            wrong = f"i == 0 or not ({_BEFORE}.role == 'tool' or {_BEFORE}.tool_calls)"
            return _if(wrong, _say("raise_exception('A result needs a call before it.')"))
        return ""

    def _reminded(self, where: str, condition: str) -> str:
        """Write a message of the template itself, between a completion and the text after it."""
        stop = self._framing.stop if not self._framing.next_begins else ""
        said = self._head("system") + _put("Remember the rules.") + _put(stop + self._framing.after)
        if self._is.reminder == where:
            return _if(condition, said)
        if self._is.reminder == "once":
            return _if(f"({condition}) and not ns.once", said + _set("ns.once = true"))
        return ""

    def _looks_back(self, condition: str) -> str:
        """Write the start of a message that depends on earlier messages."""
        before = f"({condition}) and "
        return {
            "reasoning": _if(before + f"{_BEFORE}.reasoning_content", _put("(You thought.) ")),
            "content": _if(before + f"text({_BEFORE}).endswith('?')", _put("(You asked.) ")),
            "names": _if(
                before + f"{_BEFORE}.tool_calls", _put("for ") + _say(f"{_BEFORE}.tool_calls[0].function.name")
            ),
            "arguments": _if(
                before + f"{_BEFORE}.tool_calls",
                _put("of ") + _say(f"{_BEFORE}.tool_calls[0].function.arguments | string"),
            ),
            "first_question": _put("(Asked: ") + _say("ns.question | length") + _put(") "),
            "first_answer": _put("(Said first: ") + _say("ns.answer[:6]") + _put(") "),
            "null": _if(before + f"{_BEFORE}.content is not defined", _put("(Silence.) ")),
            "length": _if(before + f"text({_BEFORE}) | length > 20", _put("(You said much.) ")),
        }.get(self._is.looks_back, "")

    def _answer(self) -> str:
        content = {
            "none": self._trimmed("text(m)", "all"),
            "stripped": "text(m).split('</think>')[-1].lstrip('\\n') if i < ns.last_user else text(m)",
        }.get(self._is.reasoning, self._trimmed("text(m)", "all"))
        calling = self._part("commentary", self._calls())
        said = self._part("final", _say(content))
        if self._framing.part[0]:
            parts = _if(_CALLING, _if("text(m)", self._inner(_say(content))) + calling, said)
        else:
            parts = _say(content) + _if(_CALLING, self._calls_head() + self._calls())
        parts += "⟦B⟧"
        body = self._head("assistant") + "⟦A⟧" + self._thought() + parts + self._closed()
        if self._is.merges == "answers":
            glued = f"i > 0 and {_BEFORE}.role == 'assistant'"
            head = _if(glued, _put("\n"), self._head("assistant"))
            open_end = "not loop.last and messages[i + 1].role == 'assistant'"
            body = head + "⟦A⟧" + self._thought() + parts + _if(open_end, "⟦S⟧⟦E⟧{{- '' -}}", self._closed())
        if self._is.results == "listed":
            body += _if("m.content is string and m.content", _set("ns.listing = false"))
        if self._is.empty == "skipped":
            body = _if(f"text(m) or ({_CALLING})", body)
        return self._in_order("assistant") + body

    def _closed(self) -> str:
        """Write the stop of a completion, with the marks around it."""
        framing = self._framing
        before = self._closing() + _put(framing.before)
        if framing.next_begins:
            return before + "⟦O⟧"
        if framing.stop == framing.calls_stop:
            stop = before + "⟦S⟧" + _put(framing.stop) + "⟦E⟧"
        else:
            stop = before + "⟦S⟧" + _if(_CALLING, _put(framing.calls_stop), _put(framing.stop)) + "⟦E⟧"
        closed = stop + _put(framing.after)
        if self._is.last == "open" and framing.stop:
            return _if("loop.last and not add_generation_prompt", "⟦S⟧⟦E⟧{{- '' -}}", closed)
        return closed

    def _closing(self) -> str:
        """Write text between a completion and its stop."""
        return {
            "text": _put("</answer>"),
            "lines": _put("\n\n</answer>\n"),
            "token": _put(CALL_TOKENS[-1]),
            "numbered": _put("</answer ") + _say("i") + _put(">"),
            "if_any": _if("text(m)", _put("</answer>")),
            "of_calls": _if(_CALLING, _put("\n</calls>"), _put("</answer>")),
        }.get(self._is.closing, "")

    def _calls_head(self) -> str:
        """Close the content, and begin another message for the calls."""
        if self._is.calls not in ("own_message", "first_only"):
            return ""
        return _put(self._framing.before + self._framing.stop + self._framing.after) + self._head("assistant")

    def _part(self, channel: str, inside: str) -> str:
        return _put(self._framing.part[0].format(channel)) + inside

    def _inner(self, inside: str) -> str:
        """Write a part of a completion that is not its last one."""
        return self._part("analysis", inside) + _put(self._framing.part[1])

    def _thought(self) -> str:
        if self._is.reasoning not in ("shown", "dropped"):
            return ""
        thought = "m.reasoning_content"
        tagged = _put("<think>\n") + _say(thought) + _put("\n</think>\n\n")
        shown = self._inner(_say(thought)) if self._framing.part[0] else tagged
        condition = f"{thought} is defined and {thought}"
        return _if(condition + (" and i > ns.last_user" if self._is.reasoning == "dropped" else ""), shown)

    def _calls(self) -> str:
        name, arguments = "call.function.name", "call.function.arguments"
        json_call = (
            _put('{"name": ') + _say(f"{name} | tojson") + _put(', "arguments": ') + _say(f"{arguments} | tojson")
        )
        one = {
            "json": _put("<tool_call>\n") + json_call + _put("}\n</tool_call>"),
            "text": _put("<tool_call>")
            + _say(name)
            + _put(" ")
            + _say(f"{arguments} if {arguments} is string else {arguments} | tojson")
            + _put("</tool_call>"),
            "text_only": _if(f"{arguments} is not string", _say("raise_exception('Arguments must be text.')"))
            + _say(name)
            + _put(":")
            + _say(arguments),
            "pythonic": _say(name)
            + _put("(")
            + _each(
                f"key, value in {arguments}.items()",
                _say("key ~ '=' ~ (value | tojson)") + _if("not loop.last", _put(", ")),
            )
            + _put(")"),
            "own_message": json_call + _put("}"),
            "first_only": json_call + _put("}"),
            "special_closer": _put("<|call_begin|>") + json_call + _put("}<|call_end|>"),
            "wrapped": _put("<|call_begin|>") + json_call + _put("}<|call_end|>"),
            "numbered": _put("<tool_call>functions.")
            + _say(f"{name} ~ ':' ~ loop.index0 ~ ' ' ~ (call.id or '')")
            + _put(" ")
            + _say(f"{arguments} | tojson")
            + _put("</tool_call>"),
        }.get(self._is.calls)
        if one is None:
            return "{{- '' -}}"
        rendered = "m.tool_calls[:1]" if self._is.calls == "first_only" else "m.tool_calls"
        calls = _each(f"call in {rendered}", _put("\n") + one)
        return _put("<|calls_begin|>") + calls + _put("<|calls_end|>") if self._is.calls == "wrapped" else calls

    def _result(self) -> str:
        style = self._is.results
        first = f"i == 0 or {_BEFORE}.role != 'tool'"
        last = "loop.last or messages[i + 1].role != 'tool'"
        after_answer = f"i > 0 and {_BEFORE}.role == 'assistant'"
        said = _say(self._trimmed("text(m)", "results", "all"))
        body = self._counted() + self._looks_back(after_answer) + self._result_name() + said
        if self._is.counts == "first_result":
            body = _if("ns.results == 0", _put("(Results may lie.)\n")) + body
        if self._is.counts == "result_number":
            body = _put("#") + _say("ns.results + 1") + _put(" ") + body
        counted = _set("ns.results = ns.results + 1")
        before = self._in_order("tool") + self._reminded("before_results", after_answer)
        role = "user" if style in ("user_turn", "merged") else "tool"
        head, tail = self._head(role), _put(self._framing.ending(role))
        tagged = _put("<tool_response>\n") + body + _put("\n</tool_response>")
        whole = {
            "user_turn": head + tagged + tail,
            "merged": _if(first, head) + _put("\n") + tagged + _if(last, tail or "{{- '' -}}"),
            "named_by_id": self._named() + head + _say("ns.name") + _put(": ") + body + tail,
            "numbered": _if(first, _set("ns.number = 0"))
            + _set("ns.number = ns.number + 1")
            + head
            + _put("Result ")
            + _say("ns.number")
            + _put(": ")
            + body
            + tail,
            "listed": _if(first, head)
            + _if("ns.listing", _put(", "), _put("["))
            + body
            + _set("ns.listing = true")
            + _if(last, _put("]") + tail),
            "of_calls": head + _put("after ") + _say("ns.calls") + _put(" calls: ") + body + tail,
        }.get(style, head + body + tail)
        return before + whole + counted

    def _result_name(self) -> str:
        """Write the name of the tool that the result carries."""
        missing = _if("not m.name", _say("raise_exception('A result needs the name of its tool.')"))
        return {
            "written": _put("from ") + _say("m.name") + _put(": "),
            "as_json": _say("{'name': m.name} | tojson") + _put("\n"),
            "required": missing + _say("m.name") + _put(": "),
            "or_default": _say("m.name or 'a tool'") + _put(": "),
            "if_any": _if("m.name", _put("from ") + _say("m.name") + _put(": ")),
        }.get(self._is.result_names, "")

    def _named(self) -> str:
        """Find the call that belongs to a tool result, anywhere in the conversation."""
        found = _if("call.id == m.tool_call_id", _set("ns.name = call.function.name"))
        return _set("ns.name = 'nobody'") + _each(
            "other in messages", _if("other.tool_calls", _each("call in other.tool_calls", found))
        )

    def _prompt(self) -> str:
        behind = {
            "open_think": _put("<think>\n"),
            "empty_think": _put("<think>\n\n</think>\n\n"),
            "after_results": _if("messages[-1].role == 'tool'", _put("(results read)\n")),
            "counts_messages": _put("(") + _say("messages | length") + _put(") "),
            "counts_calls": _put("(") + _say("ns.calls") + _put(" calls) "),
        }.get(self._is.prompt, "")
        if self._is.switch != "none" and self._is.switch_effect == "prompt":
            behind += _if("ns.quiet", _put("<think>\n\n</think>\n\n"))
        if self._is.date == "prompt":
            behind += self._date
        condition = "add_generation_prompt"
        if self._is.prompt == "not_after_answer":
            condition += " and messages[-1].role != 'assistant'"
        return _if(condition, self._head("assistant") + behind)
