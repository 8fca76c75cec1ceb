"""Token mode on real tokenizers: the server's rendering satisfies the judge, with thinking, parallel calls and truncation."""

import json
from collections.abc import Callable

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, token_pb2
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tokens.conftest import TOOLS, answered, executor, ours, packed
from tests.support.tokenizers import directory

from .test_strict_trainer_completions import status_of
from .tokens import TokenCaller, other

__all__ = ["executor", "ours"]
FAMILIES = ("toy", "qwen2.5", "qwen3", "llama3", "deepseek-v3", "gpt-oss", "mistral-small-3.2", "phi-3.5")
ONE_CALL_ONLY = frozenset({"llama3"})
"""Templates that refuse parallel calls."""
NO_CALLS = frozenset({"phi-3.5"})
"""Templates that render neither calls nor results."""


def script(family: str) -> Script:
    """Calls, parallel calls and thinking; then a truncated completion; then final ones, each followed by a user message."""
    first = tool_call("call00001", "add", '{"a": 5, "b": 3}')
    second = tool_call("call00002", "add", '{"b":8,"a":[1.0,"</tool_call>"]}')
    calls = (first,) if family in ONE_CALL_ONLY else (first, second)
    if family in NO_CALLS:
        calling = [ScriptedReply(content="Five and"), ScriptedReply(content=" three ")]
    else:
        calling = [
            ScriptedReply(content="", reasoning="Let me add.", tool_calls=(first,)),
            ScriptedReply(content="", reasoning="Once more.", tool_calls=calls),
        ]
    return Script(
        (
            *calling,
            ScriptedReply(content="It is ei", cut=True),
            ScriptedReply(content="Eight.\n\n  Naïve — e\u0301!", reasoning="Done."),
            ScriptedReply(content="Good bye."),
        )
    )


class RenderedCaller(TokenCaller):
    """A caller whose tokens come from the server's own renderer."""

    renderer: Renderer
    last: Answered | None = None

    async def turn_once(self) -> pb.CompleteRequest:
        """Run one turn and return its request."""
        messages = packed(*self.messages)
        rendered = await self.renderer.predict(messages, self.last, self.known - 1 if self.last else 0)
        assert rendered.exact
        closing, environment = list(rendered.predicted.closing), list(rendered.predicted.environment)
        reason = token_pb2.MASK_REASON_ENVIRONMENT if self.last else token_pb2.MASK_REASON_PROMPT
        new = [other(reason, self.turn + 1, environment)]
        if closing:
            new.insert(0, other(token_pb2.MASK_REASON_CLOSING, self.turn + 1, closing))
        wrong = self.request(new_tokens=self.tokens([*new[:-1], other(reason, self.turn + 1, environment[:-1])]))
        code, why, _, _ = await status_of(self.stub.Complete(wrong))
        assert (code, why) == (grpc.StatusCode.INVALID_ARGUMENT, "TOKENS")
        request = self.request(new_tokens=self.tokens(new))
        answer = await self.stub.Complete(request)
        self.take(new, answer, request)
        self.last = answered(json.loads(answer.message.json), list(answer.token_ids), answer.finish_reason)
        return request

    def follow(self) -> None:
        """Append the messages after a completion."""
        calls = self.messages[self.known - 1].get("tool_calls") or ()
        del self.messages[self.known :]
        for call in calls:
            text = '{"sum": 8.0, "note": "<|im_end|> </s> ü"}'
            self.messages.append({"role": "tool", "name": "add", "tool_call_id": call["id"], "content": text})
        if not calls:
            self.messages.append({"role": "user", "content": "Are you <sure>? "})


@pytest.mark.parametrize("family", FAMILIES)
async def test_server_and_judge_agree_on_every_token(family: str, ours: Callable[..., LoadedTokenizer]) -> None:
    async with (
        StrictTrainer(directory(family), script=script(family), tools=TOOLS, parse_arguments=True) as trainer,
        grpc.aio.insecure_channel(trainer.grpc_target) as channel,
    ):
        stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
        playing = RenderedCaller(stub, list)
        playing.renderer = Renderer(ours(family), TOOLS, {})
        for _ in range(5):
            await playing.turn_once()
            playing.follow()
        held = await stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
        verdict = trainer.verdict("r")
    assert list(held.spans) == playing.spans
    assert list(held.checkpoints) == [answer.after for answer in playing.answers]
    assert verdict is not None
    assert len(verdict.turns) == 5
    assert len(verdict.refusals) == 5  # one incorrect environment in each turn
    assert list(verdict.sample.prompt_ids + verdict.sample.response_ids) == playing.ids
    assert any(span.mask_reason == token_pb2.MASK_REASON_CLOSING for span in playing.spans)
