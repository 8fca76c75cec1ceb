"""How a template treats arguments, tools, the date and its own variables, found by rendering."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import Arguments, Fields, with_names
from rollout_server.edge.tokens.tokenizer import ChatTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.conversation import TOOLS
from rollout_server.tokencheck.template import Template

_MARK = "Qx9marked"
_ARGUMENTS = f'{{"query": "{_MARK}"}}'
_TWICE = _ARGUMENTS.replace('"', '\\"')
_USER: Fields = {"role": "user", "content": "Where is it?"}
_ANSWER: Fields = {"role": "assistant", "content": _MARK}
_RESULT: Fields = {"role": "tool", "tool_call_id": "call00001", "content": "Here."}

_NOON = datetime(2024, 1, 2, 12, 0, 0)
_SAME_DAY = datetime(2024, 1, 2, 17, 34, 56)
_ANOTHER_DAY = datetime(2025, 11, 23, 12, 0, 0)

_GIVEN = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("strftime_now", "raise_exception"),
    }
)
"""Variables that transformers passes to every template, besides special tokens, whose names end with `_token` or `_tokens`."""
_TOKEN = re.compile(r"_tokens?\Z")


class ArgumentsTrait(Enum):
    """How a template renders arguments that it receives in one form."""

    VERBATIM = "as they are"
    OWN = "in another spelling"
    TWICE = "encoded twice"
    LEFT_OUT = "left out"
    REFUSED = "refused"


class DateTrait(Enum):
    """The part of the current time that a template prints."""

    NOTHING = "nothing"
    DAY = "the date"
    TIME = "the time of day"


@dataclass(frozen=True, slots=True)
class Traits:
    """The results.

    Args:
        arguments: how arguments are rendered, by the form in which they are passed.
        tools_shown: the prompt contains the tools.
        empty_tools_differ: an empty list of tools is rendered differently from None.
        dated: the part of the current time that the template prints.
        closed: a special token closes the last completion, so the next message is not needed to close it.
        opening: special tokens that begin every message, including completions.
        switches: template variables that the template reads and that a request can set.
    """

    arguments: Mapping[Arguments, ArgumentsTrait]
    tools_shown: bool
    empty_tools_differ: bool
    dated: DateTrait
    closed: bool
    opening: frozenset[str]
    switches: tuple[str, ...]

    @property
    def natural(self) -> Arguments:
        """The form in which arguments are spelled as models write them."""
        order = (
            ArgumentsTrait.VERBATIM,
            ArgumentsTrait.OWN,
            ArgumentsTrait.TWICE,
            ArgumentsTrait.LEFT_OUT,
            ArgumentsTrait.REFUSED,
        )
        return min((Arguments.RECEIVED, Arguments.PARSED), key=lambda form: order.index(self.arguments[form]))


def find_traits(template: Template, tokenizer: ChatTokenizer) -> Traits:
    """Return the traits, found by rendering a few short conversations. Refusals of the template are not raised."""
    bare, empty = (_render(template, [_USER], tools) for tools in (None, ()))
    tooled = _render(template, [_USER], TOOLS)
    unopened = _render(template, [_USER], None, generation_prompt=False)
    history = _render(template, [_USER, _ANSWER], None, generation_prompt=False) or ""
    prompt = (bare or "")[common_prefix(bare or "", unopened or "") :]
    first = (bare or "").partition(str(_USER["content"]))[0]
    return Traits(
        {form: _arguments_trait(template, form) for form in Arguments},
        tools_shown=tooled is not None and "Finds places" in tooled,
        empty_tools_differ=bare != empty,
        dated=_date_trait(template),
        closed=any(text in history.rpartition(_MARK)[2] for text in template.special),
        opening=frozenset(text for text in template.special if text in prompt and text in first),
        switches=_switches(tokenizer),
    )


def _render(
    template: Template, messages: list[Fields], tools: tuple[Fields, ...] | None, *, generation_prompt: bool = True
) -> str | None:
    frame = replace(template.frame, tools=tools)
    try:
        return template.loaded.text(messages, frame, generation_prompt=generation_prompt)
    except RolloutFailed:
        return None


def _arguments_trait(template: Template, form: Arguments) -> ArgumentsTrait:
    arguments: JSON = _ARGUMENTS if form is Arguments.RECEIVED else {"query": _MARK}
    call: JSON = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": arguments}}
    messages: list[Fields] = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, _RESULT]
    if template.loaded.probed.needs_names:
        messages = list(with_names(messages))
    text = _render(template, messages, TOOLS)
    if text is None:
        return ArgumentsTrait.REFUSED
    found = ((ArgumentsTrait.TWICE, _TWICE), (ArgumentsTrait.VERBATIM, _ARGUMENTS), (ArgumentsTrait.OWN, _MARK))
    return next((trait for trait, sought in found if sought in text), ArgumentsTrait.LEFT_OUT)


def _date_trait(template: Template) -> DateTrait:
    def at(moment: datetime) -> set[str | None]:
        dated = replace(template, frame=replace(template.frame, date=moment))
        return {_render(dated, [_USER], tools) for tools in (None, TOOLS)}

    if at(_NOON) != at(_SAME_DAY):
        return DateTrait.TIME
    return DateTrait.DAY if at(_NOON) != at(_ANOTHER_DAY) else DateTrait.NOTHING


def _switches(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    """Return the variables that the template reads and does not set, or whose definition it tests.

    The `generation` tags of transformers are removed, because plain Jinja cannot parse them; they declare no variables.
    """
    from jinja2 import Environment, TemplateError, meta, nodes

    try:
        text = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", tokenizer.get_chat_template(tools=list(TOOLS)))
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)  # noqa: S701 - it is not rendered
        read = {name for name in meta.find_undeclared_variables(tree) - _GIVEN if not _TOKEN.search(name)}
    except (TemplateError, ValueError):
        return ()
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    tested = {
        test.node.name
        for test in tree.find_all(nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
    }
    return tuple(sorted(name for name in read if name not in stored or name in tested))
