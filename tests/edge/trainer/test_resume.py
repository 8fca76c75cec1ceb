"""After a restart, a new sampler continues a conversation of a trainer or engine: ledger and masks are as without the restart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1 import spec_pb2
from rollout_server import assembly, tool
from rollout_server.core.limits import Limits
from rollout_server.core.machine import LimitReached, Machine
from rollout_server.core.message import Message, tool_calls
from rollout_server.core.record import Answered, Appended, Asked
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.runtime.ports import CompletionRequest, OpenSampler, Sampler
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, OpenaiEngine, SglangEngine, VllmEngine, serving

QUESTION = {"role": "user", "content": "What is 5 + 3?"}
SCRIPT = Script(
    (
        ScriptedReply(content="Adding.", tool_calls=(tool_call("call00001", "add", '{"a":5,"b":3}'),)),
        ScriptedReply(content="Cut off", cut=True),
        ScriptedReply(content="Sixteen.", tool_calls=(tool_call("call00002", "add", '{"a":8,"b":8}'),)),
        ScriptedReply(content="The end."),
        ScriptedReply(content="Still here."),
    )
)
TURNS = len(SCRIPT.lines)
CREATED = 981_173_106.0
"""A date in 2001, long before any of these tests runs."""
DATED = (
    "{{- '<|im_start|>system\\nToday is ' ~ strftime_now('%A, %d %B %Y') ~ '.<|im_end|>\\n' -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' ~ message.role ~ ' ' ~ strftime_now('%A') ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' ~ strftime_now('%A') ~ '\\n' -}}{%- endif -%}"
)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def wire_tool() -> Mapping[str, Any]:
    parameters = json.loads(add.parameters_json_schema)
    return {"type": "function", "function": {"name": "add", "description": add.description, "parameters": parameters}}


@dataclass
class Talk:
    """A conversation whose sampler is replaced by a new one before some turns, as after a restart of the server."""

    open: OpenSampler
    spec: Spec
    uid: str
    turns: list[tuple[Asked, Answered]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    async def run(self, *restarts: int) -> Machine:
        machine = Machine(self.uid, self.spec.messages, Limits())
        sampler = self.open(self.uid, self.spec, [add])
        for number in range(TURNS):
            if number in restarts:
                sampler = self.open(self.uid, self.spec, [add])
                for asked, answered in self.turns:
                    sampler.resume(asked, answered)
            await self.turn(machine, sampler)
        return machine

    async def turn(self, machine: Machine, sampler: Sampler) -> None:
        main, asked = machine.main, machine.request_completion()
        assert not isinstance(asked, LimitReached)
        last = main.last_completion, main.turn_messages, main.line
        request = CompletionRequest(asked, main.messages, *last, note=self.note, created=CREATED)
        machine.accept(asked)
        *_, answered = machine.accept(await sampler.sample(request))
        assert isinstance(answered, Answered)
        self.turns.append((asked, answered))
        calls = tool_calls(answered.message.fields())
        heard = [{"role": "tool", "tool_call_id": call.id, "content": "8"} for call in calls]
        messages = heard or [{"role": "user", "content": "And twice that?"}]
        machine.accept(Appended(tuple(Message.write(message) for message in messages)))

    def note(self, code: str, text: str) -> None:
        self.notes.append((code, text))


def ledger(machine: Machine) -> object:
    """All tokens with their authors."""
    return [
        (
            segment.id,
            list(segment.ids()),
            repr(list(segment.logprobs())),
            [(span.start, span.stop, span.author, span.reason, span.turn) for span in segment.spans],
        )
        for segment in machine.ledger.segments
    ]


@dataclass
class Openers:
    """Makes the samplers of new processes: each has its own connections, caches and tokenizers."""

    stack: AsyncExitStack
    templates: Mapping[str, Path]

    async def process(self) -> OpenSampler:
        settings = Settings(_env_file=None, retries=0)
        lookup = CheckedLookup(TargetRules.parse("", loopback=True))
        client = assembly.http_client(lookup, settings)
        self.stack.push_async_callback(client.close)
        channels = Channels(lookup, ClientTls(None))
        self.stack.push_async_callback(channels.close)
        directories = {"toy": TOY_TOKENIZER, "dated": TOY_TOKENIZER}
        tokenizers = Tokenizers(
            LoaderSettings(directories=directories, templates=self.templates, local_files_only=True)
        )
        self.stack.push_async_callback(tokenizers.close)
        return assembly.trainers(client, channels, tokenizers, assembly.make_streams(settings), settings).open


@pytest.fixture
async def openers(tmp_path: Path) -> AsyncIterator[Openers]:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    async with AsyncExitStack() as stack:
        yield Openers(stack, {"dated": template})


def a_spec(target: Target, rollout_id: str, tokenizer: str | None, *, tokens: bool = False) -> Spec:
    mode = spec_pb2.TOKEN_MODE_TOKENS if tokens else spec_pb2.TOKEN_MODE_MESSAGES
    return Spec(
        rollout_id=rollout_id,
        messages=(Message.write(QUESTION),),
        completions=target,
        sampling=Sampling(temperature=1.0, max_tokens=64),
        tokenizer=None if tokenizer is None else TokenizerName(tokenizer),
        token_mode=mode,
    )


async def check(openers: Openers, spec: Callable[[str], Spec], *, masked: bool = False) -> list[Talk]:
    """Compare a conversation without a restart with those that have one before each turn, and before two of them."""
    talks = []
    for number, restarts in enumerate([(), *((turn,) for turn in range(1, TURNS)), (2, 4)]):
        opened = [await openers.process() for _ in range(1 + len(restarts))]

        def open_next(uid: str, of: Spec, tools: Sequence[Any], processes: list[OpenSampler] = opened) -> Sampler:
            return processes.pop(0)(uid, of, tools)

        talk = Talk(open_next, spec(f"r{number}"), f"u{number}")
        machine = await talk.run(*restarts)
        talks.append((talk, ledger(machine)))
    undisturbed, expected = talks[0]
    for talk, found in talks[1:]:
        assert found == expected
        assert [answered.mask_length for _, answered in talk.turns] == [a.mask_length for _, a in undisturbed.turns]
        assert [answered.attempts for _, answered in talk.turns] == [a.attempts for _, a in undisturbed.turns]
        assert [answered.notes for _, answered in talk.turns] == [a.notes for _, a in undisturbed.turns]
    if masked:
        assert [answered.mask_length for _, answered in undisturbed.turns][1:] != [None] * (TURNS - 1)
    return [talk for talk, _ in talks]


@pytest.mark.parametrize("renders", [{}, {"parse_arguments": True}, {"render_tools": False}])
async def test_a_trainer_that_verifies_masks(openers: Openers, renders: Mapping[str, bool]) -> None:
    async with StrictTrainer(script=SCRIPT, tools=[wire_tool()], **renders) as trainer:
        await check(openers, lambda name: a_spec(Target(trainer.url, Dialect.HTTP_MASKED), name, "toy"), masked=True)
        assert len({len(verdict.refusals) for verdict in trainer.verdicts()}) == 1


async def test_a_trainer_that_derives_masks(openers: Openers) -> None:
    async with StrictTrainer(script=SCRIPT, tools=[wire_tool()], dialect=TrainerDialect.PLAIN) as trainer:
        await check(openers, lambda name: a_spec(Target(trainer.url, Dialect.HTTP_PLAIN), name, None))


@pytest.mark.parametrize("tokens", [False, True])
async def test_a_grpc_trainer(openers: Openers, tokens: bool) -> None:
    async with StrictTrainer(script=SCRIPT, tools=[wire_tool()]) as trainer:
        target = Target(f"grpc://{trainer.grpc_target}", Dialect.GRPC)
        await check(openers, lambda name: a_spec(target, name, "toy" if tokens else None, tokens=tokens))
        assert all(not verdict.refusals for verdict in trainer.verdicts())


SAYS = ["It is 8.", "Sixteen.", "Thirty two.", "The end.", "Still here."]


@pytest.mark.parametrize(
    ("engine", "dialect", "tokenizer", "tokens"),
    [
        (VllmEngine, Dialect.VLLM, "toy", True),
        (VllmEngine, Dialect.VLLM, "dated", True),
        (VllmEngine, Dialect.VLLM, "toy", False),
        (SglangEngine, Dialect.SGLANG, "toy", True),
        (SglangEngine, Dialect.SGLANG, "dated", True),
        (SglangEngine, Dialect.SGLANG, None, False),
        (OpenaiEngine, Dialect.OPENAI, None, False),
    ],
)
async def test_an_engine(openers: Openers, engine: Any, dialect: Dialect, tokenizer: str | None, tokens: bool) -> None:
    # Each conversation gets the completions from the first one on.
    model = EngineModel([text for _ in range(TURNS + 1) for text in SAYS])
    served = engine(model)
    async with serving(served):
        target = Target(served.url, dialect, model=MODEL)
        await check(openers, lambda name: a_spec(target, name, tokenizer, tokens=tokens))
    if tokenizer == "dated":
        prompt = model.tokenizer.decode(model.seen[-1].prompt)
        assert prompt.count("Saturday") == 2 + 2 * TURNS - 1
        assert "03 February 2001" in prompt
