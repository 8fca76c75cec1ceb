"""One script for each situation in which the synchronous HTTP API calls a trainer, correct and faulty ones.

A scenario defines the trainer: its script and its settings. The test chooses the parameters of the rollout (``max_turns``, a time
limit, a key).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rollout_server.testing.script import Fault, FaultKind, Line, Script, ScriptedReply, tool_call

CALLBACK_KEY: Final = "callback-key-0001"
_NEVER_STOPS: Final = 100
_ANSWERED_ADD: Final = "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A script and the trainer's settings that it needs.

    `other_tokenizer`: the trainer must use another vocabulary than the request names, for example one made by
    ``rollout_server.testing.tokenizer.build.build(directory, trained_tokens=256)``.
    """

    script: Script
    api_key: str | None = None
    render_tools: bool = True
    other_tokenizer: bool = False


def _says(content: str | None, *calls: Mapping[str, object]) -> ScriptedReply:
    return ScriptedReply(content=content, tool_calls=calls)


def _add(arguments: str | Mapping[str, object] = '{"a": 5, "b": 3}') -> ScriptedReply:
    return _says("Adding.", tool_call("call_1", "add", arguments))


def _scenario(*lines: Line) -> Scenario:
    return Scenario(Script(lines))


_FIRST: Final = _says("I'll calculate that for you.", tool_call("call_1", "add", '{"a": 5, "b": 3}'))
_SECOND: Final = _says("Continuing the calculation.", tool_call("call_2", "multiply", '{"a": 8, "b": 2}'))
_LAST: Final = _says("5 plus 3 equals 8. Multiplying 8 by 2 gives 16.")
_EIGHT: Final = _says("8")
_WALKED_THROUGH: Final = Script((_FIRST, _SECOND, _LAST))
_AGAIN: Final = Script(
    tuple(_says("Again.", tool_call(f"call_again_{i}", "add", '{"a": 1, "b": 1}')) for i in range(_NEVER_STOPS))
)
_PLAIN: Final = _scenario(_says("Hello! No tools needed."))
_WITHOUT_IDS: Final = frozenset({"token_ids"})

_TOOLS: Final[Mapping[str, Scenario]] = {
    "add_then_multiply": Scenario(_WALKED_THROUGH),
    "arguments_not_an_object": _scenario(
        _says("Trying.", tool_call("call_1", "add", "[5, 3]")), _says("That did not work.")
    ),
    "bad_json_arguments": _scenario(
        _says("Oops.", tool_call("call_1", "add", '{"a": 5, "b": ')), _says("The arguments were not valid.")
    ),
    "dict_arguments": _scenario(_add({"a": 5, "b": 3}), _EIGHT),
    "division_by_zero": _scenario(
        _says("Dividing.", tool_call("call_1", "divide", '{"a": 1, "b": 0}')), _says("Cannot divide by zero.")
    ),
    "number_formats": _scenario(
        _says(
            "Many.",
            tool_call("call_1", "divide", '{"a": 8, "b": 2}'),
            tool_call("call_2", "add", '{"a": 0.1, "b": 0.2}'),
            tool_call("call_3", "multiply", '{"a": 2.5, "b": 4}'),
            tool_call("call_4", "subtract", '{"a": 3, "b": 10}'),
            tool_call("call_5", "multiply", '{"a": 1000000000000, "b": 1000000000000}'),
            tool_call("call_6", "divide", '{"a": 1, "b": 3}'),
            tool_call("call_7", "add", '{"a": 1e300, "b": 1}'),
            tool_call("call_8", "multiply", '{"a": 0.33333, "b": 0.33333}'),
        ),
        _says("Done."),
    ),
    "parallel_calls": _scenario(
        _says(
            "Several at once.",
            tool_call("call_1", "add", '{"a": 0, "b": 0}'),
            tool_call("call_2", "multiply", '{"a": 10, "b": 1}'),
            tool_call("call_3", "subtract", '{"a": 20, "b": 2}'),
            tool_call("call_4", "divide", '{"a": 30, "b": 4}'),
        ),
        _says("All done."),
    ),
    "string_operands": _scenario(_add('{"a": "5", "b": "3"}'), _says("Strange.")),
    "string_vs_compact_arguments": _scenario(
        _says("Compact.", tool_call("call_1", "add", '{"a":5,"b":3}')),
        _says("Spaced.", tool_call("call_2", "multiply", '{ "b" : 2 ,  "a" : 8 }')),
        _says("Object.", tool_call("call_3", "subtract", {"b": 6, "a": 16})),
        _says("10"),
    ),
    "three_turns_mixed_content": _scenario(
        ScriptedReply(
            tool_calls=(tool_call("call_1", "add", '{"a": 5, "b": 3}'),),
            reasoning="Add first …",
            extra={"annotations": []},
        ),
        ScriptedReply(
            content="",
            tool_calls=(tool_call("call_ü", "multiply", '{"a": 8, "b": 2}'),),
            extra={"vendor_score": 0.5},
        ),
        ScriptedReply(content="ответ: 16 ✅ \\n \\u0041 </tool_call>", extra={"name": "calcé"}),
    ),
    "tool_call_extra_keys": _scenario(
        _says(
            "Adding.",
            {
                "id": "call_1",
                "type": "function",
                "index": 0,
                "function": {"name": "add", "arguments": '{"a": 5, "b": 3}', "vendor": "x"},
            },
        ),
        _EIGHT,
    ),
    "unknown_tool": _scenario(
        _says("Trying.", tool_call("call_1", "integrate", '{"x": 1}')), _says("That tool does not exist.")
    ),
    "wrong_arguments": _scenario(
        _says(
            "Trying.",
            tool_call("call_1", "add", '{"x": 1}'),
            tool_call("call_2", "add", '{"a": 1}'),
            tool_call("call_3", "add", '{"a": 1, "b": 2, "c": 3}'),
            tool_call("call_4", "add", '{"a": 1, "b": 2}'),
        ),
        _says("Only the last one worked."),
    ),
}

_LOOP: Final[Mapping[str, Scenario]] = {
    "callback_api_key": Scenario(_WALKED_THROUGH, api_key=CALLBACK_KEY),
    "callback_api_key_wrong": Scenario(_WALKED_THROUGH, api_key=CALLBACK_KEY),
    "debug_trace": Scenario(_WALKED_THROUGH),
    "debug_trace_error": _scenario(_FIRST, Fault.error(500, "engine died")),
    "finish_reason_ignored": _scenario(
        ScriptedReply(content="Adding.", tool_calls=_add().tool_calls, finish_reason="length"),
        ScriptedReply(content="8", finish_reason="tool_calls"),
    ),
    "mask_negative": _scenario(ScriptedReply(content="Adding.", tool_calls=_add().tool_calls, surplus=(0,) * 60)),
    "mask_nothing_new": _scenario(
        ScriptedReply(content="Adding.", tool_calls=_add().tool_calls, surplus=_ANSWERED_ADD), _EIGHT
    ),
    "mask_token_ids_surplus": _scenario(
        ScriptedReply(content="Adding.", tool_calls=_add().tool_calls, surplus=(0, 1, 2)), _EIGHT
    ),
    "max_tokens_total": Scenario(_AGAIN),
    "max_tokens_total_exact": _PLAIN,
    "max_turns": Scenario(_AGAIN),
    "plain_answer": _PLAIN,
    "rollout_timeout": _scenario(Fault(kind=FaultKind.SILENCE)),
    "same_id_again": _scenario(_says("Hello!"), _says("Hello again!")),
    "sampling_params_passed_on": _scenario(_says("Hi.")),
    "unknown_top_level_fields": _scenario(_says("Hi.")),
}

_FAULTS: Final[Mapping[str, Scenario]] = {
    "trainer_401": _scenario(Fault.error(401, "Invalid or missing API key")),
    "trainer_422": _scenario(_FIRST, Fault.error(422, "response_mask has length 17, 18 tokens are new")),
    "trainer_422_other_tokenizer": Scenario(
        Script((_says(None, tool_call("call_1", "x", "{}")), _says("That tool does not exist."))), other_tokenizer=True
    ),
    "trainer_429": _scenario(Fault.error(429, "slow down")),
    "trainer_429_retry_after": _scenario(Fault.error(429, "slow down", {"retry-after": "1"}), _says("Hello!")),
    "trainer_500": _scenario(Fault.error(500, "CUDA out of memory")),
    "trainer_500_second_turn": _scenario(_FIRST, Fault.error(500, "engine died")),
    "trainer_503": _scenario(Fault.error(503, "overloaded")),
    "trainer_bad_json": _scenario(Fault.raw('{"id": "x", "choices":')),
    "trainer_empty_choices": _scenario(Fault(kind=FaultKind.EMPTY_CHOICES)),
    "trainer_html": _scenario(Fault.raw("<html><body>gateway</body></html>", "text/html")),
    "trainer_missing_token_ids": _scenario(
        ScriptedReply(content=_FIRST.content, tool_calls=_FIRST.tool_calls, omit=_WITHOUT_IDS)
    ),
    "trainer_missing_token_ids_second_turn": _scenario(
        _FIRST, ScriptedReply(content=_SECOND.content, tool_calls=_SECOND.tool_calls, omit=_WITHOUT_IDS)
    ),
    "trainer_null_message": _scenario(Fault(kind=FaultKind.NULL_MESSAGE)),
    "trainer_other_tokenizer_negative": Scenario(Script((_FIRST, _SECOND, _LAST)), other_tokenizer=True),
    "trainer_renders_without_tools": Scenario(_WALKED_THROUGH, render_tools=False),
    "trainer_reset": _scenario(Fault(kind=FaultKind.RESET)),
    "trainer_timeout": _scenario(Fault(kind=FaultKind.SILENCE)),
    "trainer_truncated_answer": _scenario(Fault.truncated()),
}

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType({**_TOOLS, **_LOOP, **_FAULTS})
"""Scenarios by name. The names are those of the recorded transcripts of the synchronous HTTP API."""
