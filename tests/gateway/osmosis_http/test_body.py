import json
from typing import Any

import pytest
from rollout_gateway.json_body import InvalidBody

from tests.gateway.osmosis_http.bodies import body, locations, parse, spliced
from tests.support.example_bodies import EXAMPLE
from tests.support.transcripts import client_exchange, scenarios


def assistant(name: str = "add", **changes: Any) -> dict[str, Any]:
    """An assistant message with one tool call."""
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}} | changes
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_the_example_is_valid_and_defaults_are_those_of_the_page() -> None:
    minimal = {key: EXAMPLE[key] for key in ("rollout_id", "server_url", "messages", "tokenizer_name")}
    parsed = parse({**minimal, "sampling_params": {}})
    sampling = parsed.body.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (1.0, 1.0, 512, None)
    assert sampling.logprobs is True
    assert (parsed.body.max_turns, parsed.body.max_tokens_total) == (10, 8192)
    assert (parsed.body.tokenizer_revision, parsed.body.tool_server_url, parsed.body.callback_api_key) == (None,) * 3
    assert (parsed.text("metadata"), parsed.text("metadata", "chat_template_kwargs")) == ("", "")
    assert parse(EXAMPLE).body.sampling_params.temperature == 0.7


@pytest.mark.parametrize("scenario", scenarios("invalid_body_"))
def test_every_recorded_invalid_body_is_refused_at_the_recorded_place(scenario: str) -> None:
    exchange = client_exchange(scenario)
    assert exchange["status"] == 422
    if isinstance(exchange["request"], str):
        assert locations(exchange["request"].encode())[0][0] == "body"
    else:
        assert locations(exchange["request"]) == [tuple(each["loc"]) for each in exchange["response"]["detail"]]


def test_every_other_recorded_body_is_valid() -> None:
    for scenario in scenarios(""):
        exchange = client_exchange(scenario)
        if exchange["path"] == "/rollout" and exchange["status"] == 200:
            parsed = parse(exchange["request"])
            assert [json.loads(text) for text in parsed.messages] == exchange["request"]["messages"]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rollout_id": ""}, ("rollout_id",)),
        ({"rollout_id": "\u2003\n"}, ("rollout_id",)),
        ({"rollout_id": None}, ("rollout_id",)),
        ({"server_url": "http://"}, ("server_url",)),
        ({"server_url": "http://[::1"}, ("server_url",)),
        ({"server_url": "trainer:8081"}, ("server_url",)),
        ({"messages": {}}, ("messages",)),
        ({"messages": ["hi"]}, ("messages", 0)),
        ({"messages": [{"content": "hi"}]}, ("messages", 0, "role")),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, ("messages", 0, "tool_calls")),
        ({"messages": [assistant(id="")]}, ("messages", 0, "tool_calls", 0, "id")),
        ({"messages": [assistant(id="x" * 257)]}, ("messages", 0, "tool_calls", 0, "id")),
        ({"messages": [assistant(id=None)]}, ("messages", 0, "tool_calls", 0, "id")),
        ({"messages": [assistant(type="tool")]}, ("messages", 0, "tool_calls", 0, "type")),
        ({"messages": [assistant(type=None)]}, ("messages", 0, "tool_calls", 0, "type")),
        ({"messages": [assistant(name="")]}, ("messages", 0, "tool_calls", 0, "function", "name")),
        ({"messages": [assistant(name="x" * 257)]}, ("messages", 0, "tool_calls", 0, "function", "name")),
        ({"messages": [{"role": "tool", "content": "8", "tool_call_id": "x" * 257}]}, ("messages", 0, "tool_call_id")),
        ({"messages": [{"role": "tool", "content": "8", "tool_call_id": 7}]}, ("messages", 0, "tool_call_id")),
        ({"sampling_params": None}, ("sampling_params",)),
        ({"sampling_params": {"temperature": -0.1}}, ("sampling_params", "temperature")),
        ({"sampling_params": {"top_p": -0.1}}, ("sampling_params", "top_p")),
        ({"sampling_params": {"max_tokens": 32769}}, ("sampling_params", "max_tokens")),
        ({"sampling_params": {"max_tokens": 10**40}}, ("sampling_params", "max_tokens")),
        ({"sampling_params": {"stop": ["a", 1]}}, ("sampling_params", "stop", 1)),
        ({"max_tokens_total": 1_000_001}, ("max_tokens_total",)),
        ({"max_turns": 2.5}, ("max_turns",)),
        ({"tokenizer_revision": 3}, ("tokenizer_revision",)),
        ({"callback_api_key": 3}, ("callback_api_key",)),
        ({"metadata": None}, ("metadata",)),
        ({"metadata": {"agent": 3}}, ("metadata", "agent")),
        ({"metadata": {"on_drift": "repair"}}, ("metadata", "on_drift")),
        ({"metadata": {"chat_template_kwargs": []}}, ("metadata", "chat_template_kwargs")),
        ({"metadata": {"max_assistant_turns": 0}}, ("metadata", "max_assistant_turns")),
        ({"metadata": {"max_assistant_turns": True}}, ("metadata", "max_assistant_turns")),
        ({"metadata": {"max_user_turns": "3"}}, ("metadata", "max_user_turns")),
        ({"metadata": {"budget_tokens": 1.5}}, ("metadata", "budget_tokens")),
        ({"metadata": {"timeout_seconds": 0}}, ("metadata", "timeout_seconds")),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], place: tuple[Any, ...]) -> None:
    assert locations(body(**changes)) == [("body", *place)]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_id": "x" * 256},
        {"rollout_id": "a/b ünï 'c"},
        {"server_url": "HTTPS://trainer/prefix"},
        {"max_turns": 1, "max_tokens_total": 1},
        {"max_turns": 100, "max_tokens_total": 1_000_000},
        {"sampling_params": {"temperature": 0, "top_p": 0, "max_tokens": 1, "stop": []}},
        {"sampling_params": {"temperature": 2, "top_p": 1, "max_tokens": 32768, "unknown": 1}},
        {"future_field": {"x": 1}, "metadata": {"anything": [1, 2], "debug_trace": "maybe"}},
        {"metadata": {"agent": None, "max_assistant_turns": None, "budget_tokens": None, "on_drift": None}},
        {"messages": [{"role": "function", "content": [{"type": "text", "text": "a"}, {}], "vendor": {"a": None}}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": None}, {"role": "tool", "tool_call_id": "c"}]},
        {"messages": [assistant(id="x" * 256, name="y" * 256), {"role": "tool", "tool_call_id": "x" * 256}]},
        {"messages": [{"role": "tool", "tool_call_id": ""}, {"role": "tool", "tool_call_id": None}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
            ]
        },
    ],
)
def test_what_the_page_allows_is_allowed(changes: dict[str, Any]) -> None:
    parse(body(**changes))


@pytest.mark.parametrize("arguments", ["", "{broken", {"a": 1}, {}])
def test_arguments_are_any_string_or_an_object(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments, "vendor": 1}, "index": 0}
    parse(body(messages=[{"role": "assistant", "tool_calls": [call]}]))


def test_trailing_slashes_of_the_url_are_dropped() -> None:
    assert parse(body(server_url="http://trainer:8081///")).body.server_url == "http://trainer:8081"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b'{"rollout_id": }',
        spliced('[{"role": "user", "content": "\xff"}]').decode().encode("latin-1"),
        spliced('[{"role": "user", "x": NaN}]'),
        spliced('[{"role": "user"}]', ', "metadata": {"a": [-Infinity]}'),
        spliced('[{"role": "user"}]', ', "future_field": Infinity'),
        spliced('[{"role": "user"}]', ', "max_turns": NaN'),
        spliced('[{"role": "user", "content": "\\ud800"}]'),
        spliced('[{"role": "user"}]', ', "metadata": {"\\udc00": 1}'),
        spliced('[{"role": "user"}]', ', "metadata": ' + '{"a":' * 50_000 + "1" + "}" * 50_000),
        spliced("[" * 100_000),
    ],
)
def test_what_is_not_json_is_refused_and_never_repeated(content: bytes) -> None:
    assert {place[0] for place in locations(content)} == {"body"}


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    with pytest.raises(InvalidBody) as caught:
        parse(body(callback_api_key="callback-secret", max_turns=0, rollout_id=" "))
    assert "callback-secret" not in json.dumps(caught.value.violations)
    assert caught.value.violations[1]["ctx"] == {"ge": 1}


def test_metadata_over_the_limit_is_refused_by_its_size_in_the_body() -> None:
    text = '{"k" :   "äöü"}'
    content = spliced('[{"role": "user"}]', f', "metadata": {text}')
    size = len(text.encode())
    assert parse(content, size).text("metadata") == text
    assert locations(content, size - 1) == [("body", "metadata")]


def test_template_switches_are_cut_out_of_the_metadata() -> None:
    metadata = '{ "chat_template_kwargs" : {"enable_thinking":false , "n": 18446744073709551617}, "z": 1 }'
    parsed = parse(spliced('[{"role": "user"}]', f', "metadata": {metadata}'))
    assert parsed.text("metadata") == metadata
    assert parsed.text("metadata", "chat_template_kwargs") == '{"enable_thinking":false , "n": 18446744073709551617}'


def test_integers_may_be_longer_than_python_converts() -> None:
    digits = "9" * 10_000
    message = f'{{"role":"user","n":-{digits}}}'
    parsed = parse(spliced(f"[{message}]", f', "metadata": {{"budget_tokens": {digits}}}'))
    assert parsed.messages == (message,)
    assert parsed.body.metadata.budget_tokens is not None
    assert parsed.body.metadata.budget_tokens > parsed.body.max_tokens_total
    assert locations(spliced("[]", f', "max_turns": -{digits}'))[-1] == ("body", "max_turns")


def test_of_a_repeated_key_the_last_one_counts_everywhere() -> None:
    parsed = parse(
        spliced('[{"role":"robot"}]', ', "messages": [{"role":"x","role":"user"}], "\\u006detadata": {"a":1}')
    )
    assert parsed.messages == ('{"role":"x","role":"user"}',)
    assert parsed.text("metadata") == '{"a":1}'
