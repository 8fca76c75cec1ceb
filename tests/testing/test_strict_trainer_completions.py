"""CompletionService of the strict trainer, over a real channel: message mode, statuses, replayed turn keys."""

import asyncio
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2, token_pb2
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from .conftest import QUESTION, TOOLS, run_tool, until

ADD = tool_call("call_1", "add", '{"a": 5, "b": 3}')


@dataclass
class Asking:
    """The server side: it sends new tokens since the last checkpoint, and keeps its own ledger."""

    stub: "completion_service_pb2_grpc.CompletionServiceAsyncStub"
    uid: str = "u"
    rollout_id: str = "r"
    segment_id: str = "0"
    new: list[message_pb2.Message] = field(default_factory=lambda: [as_json(message) for message in QUESTION])
    base: token_pb2.Checkpoint | None = None
    turn: int = 0
    words: list[int] = field(default_factory=list)
    answers: list[pb.CompleteResponse] = field(default_factory=list)

    def request(self, **changes: Any) -> pb.CompleteRequest:
        turn = self.turn + 1
        fields = {
            "uid": self.uid,
            "rollout_id": self.rollout_id,
            "segment_id": self.segment_id,
            "turn": turn,
            "turn_key": f"{self.uid}/{self.segment_id}/{turn}",
            "new_messages": self.new,
            "base": self.base,
        }
        return pb.CompleteRequest(**(fields | changes))

    async def complete(self, **changes: Any) -> pb.CompleteResponse:
        """Run one turn and add it to the ledger. Asserts that the returned checkpoint equals the ledger's."""
        answer = await self.stub.Complete(self.request(**changes))
        known = [word & 0x7FFFFFFF for word in self.words]
        prompt = list(answer.prompt_ids.values)
        assert prompt[: len(known)] == known
        self.words += prompt[len(known) :] + [token | 1 << 31 for token in answer.token_ids]
        assert answer.after.tokens == len(self.words)
        assert answer.after.digest == hashlib.sha256(struct.pack(f"<{len(self.words)}I", *self.words)).digest()
        assert len(answer.logprobs.values) == len(answer.token_ids) == answer.usage.completion_tokens
        assert answer.usage.prompt_tokens == len(prompt)
        self.turn += 1
        self.base = answer.after
        self.answers.append(answer)
        return answer

    async def play(self) -> None:
        """Run turns, each with the tool results of the previous one, until a completion calls no tools."""
        while calls := json.loads((await self.complete()).message.json).get("tool_calls"):
            self.new = [as_json(run_tool(call)) for call in calls]


def digest_of(tools: Sequence[message_pb2.Tool]) -> bytes:
    """The digest of a list of tools, as specified in message.proto."""
    written = b""
    for tool in tools:
        for text in (tool.name, tool.description, tool.parameters_json_schema):
            written += len(text.encode()).to_bytes(4, "little") + text.encode()
        written += bytes([tool.strict])
    return hashlib.sha256(written).digest()


def as_json(message: Any) -> message_pb2.Message:
    return message_pb2.Message(json=json.dumps(message))


@pytest.fixture
async def asking() -> AsyncIterator[Callable[..., Asking]]:
    """A factory: `asking(trainer, uid=..., ...)`."""
    channels: list[grpc.aio.Channel] = []

    def make(trainer: StrictTrainer, **fields: Any) -> Asking:
        channels.append(grpc.aio.insecure_channel(trainer.grpc_target))
        return Asking(completion_service_pb2_grpc.CompletionServiceStub(channels[-1]), **fields)

    yield make
    for channel in channels:
        await channel.close()


async def status_of(call: Any) -> tuple[grpc.StatusCode, str, str, status_pb2.Status]:
    """Code, reason, text and details of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    rich = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert info.domain == "rollout.osmosis"
    assert rich.code == caught.value.code().value[0]
    return caught.value.code(), info.reason, caught.value.details() or "", rich


async def test_a_rollout_that_sends_what_is_new(asking, toy) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.play()
        verdict = trainer.verdict("r")
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
    said = [json.loads(answer.message.json)["content"] for answer in playing.answers]
    assert said[-1] == "5 plus 3 equals 8. Multiplying 8 by 2 gives 16."
    assert verdict.accepted
    assert [turn.number for turn in verdict.turns] == [1, 2, 3]
    sample = verdict.sample
    assert list(sample.prompt_ids + sample.response_ids) == [word & 0x7FFFFFFF for word in playing.words]
    assert list(sample.response_mask) == [word >> 31 for word in playing.words[len(sample.prompt_ids) :]]
    authors = [span.author for span in held.spans]
    assert authors == [token_pb2.AUTHOR_OTHER, token_pb2.AUTHOR_MODEL] * 3
    assert [span.turn for span in held.spans] == [1, 1, 2, 2, 3, 3]
    assert [span.mask_reason for span in held.spans[::2]] == [
        token_pb2.MASK_REASON_PROMPT,
        token_pb2.MASK_REASON_ENVIRONMENT,
        token_pb2.MASK_REASON_ENVIRONMENT,
    ]
    assert [token for span in held.spans for token in span.token_ids] == list(sample.prompt_ids + sample.response_ids)
    assert [checkpoint.digest for checkpoint in held.checkpoints] == [a.after.digest for a in playing.answers]


async def test_http_and_grpc_give_the_same_ids(asking, caller) -> None:
    async with StrictTrainer() as trainer:
        over_grpc, over_http = asking(trainer), caller(trainer, rollout_id="http")
        await over_grpc.play()
        await over_http.play()
    for one, other in zip(over_grpc.answers, over_http.answers, strict=True):
        assert list(one.token_ids) == other["token_ids"]
        assert list(one.prompt_ids.values) == other["prompt_token_ids"]
        assert list(one.logprobs.values) == other["logprobs"]


async def test_the_whole_history_is_as_good_as_a_base(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        history = [*playing.new, first.message, as_json({"role": "tool", "content": "8", "tool_call_id": "call_1"})]
        second = await playing.complete(base=None, new_messages=history)
        assert trainer.verdict("r").accepted
    assert json.loads(second.message.json)["tool_calls"][0]["function"]["name"] == "multiply"


async def test_a_base_may_leave_out_the_answer(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        base = token_pb2.Checkpoint(messages=2, tokens=first.after.tokens, digest=first.after.digest)
        await playing.complete(base=base, new_messages=[first.message, as_json({"role": "tool", "content": "8"})])
        assert trainer.verdict("r").accepted


async def test_a_turn_key_is_answered_once(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        requests = [playing.request() for _ in range(3)]
        together = await asyncio.gather(*(playing.stub.Complete(request) for request in requests))
        first = await playing.complete()
        again = await playing.stub.Complete(requests[0])
        assert together == [first, first, first]
        assert again == first
        assert len(trainer.verdict("r").turns) == 1
        assert len(trainer.completions) == 5
        assert trainer.completions[0].request.turn_key == "u/0/1"


async def test_a_caller_that_gave_up_gets_the_answer_later(asking) -> None:
    script = Script((ScriptedReply(content="Late.", delay=0.3), ScriptedReply(content="never said")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await playing.stub.Complete(playing.request(), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert json.loads((await playing.complete()).message.json)["content"] == "Late."
        assert len(trainer.verdict("r").turns) == 1


async def test_a_rewritten_history_is_refused(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        changed = [as_json(QUESTION[0]), as_json({"role": "user", "content": "x"}), first.message]
        code, reason, text, _ = await status_of(playing.complete(base=None, new_messages=changed))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "HISTORY")
        assert text.startswith("messages[1] is not what was sent before")
        playing.new = [as_json({"role": "tool", "content": "8"})]
        await playing.play()
        assert len(trainer.verdict("r").turns) == 3


async def test_a_rollout_does_not_start_anew_under_its_own_uid(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.play()
        code, reason, _, _ = await status_of(playing.complete(base=None, new_messages=asking(trainer).new))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "HISTORY")


async def test_an_unknown_base_asks_for_the_whole_history(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        base = token_pb2.Checkpoint(messages=1, tokens=5, digest=b"x" * 32)
        code, reason, _, _ = await status_of(playing.complete(base=base))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN")
        await playing.complete()
        assert trainer.verdict("r").accepted


async def test_another_digest_is_a_mismatch_that_shows_the_checkpoints(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        base = token_pb2.Checkpoint(messages=3, tokens=first.after.tokens, digest=b"x" * 32)
        code, reason, _, rich = await status_of(playing.complete(base=base))
        assert (code, reason) == (grpc.StatusCode.ABORTED, "LEDGER_MISMATCH")
        detail = pb.LedgerMismatch()
        assert rich.details[1].Unpack(detail)
        assert list(detail.checkpoints) == [first.after]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"uid": ""}, "uid"),
        ({"rollout_id": " "}, "rollout_id"),
        ({"turn": 0}, "turn"),
        ({"turn_key": "u/0/7"}, "turn_key"),
        ({"new_messages": [message_pb2.Message()]}, "new_messages[0]"),
        ({"new_messages": [message_pb2.Message(json="[]")]}, "new_messages[0]"),
        ({"new_messages": [message_pb2.Message(json="{")]}, "new_messages[0]"),
        ({"new_messages": [message_pb2.Message(json='{"role": 1}')]}, "new_messages[0]"),
        (
            {"new_messages": [message_pb2.Message(chat=message_pb2.ChatMessage(role="user", parts=[{}]))]},
            "new_messages[0]",
        ),
        (
            {"tools": message_pb2.ToolSet(digest=b"1", tools=[{"name": "x", "parameters_json_schema": "5"}])},
            "tools.tools[0].parameters_json_schema",
        ),
    ],
)
async def test_requests_that_break_the_contract_name_the_field(asking, changes, field) -> None:
    async with StrictTrainer() as trainer:
        code, _, text, rich = await status_of(asking(trainer).complete(**changes))
    detail = error_details_pb2.BadRequest()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert rich.details[1].Unpack(detail)
    assert detail.field_violations[0].field == field
    assert text.startswith(field)


async def test_no_messages_are_refused(asking) -> None:
    async with StrictTrainer() as trainer:
        code, reason, _, _ = await status_of(asking(trainer).complete(new_messages=[]))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEMPLATE")


async def test_the_key_is_demanded(asking) -> None:
    async with StrictTrainer(api_key="secret") as trainer:
        playing = asking(trainer)
        code, _, _, _ = await status_of(playing.stub.Complete(playing.request(), metadata=(("authorization", "x"),)))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, _, _, _ = await status_of(playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u")))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert trainer.verdicts() == ()
        metadata = (("authorization", "Bearer secret"),)
        assert (await playing.stub.Complete(playing.request(), metadata=metadata)).token_ids
        code, reason, _, _ = await status_of(
            playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="7"), metadata=metadata)
        )
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "SEGMENT_UNKNOWN")


async def test_a_ledger_can_be_read_from_any_token(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.play()
        tokens = [word & 0x7FFFFFFF for word in playing.words]
        for offset in (0, 1, len(playing.answers[0].prompt_ids.values), len(tokens) - 1, len(tokens), len(tokens) + 5):
            request = pb.ReadLedgerRequest(uid="u", segment_id="0", offset=offset)
            spans = (await playing.stub.ReadLedger(request)).spans
            assert [token for span in spans for token in span.token_ids] == tokens[offset:]
            assert all(
                len(span.logprobs.values) == (len(span.token_ids) if span.author == token_pb2.AUTHOR_MODEL else 0)
                for span in spans
            )


def typed_question() -> list[message_pb2.Message]:
    chats = [message_pb2.ChatMessage(role=m["role"], parts=[{"text": m["content"]}]) for m in QUESTION]
    return [message_pb2.Message(chat=chat) for chat in chats]


async def test_typed_messages_are_answered_typed_with_the_same_ids(asking) -> None:
    script = Script((ScriptedReply(tool_calls=(ADD,), reasoning="Add.", content="Adding."), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script, "j": script}) as trainer:
        typed, verbatim = asking(trainer, new=typed_question()), asking(trainer, uid="v", rollout_id="j")
        first = await typed.complete()
        assert first.message.chat == message_pb2.ChatMessage(
            role="assistant",
            parts=[{"text": "Adding."}],
            tool_calls=[{"id": "call_1", "name": "add", "arguments_json": '{"a": 5, "b": 3}'}],
            reasoning="Add.",
        )
        chat = message_pb2.ChatMessage(role="tool", parts=[{"text": "8"}], tool_call_id="call_1")
        history = [*typed.new, first.message, message_pb2.Message(chat=chat)]
        second = await typed.complete(base=None, new_messages=history)
        await verbatim.play()
        assert trainer.verdict("r").accepted
    assert second.message.chat.parts[0].text == "8"
    assert typed.words == verbatim.words


@pytest.mark.parametrize(
    "reply", [ScriptedReply(content="x", extra={"y": 1}), ScriptedReply(tool_calls=(tool_call("1", "add", {}),))]
)
async def test_what_the_typed_form_cannot_carry_comes_as_json(asking, reply) -> None:
    async with StrictTrainer(scripts={"r": Script((reply,))}) as trainer:
        answer = await asking(trainer, new=typed_question()).complete()
    assert json.loads(answer.message.json) == reply.message


async def test_parts_of_typed_messages(asking, toy) -> None:
    parts = [{"text": "a"}, {"json": '{"type": "text", "text": "b"}'}]
    user = message_pb2.Message(chat=message_pb2.ChatMessage(role="user", parts=parts, name="x", reasoning="no"))
    empty = message_pb2.Message(chat=message_pb2.ChatMessage(role="user"))
    image = message_pb2.Message(
        chat=message_pb2.ChatMessage(role="user", parts=[{"blob": {"media_type": "image/png"}}])
    )
    async with StrictTrainer() as trainer:
        answer = await asking(trainer, new=[user, empty]).complete()
        code, reason, _, _ = await status_of(asking(trainer, uid="i", new=[image]).complete())
    assert toy.decode(list(answer.prompt_ids.values)) == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEMPLATE")


async def test_tools_are_known_by_their_digest(asking, toy) -> None:
    listed = [
        message_pb2.Tool(
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            parameters_json_schema=json.dumps(tool["function"]["parameters"]),
        )
        for tool in TOOLS
    ]
    digest = digest_of(listed)
    async with StrictTrainer(
        scripts={"r": Script((ScriptedReply(tool_calls=(ADD,)), ScriptedReply(content="8")))}
    ) as trainer:
        playing = asking(trainer)
        first = await playing.complete(tools=message_pb2.ToolSet(digest=digest, tools=listed))
        playing.new = [as_json(run_tool(ADD))]
        await playing.complete(tools=message_pb2.ToolSet(digest=digest))
        assert trainer.verdict("r").accepted
        other = asking(trainer, uid="w", rollout_id="w")
        code, reason, _, _ = await status_of(other.complete(tools=message_pb2.ToolSet(digest=digest)))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOOLS_UNKNOWN")
        code, _, text, _ = await status_of(other.complete(tools=message_pb2.ToolSet(digest=digest[::-1], tools=listed)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith("tools.digest")
        without = await other.complete(tools=message_pb2.ToolSet(digest=digest_of([])))
    rendered = toy.apply_chat_template(QUESTION, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert list(first.prompt_ids.values) == rendered
    assert len(without.prompt_ids.values) < len(rendered)


async def test_without_a_tool_set_the_tools_told_are_rendered_and_rendering_can_be_off(asking) -> None:
    lengths = []
    for options in ({"tools": TOOLS}, {"tools": TOOLS, "render_tools": False}):
        async with StrictTrainer(**options) as trainer:
            lengths.append(len((await asking(trainer).complete()).prompt_ids.values))
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        (Fault.error(429, "slow down", {"retry-after": "2"}), grpc.StatusCode.RESOURCE_EXHAUSTED, "HTTP_429"),
        (Fault.error(500, "engine died"), grpc.StatusCode.INTERNAL, "HTTP_500"),
        (Fault.error(418, "?"), grpc.StatusCode.UNKNOWN, "HTTP_418"),
        (Fault(kind=FaultKind.RESET), grpc.StatusCode.UNAVAILABLE, "RESET"),
        (Fault(kind=FaultKind.TRUNCATED), grpc.StatusCode.INTERNAL, "TRUNCATED"),
    ],
)
async def test_faults_are_statuses_and_the_same_key_comes_again(asking, fault, code, reason) -> None:
    async with StrictTrainer(scripts={"r": Script((fault, ScriptedReply(content="Hello!")))}) as trainer:
        playing = asking(trainer)
        got, why, _, rich = await status_of(playing.complete())
        assert (got, why) == (code, reason)
        retry = error_details_pb2.RetryInfo()
        assert [detail.Unpack(retry) for detail in rich.details[1:]] == ([True] if "429" in reason else [])
        assert retry.retry_delay.seconds == (2 if "429" in reason else 0)
        assert json.loads((await playing.complete()).message.json)["content"] == "Hello!"
        assert trainer.verdict("r").accepted


async def test_an_answer_that_gets_lost_was_generated_once(asking) -> None:
    script = Script((Fault(kind=FaultKind.LOST),), then_model=True)
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        code, why, _, _ = await status_of(playing.complete())
        assert (code, why) == (grpc.StatusCode.UNAVAILABLE, "LOST")
        await playing.play()
        verdict = trainer.verdict("r")
    assert verdict.accepted
    assert (len(verdict.turns), verdict.siblings, verdict.faults) == (3, 0, ("turn 1: lost",))


async def test_silence_and_answers_without_a_message(asking) -> None:
    faults = (Fault(kind=FaultKind.SILENCE), Fault(kind=FaultKind.EMPTY_CHOICES), Fault.raw("<html>"))
    async with StrictTrainer(scripts={"r": Script((*faults, ScriptedReply(content="Hello!")))}) as trainer:
        playing = asking(trainer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await playing.stub.Complete(playing.request(), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        empty = await playing.stub.Complete(playing.request())
        assert not empty.HasField("message")
        # A completion is final: the key of a malformed one returns it again.
        assert await playing.stub.Complete(playing.request()) == empty


async def test_closing_ends_what_is_held_back(asking) -> None:
    async with StrictTrainer(scripts={"r": Script((ScriptedReply(content="Late.", delay=600),))}) as trainer:
        playing = asking(trainer)
        asked = asyncio.create_task(playing.complete())
        await until(lambda: bool(trainer.verdicts()))
    with pytest.raises(grpc.aio.AioRpcError):
        await asked


async def test_fields_can_be_left_out(asking) -> None:
    omit = frozenset({"token_ids", "logprobs", "prompt_token_ids"})
    async with StrictTrainer(scripts={"r": Script((ScriptedReply(content="x", omit=omit),))}) as trainer:
        playing = asking(trainer)
        answer = await playing.stub.Complete(playing.request())
        other = await playing.stub.Complete(
            asking(trainer, uid="o", rollout_id="o").request(sampling={"logprobs": False})
        )
    assert not answer.token_ids
    assert not answer.HasField("logprobs")
    assert answer.WhichOneof("prompt") is None
    assert answer.HasField("after")
    assert other.token_ids
    assert not other.HasField("logprobs")


async def test_drift_begins_a_new_sample_that_another_segment_continues(asking) -> None:
    script = Script(
        (
            ScriptedReply(tool_calls=(ADD,), surplus=(0, 1)),
            ScriptedReply(tool_calls=(ADD,)),
            ScriptedReply(content="8"),
        ),
        repeat_last=True,
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        await playing.complete()
        playing.new = [as_json(run_tool(ADD))]
        second = await playing.stub.Complete(playing.request())
        words = [*second.prompt_ids.values, *(token | 1 << 31 for token in second.token_ids)]
        assert second.after.digest == hashlib.sha256(struct.pack(f"<{len(words)}I", *words)).digest()
        other = asking(trainer, segment_id="1", base=second.after, turn=2, words=words, new=playing.new)
        await other.play()
        verdict = trainer.verdict("r")
    assert [turn.drift is None for turn in verdict.turns] == [True, False, True]
    assert verdict.accepted


async def test_a_branch_is_judged_on_its_own(asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        words = list(playing.words)
        playing.new = [as_json(run_tool(ADD))]
        await playing.play()
        branch = asking(trainer, segment_id="1", base=first.after, turn=1, words=words)
        branch.new = [as_json({"role": "tool", "content": "80", "tool_call_id": "call_1"})]
        await branch.play()
        names = {verdict.rollout_id: len(verdict.turns) for verdict in trainer.verdicts()}
        assert all(verdict.accepted for verdict in trainer.verdicts())
    assert json.loads(branch.answers[-1].message.json)["content"].endswith("Multiplying 80 by 2 gives 160.")
    assert names == {"r": 3, "r/1": 2}


async def test_a_name_used_again_by_another_rollout_starts_anew(asking) -> None:
    async with StrictTrainer() as trainer:
        await asking(trainer).complete()
        await asking(trainer, uid="u2").play()
        verdict = trainer.verdict("r")
    assert verdict.accepted
    assert len(verdict.turns) == 3
    assert [len(earlier.turns) for earlier in verdict.earlier] == [1]


async def test_many_rollouts_at_once(asking) -> None:
    async with StrictTrainer() as trainer:
        stub = asking(trainer).stub
        rollouts = [Asking(stub, uid=f"u{i}", rollout_id=f"r{i}") for i in range(200)]
        await asyncio.gather(*(rollout.play() for rollout in rollouts))
        verdicts = trainer.verdicts()
    assert len(verdicts) == 200
    assert all(verdict.accepted and len(verdict.turns) == 3 for verdict in verdicts)


async def test_ports() -> None:
    async with StrictTrainer() as first:
        with pytest.raises(OSError, match="cannot listen"):
            async with StrictTrainer(grpc_port=first.grpc_port):
                pass
    async with StrictTrainer(grpc_port=None) as trainer:
        with pytest.raises(ValueError, match="does not listen"):
            _ = trainer.grpc_target
