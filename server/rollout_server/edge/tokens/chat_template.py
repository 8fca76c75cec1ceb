"""Render a tokenizer's chat template, with transformers or directly with its compiled Jinja template.

transformers 5 deep-copies the whole conversation for each rendering, because it may hold values that are not JSON. The messages
here are always JSON, and the Jinja sandbox lets a template neither call a method that changes a list or a dictionary nor set an
attribute. So a template can be given the messages themselves.

This shortcut does not rely on a version of transformers. When a tokenizer is loaded, both ways render sample conversations and
the texts are compared. If they differ, or if the required internals of transformers are missing, transformers renders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, TypeAlias

from rollout_server.edge.tokens.rendering_form import Fields
from rollout_server.edge.tokens.sandbox import ToolJson, remember

Options: TypeAlias = Mapping[str, Any]
"""Arguments of `apply_chat_template` other than the messages. Includes `tools`, excludes `tokenize`."""
_Render: TypeAlias = Callable[[Sequence[Fields], Options, datetime], str]
_Compile: TypeAlias = Callable[[str], Any]
"""Compiles a text to a `jinja2.Template`."""


_MOST = 500
_LONGEST = 200
_CASES: Final = frozenset({"lower", "upper", "title", "capitalize", "casefold", "swapcase"})


@dataclass(frozen=True, slots=True)
class Literals:
    """Literals in the expressions of a template: non-empty strings, and integers of at least 2 in ascending order.

    A template can search messages for these strings, compare the number of messages with these integers, or divide it by the
    `divisors` (see `ShortFormProof`). `any_case`: it changes the case of texts, and so may find strings in other spellings.
    """

    strings: frozenset[str] = frozenset()
    numbers: tuple[int, ...] = ()
    divisors: tuple[int, ...] = ()
    any_case: bool = False


def literals(templates: Iterable[str], environment: Any) -> Literals | None:
    """Return the literals of all templates. None if a template cannot be parsed, or if there are too many to search messages for.

    `environment` is the `jinja2.Environment` that compiles the templates: its extensions decide what can be parsed.
    """
    from jinja2 import TemplateError, nodes

    found: set[object] = set()
    divisors: set[int] = set()
    any_case = False
    try:
        for template in templates:
            tree = environment.parse(template)
            found.update(constant.value for constant in tree.find_all(nodes.Const))
            divisors.update(_divisors(tree))
            any_case |= any(node.name in _CASES for node in tree.find_all(nodes.Filter))
            any_case |= any(node.attr in _CASES for node in tree.find_all(nodes.Getattr))
    except (TemplateError, RecursionError):
        return None
    strings = frozenset(value for value in found if isinstance(value, str) and 0 < len(value) <= _LONGEST)
    numbers = sorted({value for value in found if type(value) is int and value > 1})
    if len(strings) + len(numbers) > _MOST:
        return None
    return Literals(strings, tuple(numbers), tuple(sorted(divisors)), any_case)


def _divisors(tree: Any) -> Iterator[int]:
    """Yield the constants that a template divides by: `%`, the tests `even`, `odd` and `divisibleby`, and `cycle`."""
    from jinja2 import nodes

    operands = [node.right for node in tree.find_all(nodes.Mod)]
    for test in tree.find_all(nodes.Test):
        if test.name in ("even", "odd"):
            yield 2
        elif test.name == "divisibleby":
            operands += test.args
    yield from (
        each.value for each in operands if isinstance(each, nodes.Const) and type(each.value) is int and each.value > 1
    )
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "cycle" and len(call.args) > 1:
            yield len(call.args)


class Templated(Protocol):
    """The part of a transformers tokenizer that renders chat templates."""

    @property
    def special_tokens_map(self) -> Mapping[str, object]:
        """Special tokens by the variable names that templates use, such as `bos_token`."""

    def get_chat_template(self, chat_template: str | None = None, tools: list[Fields] | None = None) -> str:
        """Return the text of the template that is used with these tools."""

    def apply_chat_template(self, conversation: list[Fields], **options: object) -> str:
        """Return the rendered conversation: a text if `tokenize` is False."""


# Templates such as those of gpt-oss and Mistral Small print the current date with `strftime_now(format)`. A rollout needs one date
# for all its turns: otherwise the prompt changes at midnight and every later turn is drift. transformers passes its own
# `strftime_now`, which reads the clock, and converts functions among the template arguments to text. So a macro of that name is put
# in front of the template; it looks dates up in a table. If the table lacks a format, the macro raises an error that names the
# format, and the rendering is repeated with the format added. The empty expression at the end keeps a leading line break of the
# template, which the `-%}` of the macro would strip.
_DATES: Final = "rollout_dates"
_LACKS: Final = "no date yet in the format "
_DATED: Final = (
    "{%- macro strftime_now(format) -%}"
    f"{{%- if format not in {_DATES} -%}}{{{{- raise_exception('{_LACKS}' ~ format) -}}}}{{%- endif -%}}"
    f"{{{{- {_DATES}[format] -}}}}"
    "{%- endmacro -%}{{- '' }}"
)
_MOST_FORMATS: Final = 64


class Templates:
    """Render conversations with the chat template of one tokenizer.

    `text` and `compared` raise whatever the template raises. `date` is the time that the template prints as the current time.
    """

    def __init__(self, tokenizer: Templated) -> None:
        self._tokenizer = tokenizer
        self._formats: tuple[str, ...] = ()
        self._direct = _find(tokenizer, self._by_library)

    @property
    def direct(self) -> bool:
        """True if conversations are rendered without transformers."""
        return self._direct is not None

    def literals(self, templates: Sequence[str]) -> Literals | None:
        """Return the literals in the expressions of these templates. None if they cannot be determined."""
        return None if self._direct is None else self._direct.literals(templates)

    def text(self, messages: Sequence[Fields], options: Options, date: datetime) -> str:
        """Return the conversation as the chat template renders it."""
        # transformers checks `documents` and rejects an empty conversation, so it handles both cases itself.
        if self._direct is None or not messages or "documents" in options:
            return self._by_library(messages, options, date)
        return self._direct.text(messages, options, date)

    def compared(self, messages: Sequence[Fields], options: Options, date: datetime) -> str:
        """Return the text that transformers renders. If the direct rendering differs, disable direct rendering."""
        given = messages, options, date
        if self.direct:
            text, error = _outcome(self._by_library, *given)
            if _outcome(self.text, *given) != (text, error):
                self._direct = None
            if not error:
                return text
        return self._by_library(*given)

    def _by_library(self, messages: Sequence[Fields], options: Options, date: datetime) -> str:
        template = self._tokenizer.get_chat_template(options.get("chat_template"), tools=options.get("tools"))
        if "strftime_now" not in template or "strftime_now" in options:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        dates = {format: date.strftime(format) for format in self._formats}
        dated = {**options, "chat_template": _DATED + template, "tokenize": False, _DATES: dates}
        while True:
            try:
                return self._tokenizer.apply_chat_template(list(messages), **dated)
            except Exception as error:
                before, lacks, format = str(error).partition(_LACKS)
                if before or not lacks or format in dates or len(dates) >= 2 * _MOST_FORMATS:
                    raise
            dates[format] = date.strftime(format)
            self._formats = tuple(dates)[:_MOST_FORMATS]


class _Direct:
    """Pass messages to a compiled template. `given` converts each message to the form that transformers would pass."""

    def __init__(self, tokenizer: Templated, compiles: _Compile, given: Callable[[Fields], Fields]) -> None:
        self._tokenizer = tokenizer
        self._compile = compiles
        self._given = given
        self._always = {"documents": None, **tokenizer.special_tokens_map}
        self._compiled: dict[str, Any] = {}
        self._tojson = ToolJson(compiles("").environment.filters["tojson"])

    def text(self, messages: Sequence[Fields], options: Options, date: datetime) -> str:
        def strftime_now(format: str) -> str:
            return date.strftime(format)

        variables: dict[str, Any] = {
            "strftime_now": strftime_now,
            **self._always,
            **options,
            "messages": [self._given(message) for message in messages],
        }
        template, tools = variables.pop("chat_template", None), variables.get("tools")
        if template is None:
            template = self._tokenizer.get_chat_template(tools=tools)
        self._tojson.add(tools or ())
        return str(self._template(template).render(variables))

    def literals(self, templates: Sequence[str]) -> Literals | None:
        """See `Templates.literals`."""
        return literals(templates, self._compile("").environment)

    def _template(self, text: str) -> Any:
        known = self._compiled.get(text)
        if known is None:
            # An overlay, because transformers may share its environment, and a method and a filter of it are replaced.
            environment = self._compile(text).environment.overlay()
            remember(environment)
            environment.filters = {**environment.filters, "tojson": self._tojson}
            known = self._compiled[text] = environment.from_string(text)
            # Jinja copies the globals for each rendering. Copying a chain of mappings takes longer than rendering a short turn.
            known.globals = dict(known.globals)
        return known


REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may have its reasoning."""
_NAMES_OF_REASONING: Final = frozenset(REASONING)


def _as_it_is(message: Fields) -> Fields:
    return message


def _without_nulls(message: Fields) -> Fields:
    if None not in message.values():
        return message
    return {name: value for name, value in message.items() if value is not None}


def _with_reasoning(message: Fields) -> Fields:
    """Return the message with its reasoning under every key that templates read.

    Some versions of transformers do this, because templates disagree about the key: Qwen3 reads `reasoning_content`, gpt-oss
    `thinking`.
    """
    if _NAMES_OF_REASONING.isdisjoint(message):
        return message
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _with_reasoning_and_without_nulls(message: Fields) -> Fields:
    return _with_reasoning(_without_nulls(message))


_GIVEN: Final = (_with_reasoning_and_without_nulls, _without_nulls, _with_reasoning, _as_it_is)
_CALL: Final[Fields] = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "f", "arguments": {"é<": [1.0, None]}},
}
_SAMPLE: Final[Sequence[Fields]] = (
    {"role": "user", "content": "Hello", "name": None},
    {"role": "assistant", "content": None, "reasoning": "One.", "tool_calls": [_CALL]},
    {"role": "tool", "content": "", "tool_call_id": "a1b2c3d4e"},
    {"role": "assistant", "content": "Two.", "thinking": "Two.", "reasoning_content": None, "tool_calls": None},
    {"role": "user", "content": [{"type": "text", "text": "More", "more": None}]},
    {"role": "assistant", "reasoning_content": "Three.", "thinking": "Four.", "reasoning": "Five.", "content": "Six."},
)
_PARAMETERS: Final[Fields] = {"type": "object", "properties": {"é<": {"type": "array", "default": None}}}
_TOOL: Final[Fields] = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": _PARAMETERS}}
_SHOWN: Final = "{{ [messages, tools, documents, add_generation_prompt] | tojson }}"


def _find(tokenizer: Templated, by_library: _Render) -> _Direct | None:
    """Return a direct renderer whose output equals that of transformers on the sample. None if there is none.

    What transformers does to a message before it renders (drop nulls, copy the reasoning to other keys) depends on its version.
    Each combination is tried, so no version number is checked.
    """
    compiles = _compiler(tokenizer)
    if compiles is None:
        return None
    special = "".join(f"{{{{ {name} }}}}" for name in tokenizer.special_tokens_map)
    options: Options = {"chat_template": _SHOWN + special, "tools": [_TOOL], "add_generation_prompt": True}
    sample = _SAMPLE, options, datetime.min
    expected = _outcome(by_library, *sample)
    if not expected[0]:
        return None
    ways = (_Direct(tokenizer, compiles, given) for given in _GIVEN)
    return next((way for way in ways if _outcome(way.text, *sample) == expected), None)


def _compiler(tokenizer: Templated) -> _Compile | None:
    """Return the function with which transformers compiles templates. None if the tokenizer overrides `apply_chat_template`."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    renders = getattr(tokenizer.apply_chat_template, "__func__", None)
    if renders is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    compiles: _Compile | None = getattr(chat_template_utils, "_compile_jinja_template", None)
    return compiles


def _outcome(render: _Render, messages: Sequence[Fields], options: Options, date: datetime) -> tuple[str, str]:
    """Return the text and "", or "" and the error that was raised."""
    try:
        return render(messages, options, date), ""
    except Exception as error:  # templates are foreign code
        return "", f"{type(error).__name__}: {error}"
