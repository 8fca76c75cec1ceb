"""Direct rendering equals transformers' rendering: the template's inputs, its permissions and its refusals."""

import copy
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Undefined
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, unsafe
from rollout_server.edge.tokens.chat_template import Templates
from rollout_server.edge.tokens.sandbox import remember
from rollout_server.edge.tokens.tokenizer import Frame
from rollout_server.runtime.errors import RolloutFailed

from tests.edge.tokens.conftest import TOOLS, call
from tests.support.tokenizers import FAMILIES, REAL_TOKENIZERS, needs_real

ASKED: dict[str, Any] = {"role": "user", "content": "What is 5 + 3?"}
DATE = datetime(2026, 2, 3, 4, 5, 6, 7)
SAID: dict[str, Any] = {"role": "assistant", "content": "Eight."}
SHOWN = "{{ [messages, tools, documents, add_generation_prompt] | tojson }}{{ bos_token }}{{ eos_token }}{{ more }}"
NAMES = ("name", "content", "tool_calls", "reasoning", "thinking", "reasoning_content", "items", "é")
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
MESSAGES: Any = st.lists(
    st.builds(
        lambda role, fields: {"role": role, **fields},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.dictionaries(st.sampled_from(NAMES), VALUES | st.just([call({"a": None})]), max_size=4),
    ),
    max_size=4,
)
SOME = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcome(render: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    try:
        return render(*arguments, **options), ""
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def same(tokenizer: Any, templates: Templates, messages: list[Any], **options: Any) -> None:
    kept = copy.deepcopy(messages)
    expected = outcome(tokenizer.apply_chat_template, messages, tokenize=False, **options)
    for _ in range(2):  # the second pass uses what the first one cached
        assert outcome(templates.text, messages, options, datetime.now()) == expected
    assert str(messages) == str(kept)


@pytest.mark.parametrize("family", FAMILIES)
@SOME
@given(data=st.data())
def test_any_conversation(plain, family, data) -> None:
    tokenizer = plain(family).tokenizer
    templates = Templates(tokenizer)
    assert templates.direct
    options = {
        "tools": data.draw(st.sampled_from([None, TOOLS, []])),
        "add_generation_prompt": data.draw(st.booleans()),
    }
    messages = data.draw(MESSAGES)
    same(tokenizer, templates, [ASKED, *messages], more=data.draw(VALUES), chat_template=SHOWN, **options)
    for conversation in (messages, [ASKED, *messages]):
        same(tokenizer, templates, conversation, **options)


FURTHER = sorted(REAL_TOKENIZERS.glob("*/templates/*.jinja"))


@pytest.mark.parametrize(
    "path", FURTHER or [pytest.param(None, marks=needs_real(""))], ids=lambda path: path and path.stem
)
def test_further_templates(plain, path) -> None:
    tokenizer = plain("toy").tokenizer
    templates = Templates(tokenizer)
    template = path.read_text(encoding="utf-8")
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call({"a": 5, "b": [True, None]})],
        "thinking": "So.",
    }
    heard = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "add", "content": '{"é": "<8>"}'}
    for messages in ([ASKED], [ASKED, SAID, ASKED], [ASKED, called, heard], [ASKED, called, heard, SAID, ASKED]):
        for tools in (None, TOOLS):
            same(tokenizer, templates, messages, tools=tools, chat_template=template)


def test_what_the_library_sees_to_itself(plain) -> None:
    tokenizer = plain("toy").tokenizer
    templates = Templates(tokenizer)
    for options in ({"documents": [{"title": "T", "text": "Text."}]}, {"documents": ["no document"]}):
        same(tokenizer, templates, [ASKED], tools=None, chat_template=SHOWN, **options)
    same(tokenizer, templates, [], tools=None)
    generation = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    same(tokenizer, templates, [ASKED, SAID], tools=None, chat_template=generation)
    same(tokenizer, templates, [ASKED], tools=None, chat_template="{% for %}")


def own(tokenizer: Any, **changes: Any) -> Any:
    """A copy of a tokenizer with overridden methods."""
    made = copy.copy(tokenizer)
    made.__class__ = type("Own", (type(tokenizer),), changes)
    return made


def test_a_tokenizer_that_renders_in_a_way_of_its_own_is_left_to_it(plain) -> None:
    tokenizer = plain("toy").tokenizer
    shouts = own(tokenizer, apply_chat_template=lambda *arguments, **options: "HELLO")
    calm = own(tokenizer)
    calm.apply_chat_template = lambda *arguments, **options: "hello"
    for rendering, text in ((shouts, "HELLO"), (calm, "hello")):
        templates = Templates(rendering)
        assert not templates.direct
        assert templates.text([ASKED], {"tools": None}, DATE) == text
    assert Templates(own(tokenizer)).direct


def test_a_tokenizer_that_shows_templates_more_is_left_to_the_library(plain) -> None:
    """Its special tokens differ on each call, so no shortcut around the library is valid."""
    seen = iter(range(1000))
    tokenizer = own(plain("toy").tokenizer, special_tokens_map=property(lambda _: {"eos_token": f"<{next(seen)}>"}))
    assert not Templates(tokenizer).direct


def test_a_tokenizer_whose_tokens_have_names_that_no_template_could_say_is_left_to_the_library(plain) -> None:
    tokenizer = own(plain("toy").tokenizer, special_tokens_map=property(lambda _: {"not a name": "<a>"}))
    templates = Templates(tokenizer)
    assert not templates.direct
    assert (
        templates.text([ASKED], {"tools": None, "chat_template": "{{ messages[0].content }}"}, DATE) == "What is 5 + 3?"
    )


def test_a_comparison_asks_transformers_once(plain) -> None:
    rendered = []

    class Counted(type(plain("toy").tokenizer)):
        def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
            rendered.append(options)
            return super().apply_chat_template(*arguments, **options)

    tokenizer = own(plain("toy").tokenizer)
    templates, options = Templates(tokenizer), {"tools": None, "chat_template": "{{ messages[0].content }}"}
    tokenizer.__class__ = Counted
    assert templates.compared([ASKED], options, DATE) == "What is 5 + 3?"
    assert len(rendered) == 1


def test_the_direct_way_is_given_up_once_it_comes_to_something_else(plain) -> None:
    tokens = {"eos_token": "<a>"}
    tokenizer = own(plain("toy").tokenizer, special_tokens_map=property(lambda _: tokens))
    templates, options = Templates(tokenizer), {"tools": None, "chat_template": "{{ messages[0].content ~ eos_token }}"}
    assert templates.compared([ASKED], options, DATE) == templates.text([ASKED], options, DATE) == "What is 5 + 3?<a>"
    assert templates.direct
    tokens["eos_token"] = "<b>"
    assert templates.compared([ASKED], options, DATE) == "What is 5 + 3?<b>"
    assert not templates.direct
    assert templates.text([ASKED], options, DATE) == "What is 5 + 3?<b>"


def test_a_template_is_looked_at_when_its_tokenizer_is_loaded_and_when_it_is_switched(ours) -> None:
    """A template that refuses some of the probe's conversations is still rendered directly."""
    loaded = ours(
        "toy", "{{ messages | map(attribute='content') | join('\n') }}{{ 1 // (messages | length - 3) if bad }}"
    )
    assert loaded.text([ASKED, SAID], Frame()) == "What is 5 + 3?\nEight."
    switched = loaded.switched({"bad": True})
    assert switched.text([ASKED, SAID], Frame(template_kwargs={"bad": True})) == "What is 5 + 3?\nEight.-1"
    with pytest.raises(RolloutFailed, match="integer division or modulo by zero"):
        switched.text([ASKED, SAID, ASKED], Frame(template_kwargs={"bad": True}))


class Other:
    content = "seen"
    _hidden = "not seen"


EXPRESSIONS = (
    *(
        "d.a",
        "d.nothing",
        "d.nothing.more",
        "d.items",
        "d.items() | list",
        "d.get('a')",
        "d.mro",
        "d.__class__",
        "d._a",
    ),
    *("d.update(a=1)", "d.pop('a')", "d.setdefault('b', 2)", "d.keys", "d['keys']", "l.append(1)", "l.index(2)", "l.a"),
    *(
        "l.mro",
        "l.sort()",
        "s.upper()",
        "s.a",
        "s.startswith('{')",
        "s.format",
        "s.format(5)",
        "s.format_map({})",
        "t.a",
    ),
    *(
        "s.join",
        "s.__class__",
        "'{0.__class__}'.format(s)",
        "'{0.a}{0.b}'.format(d)",
        "n.a",
        "o.content",
        "o._hidden",
        "i.a",
    ),
    *(
        "o.nothing",
        "f.__code__",
        "k.mro",
        "none.a",
        "missing.a",
        "missing",
        "i.real",
        "d.a.b",
        "t.count(1)",
        "d.e.upper()",
    ),
)
LOOPS = (
    "{% for x in l %}{{ loop.index0 }}{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.last }}{% endfor %}",
    "{% for x in l %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }}{{ loop.nothing }}{{ loop.length }}{% endfor %}",
    "{% for x in l %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in l %}{{ loop._iterable }}{% endfor %}",
    "{% set ns = namespace(a=1) %}{{ ns.a }}{% set ns.a = 'text' %}{{ ns.a }}{{ ns.nothing }}{{ ns.b is defined }}",
    "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(5) }}",
    "{% set ns = namespace(a=d) %}{{ ns.a.a }}{{ ns.a.update(a=2) }}",
    "{% set ns = namespace() %}{{ ns.__class__ }}",
    "{% set ns = namespace(_a=1) %}{{ ns._a }}",
    "{% macro m(a) %}{{ a.upper() }}{% endmacro %}{{ m.name }}{{ m(s) }}{{ m.__call__ }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{% for x in l %}{{ m(x) }}{{ m(x, 3, 4, c=5) }}{% endfor %}",
    "{% macro m() %}{{ caller('c') }}{% endmacro %}"
    "{% for x in l %}{% call(c) m() %}{{ x }}{{ c }}{% endcall %}{% endfor %}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=1) }}",
    "{% macro m(a) %}{{ a.nothing.more }}{% endmacro %}{{ m(d) }}",
    "{% for x in l %}{{ s.replace('0', x | string) }}{{ d.get('b', x) }}{{ l.count(x) }}{% endfor %}",
    "{{ s.upper(1) }}",
    "{{ s.join(l) }}",
    "{{ u() }}",
    "{{ [u] | map('string') | first is string }}{% for x in l %}{{ u() }}{% endfor %}",
    "{% set d.a = 5 %}",
    "{{ [d, {'a': {'b': 2}}] | map(attribute='a') | list }}{{ d | attr('a') }}{{ s | attr('format') }}",
    "{{ [d, {'a': {'b': 2}}, {}, l, s] | map('attr', 'a') | list }}",
)


@unsafe  # type: ignore[no-untyped-call]
def not_for_templates() -> str:
    return "called"


def values() -> dict[str, Any]:
    data: dict[str, Any] = {"a": {"b": 1}, "keys": "own", "mro": "key", "_a": "key", "e": "é"}
    further = {
        "s": "{0}",
        "o": Other(),
        "f": values,
        "k": Other,
        "none": None,
        "i": 5,
        "t": (1, 2),
        "u": not_for_templates,
    }
    return {"d": data, "l": [1, 2], "n": {"a": None}, **further}


def sandboxes() -> tuple[Any, Any]:
    made = [ImmutableSandboxedEnvironment(extensions=[loopcontrols]) for _ in range(2)]
    remember(made[0])
    return made[0], made[1]


def told(environment: Any, text: str) -> tuple[str, str]:
    """The output of a template, without memory addresses of functions."""
    text, error = outcome(lambda: environment.from_string(text).render(values()))
    return text.partition(" at 0x")[0], error


def test_a_sandbox_that_remembers_decides_as_one_that_does_not() -> None:
    remembering, plain = sandboxes()
    templates = [*(f"{{{{ {expression} }}}}" for expression in EXPRESSIONS), *LOOPS]
    expected = [told(plain, template) for template in templates]
    assert any("is unsafe" in error for _, error in expected)
    for _ in range(3):
        assert [told(remembering, template) for template in templates] == expected
    assert [told(remembering, template) for template in reversed(templates)] == expected[::-1]


def test_what_a_sandbox_was_asked_once_it_is_not_asked_again() -> None:
    environment: Any = ImmutableSandboxedEnvironment()
    ask, asked = environment.getattr, list[str]()

    def noted(value: Any, name: str) -> Any:
        asked.append(name)
        return ask(value, name)

    environment.getattr = noted
    remember(environment)
    template = environment.from_string(
        "{% set ns = namespace(a=1, o=o) %}{% for x in l %}{{ loop.first }}{{ loop.cycle('a') }}{% endfor %}"
        "{{ d.a }}{{ d.nothing }}{{ d.get('a') }}{{ s.upper() }}{{ l.index(1) }}{{ ns.a }}{{ ns.o.content }}{{ s.format(5) }}"
    )
    first = template.render(values())
    always = ["cycle", "cycle", "o", "content", "format"]
    assert sorted(asked) == sorted([*always, "first", "a", "nothing", "get", "upper", "index", "a"])
    asked.clear()
    assert template.render(values()) == first
    assert asked == always


def test_macros_and_methods_of_texts_are_called_without_asking() -> None:
    environment: Any = ImmutableSandboxedEnvironment()
    ask, asked = environment.call, list[str]()

    def noted(context: Any, target: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(getattr(target, "__name__", repr(target)))
        return ask(context, target, *arguments, **named)

    environment.call = noted
    remember(environment)
    template = environment.from_string(
        "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1) }}{{ s.upper() }}{{ d.get('b') }}{{ l.index(1) }}"
        "{{ f() }}{{ t.count(1) }}{{ s.format(5) }}{% for x in l %}{{ loop.cycle(1) }}{% endfor %}"
    )
    assert template.render(values() | {"f": lambda: "g"}) == "1{0}None0g1511"
    assert asked == ["<lambda>", "count", "format", "cycle", "cycle"]


def test_what_one_type_may_show_another_may_not() -> None:
    """`pop` of a dictionary changes it; other types have a text, their own method, or nothing under this name."""

    class Sly(dict[str, Any]):
        pass

    class Text(str):
        pop = "harmless"

    remembering, _ = sandboxes()
    template = remembering.from_string("{{ x.pop }}")
    for _ in range(2):
        assert template.render(x=Text()) == "harmless"
        assert template.render(x="text") == template.render(x=5) == ""
        for changing in ({"pop": "key"}, [1], Sly(), {1}):
            assert "unsafe" in str(remembering.getattr(changing, "pop")._undefined_message)
            with pytest.raises(SecurityError, match="unsafe"):
                remembering.from_string("{{ x.pop() }}").render(x=changing)
        sub = Sly(a=1)
        sub.held = "field"  # type: ignore[attr-defined]
        assert remembering.from_string("{{ x.a }}{{ x.held }}").render(x=sub) == "1field"
        assert remembering.from_string("{{ x.a }}{{ x.held }}").render(x={"a": 1}) == "1"


def test_what_is_not_there_is_told_by_name() -> None:
    remembering, _ = sandboxes()
    for _ in range(3):
        missing = remembering.getattr({"a": 1}, "b")
        assert type(missing) is Undefined
        with pytest.raises(UndefinedError, match="'dict object' has no attribute 'b'"):
            str(missing + 1)


def test_a_sandbox_remembers_so_many_names_and_no_more() -> None:
    """Names may come from callers, if a template formats what they write."""
    remembering, plain = sandboxes()
    template, data = (
        remembering.from_string("{{ t.format(d) }}"),
        {f"n{number}": number for number in range(0, 3000, 2)},
    )
    for number in range(3000):
        shown = "" if number % 2 else str(number)
        assert template.render(t=f"{{0.n{number}}}{{0.nothing}}", d=data) == shown
    known = next(cell.cell_contents for cell in remembering.getattr.__closure__ if type(cell.cell_contents) is dict)
    assert len(known) == 1000
    assert told(remembering, "{{ d.a }}{{ d.update }}") == told(plain, "{{ d.a }}{{ d.update }}")


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("getattr", "getattr"), ("is_safe_attribute", "getattr"), ("call", "call"), ("is_safe_callable", "call")],
)
def test_what_a_sandbox_of_another_kind_decides_is_left_to_it(name: str, keeps: str) -> None:
    def refused(*arguments: Any) -> Any:
        return False

    stricter = type("Stricter", (ImmutableSandboxedEnvironment,), {name: refused})()
    remember(stricter)
    assert {"getattr", "call"} - vars(stricter).keys() == {keeps}
    shown, error = told(stricter, "{{ d.get }}" if keeps == "getattr" else "{{ s.upper() }}")
    assert shown in ("", "False") or "not safely callable" in error


WHOLE = (
    "%a %A %w %d %b %B %m %y %Y %H %I %p %M %S %f %z %Z %j %U %W %c %x %X %% %G %u %V %C %D %e %F %g %h %k %l %n %P %r %R %s",
    "%t %T %-d %_d %^a %#Z %0e %10Y %-10Y %_5m %Ey %EY %Ec %Od %OH %+ %E %O %! %q %\N{SNOWMAN} %%Y %%%d %",
    "%-d%-d %5%Y '%d' \" \\n {{ x }}",
    "",
)
FORMATS: Any = st.lists(
    st.text("%-_0^#EO5", max_size=3).map("%".__add__) | st.sampled_from([chr(code) for code in range(32, 127)]),
    max_size=12,
).map("".join)


#: With documents the library renders, as for tokenizers with overridden methods.
LIBRARY: dict[str, Any] = {"documents": [{"title": "T", "text": "Text."}]}


def dated(templates: Templates, formats: list[str], date: datetime) -> None:
    """Compare a template's output with the library's own `strftime_now` at this date."""
    template = "{% for f in more %}{{- strftime_now(f) ~ '|' ~ strftime_now(format=f) ~ '|' -}}{% endfor %}"
    options: dict[str, Any] = {"tools": None, "chat_template": template, "more": formats}
    try:
        expected = "".join(f"{date.strftime(each)}|" * 2 for each in formats), ""
    except ValueError as error:
        expected = "", f"ValueError: {error}"
    assert outcome(templates.text, [ASKED], options, date) == expected
    assert outcome(templates.text, [ASKED], options | LIBRARY, date) == expected
    assert outcome(templates.compared, [ASKED], options, date) == expected
    assert templates.direct


@pytest.mark.parametrize("formats", WHOLE)
def test_dates_are_formatted_as_the_library_does(plain, formats) -> None:
    for date in (DATE, datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999), datetime(2024, 2, 29)):
        dated(Templates(plain("toy").tokenizer), [formats, *formats.split()], date)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(formats=st.lists(FORMATS | st.text(max_size=5), max_size=3), date=st.datetimes())
def test_dates_in_any_format(plain, formats, date) -> None:
    dated(Templates(plain("toy").tokenizer), formats, date)


@pytest.mark.parametrize("way", [{}, LIBRARY], ids=["direct", "library"])
def test_a_format_that_only_the_conversation_decides(plain, way) -> None:
    """Each rollout may use other formats; those of one do not count against the next."""
    templates = Templates(plain("toy").tokenizer)
    for start in range(0, 300, 50):
        formats = [f"%Y {number}" for number in range(start, start + 50)]
        template = "{% for f in more %}{{ strftime_now(f) ~ '\n' }}{% endfor %}"
        text = templates.text([ASKED], {"tools": None, "chat_template": template, "more": formats} | way, DATE)
        assert text.splitlines() == [f"2026 {each[3:]}" for each in formats]


@pytest.mark.parametrize("way", [{}, LIBRARY], ids=["direct", "library"])
def test_what_a_template_may_do_with_its_clock(plain, way) -> None:
    tokenizer = plain("toy").tokenizer
    templates = Templates(tokenizer)

    def text(template: str, **more: Any) -> tuple[str, str]:
        return outcome(templates.text, [ASKED], {"tools": None, "chat_template": template, **more, **way}, DATE)

    assert text("\n{{ strftime_now is defined }} {{ strftime_now('%Y') | int + 1 }}") == ("\nTrue 2027", "")
    assert text("{% macro strftime_now(f) %}mine{% endmacro %}{{ strftime_now('%Y') }}") == ("mine", "")
    assert text("{{ strftime_now }}", strftime_now="a switch of that name") == ("a switch of that name", "")
    assert text("{% if strftime_now is defined %}{{ raise_exception('Not ' ~ strftime_now('%Y')) }}{% endif %}") == (
        "",
        "TemplateError: Not 2026",
    )
    assert text("{{ strftime_now(5) }}")[1]
    assert text("{{ strftime_now.__globals__ }}") == ("", "")
