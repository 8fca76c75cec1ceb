"""Differences between a correct server and the recorded asynchronous reference implementation, each with its reason.

The rules are in `tests/golden/README.md`. A correction changes the recorded exchanges into those of a correct server. The
trainer's recorded responses stay unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.conformance.replay import Transcript, longest_context
from tests.support.golden import INIT, SYNC

Json = Any
COMPLETED = "/v1/rollout/completed"


@dataclass(frozen=True)
class Correction:
    """A known fault of the reference, and the exchanges without it."""

    reason: str
    apply: Callable[[list[Json]], list[Json]]


def corrected(transcript: Transcript) -> Transcript:
    """The transcript that a correct server produces."""
    own = CORRECTIONS.get(transcript.name)
    exchanges = json.loads(json.dumps(transcript.exchanges))
    for correction in [own, *EVERYWHERE] if own else EVERYWHERE:
        exchanges = correction.apply(exchanges)
    return replace(transcript, exchanges=exchanges)


def outcomes(exchanges: list[Json]) -> list[Json]:
    """The outcome deliveries among the exchanges."""
    return [exchange for exchange in exchanges if exchange["path"] == COMPLETED]


def _with_longest_context(exchanges: list[Json]) -> list[Json]:
    for exchange in outcomes(exchanges):
        exchange["request"]["metrics"]["max_context_tokens"] = longest_context(exchanges)
    return exchanges


def _with_tools_of_sync(exchanges: list[Json]) -> list[Json]:
    """Accept with the tools of the synchronous transcripts, in the asynchronous API's shape."""
    recorded = json.loads((SYNC / "tools.json").read_text())["exchanges"]
    (tools,) = [exchange["response"]["tools"] for exchange in recorded if exchange["path"] == "/tools"]
    for exchange in exchanges:
        if exchange["status"] == 202:
            shaped = [{**tool, "function": {**tool["function"], "strict": False}} for tool in tools]
            exchange["response"]["tools"] = shaped
    return exchanges


def _first_deliveries(count: int) -> Callable[[list[Json]], list[Json]]:
    """Keep only the first deliveries; they belong to one outcome."""

    def apply(exchanges: list[Json]) -> list[Json]:
        others = [exchange for exchange in exchanges if exchange["path"] != COMPLETED]
        return others + outcomes(exchanges)[:count]

    return apply


def _answered(status: int) -> Callable[[list[Json]], list[Json]]:
    """Respond to the client's last call with another status, and drop the calls that it caused."""

    def apply(exchanges: list[Json]) -> list[Json]:
        call = [exchange for exchange in exchanges if exchange["to"] == "server"][-1]
        call.update(status=status, response={"detail": "a text of the server's own"})
        return exchanges

    return apply


def _answered_plainly(exchanges: list[Json]) -> list[Json]:
    """End the last turn, retried once if it was refused, with the completion and outcome of `plain_answer`."""
    plain = json.loads((INIT / "plain_answer.json").read_text())["exchanges"]
    asked, told = [exchange for exchange in plain if exchange["to"] == "trainer"]
    begun = exchanges[0]["request"]
    own = {"rollout_id": begun["rollout_id"], "messages": begun["messages"]}
    parameters = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512, "logprobs": True} | begun["completion_params"]
    asked["request"] |= parameters | own
    answer = asked["response"]["choices"][0]["message"]
    told["request"] |= {"rollout_id": begun["rollout_id"], "final_messages": [*begun["messages"], answer]}
    before = [exchange for exchange in exchanges if exchange["path"] != COMPLETED]
    return [*before, asked, told]


def _with_parameters(**parameters: Json) -> Callable[[list[Json]], list[Json]]:
    def apply(exchanges: list[Json]) -> list[Json]:
        for exchange in exchanges:
            if exchange["path"] == "/v1/chat/completions":
                exchange["request"] |= parameters
        return exchanges

    return apply


def _with_outcome(**fields: Json) -> Callable[[list[Json]], list[Json]]:
    """Change fields of the outcome; of its metrics only the named ones."""

    def apply(exchanges: list[Json]) -> list[Json]:
        for exchange in outcomes(exchanges):
            metrics = exchange["request"]["metrics"] | fields.get("metrics", {})
            exchange["request"] |= fields | {"metrics": metrics}
        return exchanges

    return apply


def _with_tool_texts(texts: Mapping[str, str]) -> Callable[[list[Json]], list[Json]]:
    """Change tool results by the ids of their calls, in every history."""

    def apply(exchanges: list[Json]) -> list[Json]:
        for exchange in exchanges:
            request = exchange["request"]
            for message in request.get("messages", []) + request.get("final_messages", []):
                if message.get("tool_call_id") in texts:
                    message["content"] = texts[message["tool_call_id"]]
        return exchanges

    return apply


_NO_CALL = {"num_llm_calls": 0, "prompt_tokens": 0, "response_tokens": 0}
_NOT_A_CALL = Correction(
    "an answer without a message is counted as a call, with its usage", _with_outcome(metrics=_NO_CALL)
)
_TWO_VERDICTS = "a refused or failed COMPLETED is followed by an ERROR for the same rollout: two verdicts"

EVERYWHERE = (
    Correction("max_context_tokens is always 0, not the longest prompt + answer", _with_longest_context),
    Correction("one parameter is described otherwise than in the synchronous reference's tools", _with_tools_of_sync),
)
"""Corrections for every transcript with an outcome, or with an accepted rollout."""

CORRECTIONS: Mapping[str, Correction] = {
    "completed_400": Correction(_TWO_VERDICTS, _first_deliveries(1)),
    "completed_500_forever": Correction(_TWO_VERDICTS, _first_deliveries(3)),
    "completed_201": Correction("only status 200 acknowledges", _first_deliveries(1)),
    "completed_204": Correction("only status 200 acknowledges", _first_deliveries(1)),
    "chat_429_retry_after": Correction("Retry-After is not waited for: the turn is asked for again", _answered_plainly),
    "chat_500_second_turn_forever": Correction(
        "an ERROR callback carries the client's counters only: the first turn's tool has run",
        _with_outcome(metrics={"num_tool_calls": 1}),
    ),
    "chat_empty_choices": _NOT_A_CALL,
    "chat_missing_choices": _NOT_A_CALL,
    "chat_null_message": _NOT_A_CALL,
    "extra_completion_params": Correction(
        "unknown keys of completion_params are dropped", _with_parameters(top_k=40, seed=7, presence_penalty=0.5)
    ),
    "completion_params_messages_ignored": Correction(
        "the agent fails; messages inside completion_params are to be ignored", _answered_plainly
    ),
    "duplicate_other_payload": Correction("the payload is not compared: a known id gets its answer", _answered(409)),
    "server_key_missing_invalid_body": Correction("the body is validated before the key is checked", _answered(401)),
    "server_key_not_ascii": Correction("a key that is not ASCII is a 500", _answered(401)),
    "reward_two_markers": Correction("the first #### N counts, not the last", _with_outcome(reward=1.0)),
    "number_formats": Correction(
        "multiply rounds to 4 places, unlike the synchronous reference's",
        _with_tool_texts({"call_6": "0.11110888890000001"}),
    ),
    "unknown_tool": Correction(
        "the names of the tools are sorted, unlike in the synchronous reference's text",
        _with_tool_texts(
            {"call_1": "Error: Unknown function 'integrate'. Available: ['add', 'subtract', 'multiply', 'divide']"}
        ),
    ),
    "wrong_arguments": Correction(
        "two other texts for what the synchronous reference calls invalid arguments for add",
        _with_tool_texts(dict.fromkeys(("call_1", "call_2"), "Error: Invalid arguments for add: ")),
    ),
}
