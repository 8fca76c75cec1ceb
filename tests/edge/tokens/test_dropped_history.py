"""Templates whose prompt depends on messages that the short form drops: token mode never uses a short form that is wrong."""

from typing import Any

import pytest
from rollout_server.edge.tokens.renderer import Renderer

from tests.edge.tokens.conftest import TOOLS, answered, call, packed

ASKED = {"role": "user", "content": "What is 5 + 3?"}
BODY = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') ~ '<|im_end|>\n' -}}"
    "{%- endfor -%}"
)
PROMPT = (
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}"
    "{%- if CONDITION -%}{{- ' again' -}}{%- endif -%}{{- '\n' -}}{%- endif -%}"
)
COUNTER = (
    "{%- set ns = namespace(n=0) -%}{%- for message in messages -%}{%- if COUNTED -%}{%- set ns.n = ns.n + AMOUNT -%}"
    "{%- endif -%}{%- endfor -%}"
)
TEXTS = "(messages | map(attribute='content') | join)"


def counter(condition: str, counted: str, amount: str = "1") -> str:
    return BODY + COUNTER.replace("COUNTED", counted).replace("AMOUNT", amount) + prompt(condition)


def prompt(condition: str) -> str:
    return PROMPT.replace("CONDITION", condition)


TEMPLATES = {
    "results": BODY + prompt("messages | selectattr('role', 'equalto', 'tool') | list | length > 5"),
    "results by a counter": counter("ns.n > 5", "message.role == 'tool'"),
    "results, equal": counter("ns.n == 7", "message.role == 'tool'"),
    "results, one less": counter("ns.n - 1 >= 9", "message.role == 'tool'"),
    "many results": counter("ns.n > 40", "message.role == 'tool'"),
    "many results, one less": counter("ns.n + 1 > 40", "message.role == 'tool'"),
    "many calls": counter("ns.n >= 40", "message.tool_calls", "message.tool_calls | length"),
    "questions": counter("ns.n > 2", "message.role == 'user'"),
    "calls": counter("ns.n > 9", "message.tool_calls", "message.tool_calls | length"),
    "characters": BODY + prompt(f"{TEXTS} | length > 300"),
    "characters of results": counter("ns.n > 90", "message.role == 'tool'", "message.content | length"),
    "characters of questions": counter("ns.n > 60", "message.role == 'user'", "message.content | length"),
    "one long result": counter("ns.n > 0", "message.role == 'tool' and message.content | length > 60"),
    "a very long result": counter("ns.n > 0", "message.role == 'tool' and message.content | length > 6000"),
    "long results": counter("ns.n > 3", "message.role == 'tool' and message.content | length > 10"),
    "a word": BODY + prompt(f"'error' in {TEXTS}"),
    "a word in any case": BODY + prompt(f"'error' in ({TEXTS} | lower)"),
    "a word in capitals": BODY + prompt(f"'ERROR' in {TEXTS}.upper()"),
    "a word, then in one case": BODY + prompt(f"'error' in {TEXTS} and '#' in {TEXTS} | upper"),
    "results with a word": counter("ns.n > 3", "message.role == 'tool' and 'error' in message.content"),
    "results with a word, of a kind": counter("ns.n >= 2", "message.content.startswith('error')"),
}


def turns(style: str) -> list[list[dict[str, Any]]]:
    """Completions and what follows them. Rare contents appear late, or never in a plain rollout."""
    found: list[list[dict[str, Any]]] = []
    shift, plain = STYLES[style], style == "plain"
    rare = {4: "ERROR: 8", 8: "error: 9", 9: "x" * 70, 11: "an error", 13: "y" * 7000}
    for number in range(44 if plain else 24):
        ids = [f"c{number:04}{index:04}" for index in range(1 + (number % 7 == 5 and not plain))]
        calls = {"role": "assistant", "content": "", "tool_calls": [call("{}", call_id=each) for each in ids]}
        text = "8" * 8 if plain else rare.get((number + shift) % 16, "8" * 8)
        found.append([calls, *({"role": "tool", "tool_call_id": each, "content": text} for each in ids)])
        if number % 6 == 5 and not plain:
            found.append([{"role": "assistant", "content": "Eight."}, {"role": "user", "content": f"And {number}?"}])
    return found


STYLES = {"plain": 0, "rare first": 0, "rare late": 5, "rare again": 9}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_the_short_form_is_dropped_before_it_is_wrong(ours, plain, name, style) -> None:
    loaded, stop = ours("toy", TEMPLATES[name]), plain("toy").ids("<|im_end|>")
    assert loaded.literals is not None
    renderer, messages = Renderer(loaded, TOOLS, {}), packed(ASKED)
    await renderer.append(messages, None, 0)
    for number, (completion, *following) in enumerate(turns(style), 1):
        asked = len(messages)
        messages = [*messages, *packed(completion, *following)]
        last = answered(completion, stop)
        expected = (await Renderer(loaded, TOOLS, {}).predict(messages, last, asked)).predicted
        assert (await renderer.append(messages, last, asked)).predicted == expected, f"turn {number}"
