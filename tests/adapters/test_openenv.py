"""`rollout_client.adapters.openenv` with OpenEnv's own classes and TRL's asynchronous worker (trl.experimental.async_grpo)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import queue
import re
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import PartialState
from datasets import Dataset
from openenv.core.harness import TrainableSession, TrainingTrace
from openenv.core.harness.capture.upstream import training_sampling
from osmosis.rollout.v1.rollout_service_pb2 import Rollout
from rollout_client import Client, Target
from rollout_client.adapters.openenv import RolloutSession, RolloutSessionFactory
from rollout_client.adapters.openenv_trace import training_trace
from rollout_client.errors import RolloutFailed
from rollout_client.export import to_trl
from rollout_client.samples import SampleSpan, TrainingSample, failure_class_of
from rollout_client.trainer import Finished, Generated, Trainer, Turn, parsers
from transformers import AutoTokenizer
from trl.experimental import async_grpo
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_rollout_worker
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample, TrainingSequence, _chain_to_sequences
from trl.experimental.async_grpo.openenv_harness import (
    CaptureContractError,
    HarnessRolloutWorker,
    _HarnessRolloutLoop,
    _turns_from_training_trace,
)

from tests.adapters.conftest import program
from tests.adapters.scenarios import (
    END,
    ROLLOUTS,
    ROOT,
    SCENARIOS,
    TOY,
    Script,
    decode,
    logprobs_of,
    messages,
    metadata,
)

pytestmark = pytest.mark.timeout(300)
"""TRL's worker imports torch in a process of its own, which takes minutes on a busy machine."""
SAMPLING = training_sampling({"temperature": 1.0, "top_p": 1.0, "top_k": 0})
"""What TRL's worker passes to the factory."""
PAGE = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")


def trainer_of(server: str, script: Script, **model: Any) -> Trainer:
    async def generate(turn: Turn) -> Generated:
        return script.generate(turn)

    return Trainer(
        server, **{"generate": generate, "decode": decode, "parse": parsers.hermes, "end_ids": {END}, **model}
    )


def task(name: str, seed: int = 0) -> dict[str, Any]:
    return {"messages": messages(name, seed), "metadata": metadata(name, seed)}


def agent_of(name: str) -> str:
    return SCENARIOS[name].agent if name in SCENARIOS else "scenarios"


Factory = Callable[..., RolloutSessionFactory]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def factory(server: str, script: Script) -> Iterator[Factory]:
    """Create a factory whose trainer is the script; it is closed after the test."""
    made: list[RolloutSessionFactory] = []

    def make(agent: str = "scenarios", num_generations: int = 2, **fields: Any) -> RolloutSessionFactory:
        connect = partial(trainer_of, server, script, **fields.pop("model", {}))
        fields = {"agent": agent, "tokenizer": "toy", "sampling": SAMPLING, **fields}
        made.append(RolloutSessionFactory(connect, num_generations=num_generations, **fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


def finished_of(session: RolloutSession) -> Finished:
    return session._rollout.result()


def sequences(trace: TrainingTrace) -> list[TrainingSequence]:
    """The rows that TRL makes of a trace. 0 is the threshold of its worker for agents that own their loop."""
    return _chain_to_sequences(_turns_from_training_trace(trace), "any", 0)[0]


def sampled_turns(script: Script, uid: str) -> list[tuple[list[int], list[int], list[float]]]:
    found = sorted(
        (each for each in script.sampled if each.uid == uid), key=lambda each: (int(each.segment), each.turn)
    )
    return [(list(each.prompt_ids), list(each.ids), logprobs_of(each.ids, len(each.prompt_ids))) for each in found]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "cancelled"])
def test_a_scenario_is_a_trace_and_the_rows_of_trl(name: str, factory: Factory, script: Script) -> None:
    sessions = [factory(agent_of(name)).create(task(name), seed=0) for _ in range(1)]
    (session,) = sessions
    assert isinstance(session, TrainableSession)
    trains = SCENARIOS[name].end == "stop"
    if trains:
        assert session.wait_for_completion() == 0
    else:
        with pytest.raises(RolloutFailed) as failed:
            session.wait_for_completion()
        assert failed.value.failure_class == SCENARIOS[name].failure_class

    trace = session.fetch_training_trace()
    found = [(each.prompt_token_ids, each.completion_token_ids, each.per_token_logps) for each in trace.turns]
    uid = finished_of(session).uid
    wanted = sampled_turns(script, uid)
    assert found == [(prompt, ids, values if trains else [0.0] * len(ids)) for prompt, ids, values in wanted]
    assert [each.loss_mask for each in trace.turns] == [
        [0] * len(prompt) + [int(trains)] * len(ids) for prompt, ids, _ in wanted
    ]
    assert TrainingTrace.model_validate_json(trace.model_dump_json()) == trace  # OpenEnv's validators, in strict mode

    rows = [] if not trains else list(script.expected(uid).values())
    assert [(each.input_ids, each.completion_mask, each.old_log_probs) for each in sequences(trace)] == [
        (
            [*row.prompt_ids, *row.response_ids],
            [0] * len(row.prompt_ids) + row.response_mask,
            [0.0] * len(row.prompt_ids) + row.logprobs,
        )
        for row in rows
    ]
    if SCENARIOS[name].rows and trains:
        assert [(row.response_ids, row.response_mask) for row in rows] == SCENARIOS[name].responses()
    verified = session.verify([])
    assert verified.done
    assert verified.env_reward == (float(len(wanted)) if trains else None)
    session.close()


def test_completions_of_a_further_model_are_in_no_trace_of_a_rollout() -> None:
    spans = (SampleSpan("other", "prompt", 1, 0, 1), SampleSpan("model", None, 1, 1, 2))
    own = TrainingSample("0", [1], [2], [1], [-0.5], spans)
    critic = replace(own, segment_id="1", model="critic")
    finished = Finished(Rollout(), (critic, own), None, False, (replace(critic, trainable=False),))
    (turn,) = training_trace(finished).turns
    assert (turn.node_id, turn.metadata["model"]) == ("/0/1", "")


def test_random_rollouts_train_each_sampled_token_at_most_once(factory: Factory, script: Script) -> None:
    """Some of the rollouts are of an agent that rewrites its history. Checked: rows, order of groups and policy versions."""
    groups = ROLLOUTS // 5 // 4
    ends, rows = Counter[str](), 0
    for part in range(5):
        agent, script.version = ("scenarios", "drifting")[part % 2], str(part)
        sessions = factory(agent, 4)
        script.sampled.clear()
        created = [
            [sessions.create(task("random", groups * part + each), seed=each) for _ in range(4)]
            for each in range(groups)
        ]
        for group in created:
            for session in group:
                with contextlib.suppress(RolloutFailed):
                    session.wait_for_completion(120)
            finished = [finished_of(each) for each in group]
            assert len({each.group_id for each in finished}) == 1
            assert [each.rollout.spec.group_index for each in finished] == [0, 1, 2, 3]
            for each, session in zip(finished, group, strict=True):
                ends[each.end] += 1
                rows += check_rows(each, session.fetch_training_trace(), script)
                session.close()
        sessions.close()
    assert sum(ends.values()) == ROLLOUTS
    assert min(ends["stop"], ends["failure"]) > ROLLOUTS // 20
    assert rows > ROLLOUTS


def check_rows(finished: Finished, trace: TrainingTrace, script: Script) -> int:
    """Check the rows of a rollout against what was sampled, and return their number."""
    sampled = {(each.prompt_ids, each.ids): each for each in script.sampled if each.uid == finished.uid}
    seen = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for turn in trace.turns:
        key = (tuple(turn.prompt_token_ids), tuple(turn.completion_token_ids))
        seen[key] += 1
        assert sampled[key].version == script.version
        assert set(turn.metadata["policy_versions"]) == {script.version}
    # Two turns of a rollout may have equal prompts and completions, so the records are counted, too.
    records = Counter((each.prompt_ids, each.ids) for each in script.sampled if each.uid == finished.uid)
    assert seen == records, "a completion is missing, or is there twice"
    trained = sequences(trace)
    masks = [mask for turn in trace.turns for mask in turn.loss_mask]
    assert sum(sum(each.completion_mask) for each in trained) == sum(masks)
    assert sum(masks) == sum(sum(each.response_mask) for each in finished.samples)
    assert not masks.count(1) or finished.end == "stop"
    return len(trained)


@pytest.mark.parametrize("on_stale", ["keep", "mask", "split"])
def test_completions_of_several_policies(on_stale: str, factory: Factory, script: Script) -> None:
    """Half of the completions are aborted and resumed under a newer policy. Tokens that are too old do not train; none is lost."""
    whole: dict[tuple[str, int], list[int]] = {}

    async def generate(turn: Turn) -> Generated:
        step, start = len(script.sampled) // 40, len(turn.ids) - turn.resumed
        if not turn.resumed:
            whole[turn.uid, turn.turn] = list(script.generate(turn).ids)
        ids, aborts = whole[turn.uid, turn.turn][turn.resumed :], not turn.resumed and len(script.sampled) % 2 == 0
        ids = ids[: len(ids) // 2] if aborts else ids
        logprobs = logprobs_of([0] * turn.resumed + ids, start)[turn.resumed :]
        return Generated(ids, logprobs, "abort" if aborts else "stop", f"v{step}", step)

    sessions = factory(num_generations=1, model={"generate": generate}, max_lag=1, on_stale=on_stale)
    stale = resumed = 0
    for session in [sessions.create(task("random", seed)) for seed in range(60)]:
        with contextlib.suppress(RolloutFailed):
            session.wait_for_completion(60)
        finished, trace = finished_of(session), session.fetch_training_trace()
        assert finished.mismatch is None
        sampled: dict[tuple[str, int], list[int]] = {}
        for turn in sorted(trace.turns, key=lambda each: len(each.prompt_token_ids)):
            key = (finished.uid, turn.metadata["turn"])
            sampled.setdefault(key, []).extend(turn.completion_token_ids)
            resumed += len(turn.metadata["policy_steps"]) > 1 or len(sampled[key]) > len(turn.completion_token_ids)
            newest = finished.rollout.outcome.policy_step
            if sum(turn.loss_mask) and on_stale != "keep":
                assert newest - max(turn.metadata["policy_steps"]) <= 1
            if turn.metadata["untrainable_reason"] == "stale":
                assert (on_stale, sum(turn.loss_mask)) == ("split", 0)
        generated = list(whole.items())  # at once: the other sessions still add to it
        assert sampled == {key: ids for key, ids in generated if key[0] == finished.uid}
        for each in (*finished.samples, *finished.untrainable):
            reasons = {each.untrainable_reason, *(span.reason for span in each.spans or ())}
            stale += "stale" in reasons
        rows = sequences(trace)
        assert sum(sum(each.completion_mask) for each in rows) == sum(
            sum(each.response_mask) for each in finished.samples
        )
        for row in rows:
            for start, stop in runs(row.completion_mask):
                assert row.old_log_probs[start:stop] == logprobs_of(row.input_ids[start:stop], start)
    assert resumed > 20
    assert bool(stale) == (on_stale != "keep")


def recorded_trainer(server: str, path: str, seconds: float = 0) -> Trainer:
    """The trainer in the worker's process. It appends each completion to a file, as prompt and completion, and takes so long."""
    script = Script(version="7")

    def record(*ids: Sequence[int]) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps([list(each) for each in ids]) + "\n")

    async def generate(turn: Turn) -> Generated:
        generated = script.generate(turn)
        record(turn.ids, generated.ids)
        await asyncio.sleep(seconds)
        return generated

    return trainer_of(server, script, generate=generate)


def worker_of(
    factory: Callable[..., RolloutSessionFactory], tasks: Sequence[Any], **arguments: Any
) -> HarnessRolloutWorker:
    """TRL's worker, in a process of its own. It needs no vLLM, because the trainer of the factory generates."""
    PartialState()  # as in a trainer; the logger of the worker needs it
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.response_schema = {"type": "object"}  # TRL knows none for the toy template; it is not used
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
        return HarnessRolloutWorker(
            harness_session_factory=factory,
            model_name="toy",
            dataset=Dataset.from_list([{"prompt": each} for each in tasks]),
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[END],
            **{"num_generations": 4, "max_inflight_tasks": 32, "temperature": 1.0, **arguments},
        )


def samples_of(worker: HarnessRolloutWorker, groups: int) -> list[RolloutSample]:
    """Collect the samples of the first groups. A group is scored within a few groups of the one before it."""
    found: list[RolloutSample] = []
    while not found or found[-1].group_id < groups + 32:
        try:
            found.append(worker.rollout_buffer.get(timeout=1))
        except queue.Empty:
            worker.check_health(300)
    return [each for each in found if each.group_id < groups]


NAMES = ("parallel", "fork", "failed", "failed_early", "truncated")


def test_the_worker_of_trl_makes_samples_of_the_sessions(server: str, tmp_path: Path) -> None:
    path, version = tmp_path / "sampled.jsonl", 3
    tasks = [task(name) for name in NAMES] + [task("random", seed) for seed in range(20)]
    connect = partial(recorded_trainer, server, str(path))
    worker = worker_of(
        partial(RolloutSessionFactory, connect, num_generations=4, agent="scenarios", tokenizer="toy"), tasks
    )
    worker.update_model_version(version)
    worker.start()
    try:
        samples = samples_of(worker, len(tasks))
    finally:
        worker.stop()

    # Group sizes: rows of a scenario times rollouts. A failed rollout has none: it cannot be scored.
    counts = Counter(each.group_id for each in samples)
    rows = {name: len(SCENARIOS[name].rows) or 1 for name in NAMES}
    assert [counts[index] for index in range(len(NAMES))] == [
        0 if SCENARIOS[name].end == "failure" else 4 * rows[name] for name in NAMES
    ]
    assert all(each.prompt == tasks[each.group_id] and each.model_version == version for each in samples)
    # All rollouts of a scripted group have the same reward, so no advantage. Those of a random one have the number of turns.
    assert {each.metrics["reward"] for each in samples if each.group_id == 0} == {3.0}
    assert {each.advantage for each in samples if each.group_id < len(NAMES)} == {0.0}
    assert any(each.advantage for each in samples)

    sampled = Counter((tuple(prompt), tuple(ids)) for prompt, ids in map(json.loads, path.read_text().splitlines()))
    for each in samples:
        ids = each.input_ids.tolist()
        for start, stop in runs(each.completion_mask.tolist()):
            key = (tuple(ids[:start]), tuple(ids[start:stop]))
            sampled[key] -= 1
            assert sampled[key] >= 0, "a token trains that was not sampled, or it trains twice"
            assert each.old_log_probs[start:stop].tolist() == logprobs_of(key[1], start)
        assert not each.old_log_probs[each.completion_mask == 0].any()
    check_batches(samples)


def runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = [
        index for index in range(len(mask) + 1) if (mask[index - 1 : index] or [0]) != (mask[index : index + 1] or [0])
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_batches(samples: Sequence[RolloutSample]) -> None:
    """Check what TRL's trainer computes its loss on, with its own dataset, batcher and collator."""
    waiting: Any = queue.Queue()
    for each in samples:
        waiting.put(each)
    metrics: dict[str, list[Any]] = defaultdict(list)
    dataset = RolloutQueueDataset(waiting, lambda: samples[0].model_version, lambda _: None, 60, metrics)
    batch = DataCollatorForRollout(0).torch_call([next(iter(FixedCountBatcher(dataset, 1, len(samples))))])
    trained = batch["token_index"][0] >= 0
    assert int(trained.sum()) == sum(int(each.completion_mask.sum()) for each in samples)
    given = sorted(value for each in samples for value in each.old_log_probs[each.completion_mask == 1].tolist())
    assert sorted(batch["old_log_probs"][0][trained].tolist()) == given


async def without_logprobs(turn: Turn) -> Generated:
    return Generated([END])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"agent": "nobody"}, "nobody"),
        ({"completions": "http://localhost:1"}, "'completions' cannot be set"),
        ({"limits": {"time": "long"}}, "limits.time"),
        ({"model": {"generate": without_logprobs}}, "no logprobs"),
    ],
)
def test_what_cannot_run_stops_the_worker(fields: dict[str, Any], text: str, factory: Factory) -> None:
    session = factory(**fields).create(task("truncated"), seed=0)
    session.wait_for_completion(30)
    with pytest.raises(ValueError, match=text):
        session.fetch_training_trace()
    session.close()


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([(messages("truncated"), 0)] * 3, "more than num_generations=2 rollouts"),
        ([(messages("truncated"), 0), (messages("parallel"), 0)], "two different prompts"),
        ([(7, 0)], "a prompt must be"),
        ([({"prompt": "Hi."}, 0)], "must have the keys"),
        ([(messages("truncated"), each) for each in range(257)], "fewer than num_generations=2 sessions"),
    ],
)
def test_groups_that_do_not_fit(tasks: list[tuple[Any, int]], text: str, factory: Factory) -> None:
    sessions = factory()
    *_, last = [sessions.create(each, seed=seed) for each, seed in tasks]
    assert last.wait_for_completion(30) == 1
    with pytest.raises(ValueError, match=text):
        last.fetch_training_trace()


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CONVERSATION = [
    {"role": "user", "content": "What is 1 plus 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    {"role": "user", "content": "Scenario truncated 0."},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Scenario truncated 1."}]}]


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_datasets_adds_to_messages_is_not_sent(wrapped: bool, factory: Factory) -> None:
    """It gives messages, content parts and tool calls the keys of other rows, with the value None."""
    other = {"role": "assistant", "content": "Hi.", "name": "host", "tool_calls": [{**CALL, "index": 0}]}
    part = {"type": "image", "image": "a.png"}
    texts = Dataset.from_list([{"prompt": CONVERSATION}, {"prompt": [other]}])
    parts = Dataset.from_list([{"prompt": PARTS}, {"prompt": [{"role": "user", "content": [part]}]}])
    assert texts[0]["prompt"] != CONVERSATION
    assert parts[0]["prompt"] != PARTS
    for prompt, expected in ((texts[0]["prompt"], CONVERSATION), (parts[0]["prompt"], PARTS)):
        session = factory().create({"messages": prompt} if wrapped else prompt)
        assert session.initial_messages() == expected
        assert session.wait_for_completion(30) == 0


def test_sessions_without_a_seed_are_no_group(factory: Factory) -> None:
    sessions = factory()
    found = [sessions.create(messages("truncated")) for _ in range(3)]
    assert [each.wait_for_completion(30) for each in found] == [0, 0, 0]
    assert len({finished_of(each).group_id for each in found}) == 3


def test_the_time_limit_is_a_timeout_and_its_turns_train(factory: Factory) -> None:
    session = factory(limits={"time": 1}).create(task("cancelled"), seed=0)
    with pytest.raises(TimeoutError, match="time limit of 1 s"):
        session.wait_for_completion(30)
    (turn,) = session.fetch_training_trace().turns
    assert sum(turn.loss_mask) == len(turn.completion_token_ids)
    assert session.verify([]).env_reward is None


def test_a_group_is_cancelled_with_its_last_session(server: str, factory: Factory, script: Script) -> None:
    sessions = factory()
    first, second = (sessions.create(task("cancelled"), seed=0) for _ in range(2))
    with pytest.raises(TimeoutError):
        second.wait_for_completion(0.01)
    with pytest.raises(RuntimeError, match="has not finished"):
        second.fetch_training_trace()
    while len(script.sampled) < 2:
        threading.Event().wait(0.05)
    first.close()
    with pytest.raises(TimeoutError):  # it still runs
        second.wait_for_completion(0.3)
    second.close()
    with pytest.raises(RolloutFailed) as failed:
        second.wait_for_completion(30)
    assert failed.value.failure_class == "cancelled"
    with Client(server) as client:
        assert all(client.wait(each.uid, timeout=30).outcome.HasField("cancellation") for each in script.sampled)


def test_what_is_closed_leaves_nobody_waiting(factory: Factory) -> None:
    sessions = factory()
    closed = [sessions.create(task("cancelled"), seed=seed) for seed in range(20)]
    for each in closed:
        each.close()  # before its group has begun, or while the trainer connects
        each.close()
    running = sessions.create(task("cancelled"), seed=20)
    sessions.close()
    for each in (*closed, running):
        with pytest.raises(RolloutFailed, match="closed"):
            each.wait_for_completion(30)
    assert sessions.create(task("parallel"), seed=21).wait_for_completion(30) == 1


def test_tools_run_on_the_server(factory: Factory) -> None:
    session = factory().create(messages("truncated"), seed=0)
    assert session.initial_messages() == messages("truncated")
    assert session.list_tools() == []
    with pytest.raises(RuntimeError, match="leave out harness_adapter"):
        session.call_tool("add", {})


def test_arguments_of_the_factory() -> None:
    with pytest.raises(ValueError, match="num_generations"):
        RolloutSessionFactory("localhost:1", num_generations=0)
    with pytest.raises(TypeError, match="connect"):
        RolloutSessionFactory(7, num_generations=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling"):
        RolloutSessionFactory("localhost:1", num_generations=1, sampling="greedy")  # type: ignore[typeddict-item]


def test_an_engine_generates_without_a_trainer(server: str) -> None:
    """The server asks vLLM itself. The policy of TRL and the limit of tokens reach it."""
    with program("tests.adapters.engine") as url:
        sessions = RolloutSessionFactory(
            server,
            num_generations=2,
            max_tokens=64,
            agent="scenarios",
            tokenizer="toy",
            token_mode="tokens",
            completions=Target(url, "vllm", model="toy-model"),
            sampling=SAMPLING,
        )
        for name in ("parallel", "fork", "failed", "truncated"):
            found = [sessions.create(task(name), seed=0 if name == "parallel" else None) for _ in range(2)]
            for session in found:
                assert outcome_of(session) == SCENARIOS[name].end
                trace = session.fetch_training_trace()
                if SCENARIOS[name].rows and SCENARIOS[name].end == "stop":
                    assert [row_of(each) for each in sequences(trace)] == SCENARIOS[name].responses()
                spec = finished_of(session).rollout.spec
                assert json.loads(spec.sampling.extra_json)["top_k"] == -1
                assert spec.sampling.max_tokens == 64
                session.close()
        waiting = sessions.create(task("cancelled"))
        uid = ""
        with Client(server) as client:
            while not uid:
                uid = next((each.uid for each in client.list(state="running")), "")
            waiting.close()
            assert client.wait(uid, timeout=30).outcome.HasField("cancellation")
        sessions.close()


def outcome_of(session: RolloutSession) -> str:
    with contextlib.suppress(RolloutFailed):
        session.wait_for_completion(30)
    return finished_of(session).end


def row_of(sequence: TrainingSequence) -> tuple[list[int], list[int]]:
    """The response of a row, which begins with its first trained token."""
    start = sequence.completion_mask.index(1)
    return sequence.input_ids[start:], sequence.completion_mask[start:]


def loop_of(worker: HarnessRolloutWorker) -> _HarnessRolloutLoop:
    """The worker's loop, to be run in this process."""
    queues = {name: queue.Queue(64) for name in ("rollout_buffer", "metrics_queue", "exception_info_queue")}
    values = {name: getattr(worker, f"_{name}") for name in ("model_version_value", "heartbeat_value", "failed_event")}
    return _HarnessRolloutLoop(**worker._loop_kwargs, **queues, **values)


def test_the_worker_fails_with_the_reason(server: str, script: Script) -> None:
    """With the wrong name of an agent it would otherwise ask for sessions for ever, and the trainer would wait for samples."""
    connect = partial(trainer_of, server, script)
    worker = worker_of(
        partial(RolloutSessionFactory, connect, num_generations=4, agent="nobody", tokenizer="toy"), [task("fork")]
    )
    loop = loop_of(worker)
    with pytest.raises(CaptureContractError, match="nobody"):
        loop.run()
    loop._factory.close()
    worker._heartbeat_value.value = time.time()
    with pytest.raises(RuntimeError, match="child has failed"):
        worker.check_health(300)


@pytest.mark.heavy  # another process imports all frameworks
def test_the_rollouts_of_a_killed_worker_fail(server: str, tmp_path: Path) -> None:
    path = tmp_path / "sampled.jsonl"
    connect = partial(recorded_trainer, server, str(path), 3600)
    factory = partial(RolloutSessionFactory, connect, num_generations=2, agent="scenarios", tokenizer="toy")
    worker = worker_of(factory, [task("parallel")], num_generations=2, max_inflight_tasks=4)
    worker.start()
    while not path.exists() or len(path.read_text().splitlines()) < 4:
        worker.check_health(300)
        time.sleep(0.1)
    with Client(server) as client:
        uids = [each.uid for each in client.list(state="running")]
        assert len(uids) == 4
        # Not worker.stop() afterwards: the event that it sets waits for the killed process without end.
        worker._process.kill()
        classes = {failure_class_of(client.wait(uid, timeout=60).outcome) for uid in uids}
    assert classes == {"trainer"}


def test_rollout_verify_finds_nothing_fatal(factory: Factory, script: Script, tmp_path: Path) -> None:
    """Traces as they are, and the rows that TRL's GRPOTrainer takes of the same rollouts."""
    sessions = factory(num_generations=1)
    created = [
        sessions.create(task(name, seed)) for seed in range(20) for name in ("parallel", "fork", "random", "failed")
    ]
    finished = [finished_of(each) for each in created if outcome_of(each)]
    traces, rows = tmp_path / "traces.jsonl", tmp_path / "rows.json"
    traces.write_text("".join(each.fetch_training_trace().model_dump_json() + "\n" for each in created))
    rows.write_text(json.dumps(to_trl(finished, end_id=END)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for path, shape, count in ((traces, "openenv", len(script.sampled)), (rows, "trl", len(created))):
        command = [ROOT / ".venv/bin/rollout", "verify", path, "--tokenizer", "toy", "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        found = json.loads(ran.stdout)
        assert (ran.returncode, found["fatal"], found["rows"]) == (0, 0, {shape: count}), found["findings"]


def test_the_page(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet of the section on OpenEnv. The trainer, which needs a GPU, only checks its arguments."""
    section = next(part for part in PAGE.split("\n## ") if part.startswith("OpenEnv"))
    (snippet,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    AutoTokenizer.from_pretrained(TOY).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    given = []
    accepts = inspect.signature(AsyncGRPOTrainer.__init__)
    trainer = SimpleNamespace(train=lambda: None)
    monkeypatch.setattr(
        async_grpo,
        "AsyncGRPOTrainer",
        lambda *args, **named: given.append(accepts.bind(None, *args, **named)) or trainer,
    )
    with program("tests.adapters.engine") as url:
        changes = {
            "localhost:50051": server,
            "http://localhost:8000": url,
            'agent="calculator"': 'agent="scenarios"',
            "tokenizer=model": 'tokenizer="toy"',
            '"vllm", model=model': '"vllm", model="toy-model"',
            '"Qwen/Qwen3-8B"': '"model"',
            'AsyncGRPOConfig("out"': 'AsyncGRPOConfig("out", use_cpu=True, bf16=False',
        }
        for old, new in changes.items():
            assert old in snippet, old
            snippet = snippet.replace(old, new)
        found: dict[str, Any] = {"__name__": "__main__"}
        exec(snippet, found)
        (arguments,) = given
        assert arguments.arguments["rollout_worker"] is found["worker"]
        pickle.dumps(found["worker"]._loop_kwargs)  # as `worker.start()` does
        sessions = found["sessions"](sampling=SAMPLING)
        session = sessions.create(found["dataset"][0]["prompt"], seed=0, episode_id="0")
        assert session.wait_for_completion(60) == 0
        assert finished_of(session).rollout.spec.sampling.max_tokens == 512
        assert len(session.fetch_training_trace().turns) > 0
        sessions.close()
