"""Every client method against the real server, in an event loop and in threads."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import (
    AsyncClient,
    Client,
    Credentials,
    DeadlineExceeded,
    NotFinished,
    Outcome,
    Retry,
    Rollout,
    RolloutEvent,
    Unavailable,
    messages,
    samples,
)
from rollout_client.spec import rollout_spec

from tests.client.conftest import CALCULATOR_EVENTS, QUESTION, ServerAndTrainer
from tests.support.calculator_tools import calculator_tools
from tests.support.server_client import until

FINISHED = pb.ROLLOUT_STATE_FINISHED


def kinds(events: list[RolloutEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def is_right(outcome: Outcome | None) -> bool:
    """Assert the calculator's result, and a sample with mask values 0 and 1."""
    assert outcome is not None
    (sample,) = samples(outcome)
    return "16" in messages(outcome)[-1]["content"] and set(sample.response_mask) == {0, 1}


async def detached(client: AsyncClient, uid: str) -> bool:
    """Whether the rollout was cancelled after its client detached. Polls without attaching."""

    async def has_ended() -> bool:
        return (await client.get(uid)).state == FINISHED

    await until(has_ended)
    return (await client.get(uid)).outcome.cancellation.reason == "detached"


async def test_run_tells_everything_in_order(world: ServerAndTrainer, client: AsyncClient) -> None:
    run = client.run(**world.asked(), detail="full")
    started = await run.started()
    events = [event async for event in run]
    assert [event.sequence for event in events] == list(range(1, CALCULATOR_EVENTS + 1))
    assert (kinds(events)[0], kinds(events)[-1]) == ("accepted", "finished")
    assert [tool.name for tool in started.tools] == ["add", "subtract", "multiply", "divide"]
    assert (run.uid, run.last_sequence, started.attached) == (started.uid, CALCULATOR_EVENTS, False)
    assert is_right(run.outcome)
    assert [event async for event in run] == []
    assert run.outcome is not None
    (sample,), verdict = samples(run.outcome), world.trainer.verdict(started.rollout.spec.rollout_id)
    assert verdict.accepted
    assert sample.prompt_ids == list(verdict.sample.prompt_ids)
    assert sample.response_ids == list(verdict.sample.response_ids)
    assert sample.response_mask == list(verdict.sample.response_mask)


async def test_start_then_wait(world: ServerAndTrainer, client: AsyncClient) -> None:
    started = await client.start(**world.asked(request_id="one", labels={"run": "7"}, metadata={"k": 1}))
    again = await client.start(**world.asked(request_id="one", labels={"run": "7"}, metadata={"k": 1}))
    assert (started.attached, again.attached, again.uid) == (False, True, started.uid)
    rollout = await client.wait(started.uid, view="samples", timeout=60)
    assert rollout.state == FINISHED
    assert is_right(rollout.outcome)
    assert (rollout.spec.labels["run"], rollout.spec.metadata_json) == ("7", '{"k": 1}')
    assert messages(rollout.spec)[0]["content"] == QUESTION
    assert (await client.get(started.uid)).outcome.messages == []
    await client.acknowledge(started.uid)


async def test_watch_from_anywhere(world: ServerAndTrainer, client: AsyncClient) -> None:
    uid = (await client.start(**world.asked())).uid
    await client.wait(uid)
    everything = [event async for event in client.watch(uid, detail="messages")]
    for after in range(CALCULATOR_EVENTS + 1):
        assert [event async for event in client.watch(uid, after_sequence=after, detail="messages")] == everything[
            after:
        ]
    (only,) = [event async for event in client.watch(uid, detail="outcome")]
    assert only.finished.outcome.messages == everything[-1].finished.outcome.messages


async def test_run_attaches_after_what_was_seen(world: ServerAndTrainer, client: AsyncClient) -> None:
    first = [event async for event in client.run(**world.asked(request_id="one"))]
    again = client.run(**world.asked(request_id="one"), after_sequence=5)
    assert [event async for event in again] == first[5:]
    assert (await again.started()).attached
    nothing = client.run(**world.asked(request_id="one"), after_sequence=len(first))
    assert [event async for event in nothing] == []


async def test_list_turns_the_pages(world: ServerAndTrainer, client: AsyncClient) -> None:
    uids = [(await client.start(**world.asked(agent="gated", group_id=f"g{n % 2}"))).uid for n in range(5)]
    assert [rollout.uid async for rollout in client.list(page_size=2)] == uids[::-1]
    assert [rollout.uid async for rollout in client.list(group_id="g1")] == [uids[3], uids[1]]
    assert [rollout.uid async for rollout in client.list(uids=uids[:2], state="running")] == uids[1::-1]
    assert [rollout async for rollout in client.list(states=["finished", "queued"])] == []


async def test_cancel_one_a_group_and_all(world: ServerAndTrainer, client: AsyncClient) -> None:
    uids = [(await client.start(**world.asked(agent="gated", group_id=f"g{n % 2}"))).uid for n in range(5)]
    assert await client.cancel(uids[0], reason="first") == (uids[0],)
    assert (await client.wait(uids[0])).outcome.cancellation.reason == "first"
    assert await client.cancel(uids[0]) == ()
    assert set(await client.cancel(group_id="g1")) == {uids[1], uids[3]}
    assert set(await client.cancel(all=True)) == {uids[2], uids[4]}
    with pytest.raises(ValueError, match="nothing is selected"):
        await client.cancel()


async def test_what_the_server_is(client: AsyncClient) -> None:
    agents = await client.agents()
    assert [agent.name for agent in agents] == ["calculator", "gated", "measured"]
    assert [tool.name for tool in await client.tools()] == [tool.name for tool in await client.tools("calculator")]
    assert await client.tools("gated") == ()
    assert "http_masked" in (await client.server_info()).features


async def test_a_wait_that_is_over_knows_the_state(world: ServerAndTrainer, client: AsyncClient) -> None:
    uid = (await client.start(**world.asked(agent="gated"))).uid
    for timeout in (0, 0.1):
        with pytest.raises(NotFinished, match=uid) as caught:
            await client.wait(uid, timeout=timeout)
        assert caught.value.rollout is not None
        assert caught.value.rollout.state == pb.ROLLOUT_STATE_RUNNING
    with pytest.raises(TimeoutError):
        await client.wait(uid, timeout=0)
    world.gated.gate.set()
    assert (await client.wait(uid)).state == FINISHED


async def test_the_time_of_a_stream_ends_the_stream_only(world: ServerAndTrainer, client: AsyncClient) -> None:
    run = client.run(**world.asked(agent="gated"), timeout=0.3)
    with pytest.raises(DeadlineExceeded):
        async for _ in run:
            pass
    assert (await client.get(run.uid)).state == pb.ROLLOUT_STATE_RUNNING
    with pytest.raises(DeadlineExceeded):
        [event async for event in client.watch(run.uid, timeout=0.1)]


async def test_fifty_at_once(world: ServerAndTrainer, client: AsyncClient) -> None:
    async def one(number: int) -> Outcome | None:
        run = client.run(**world.asked(rollout_id=f"r/{number}"), detail="full")
        assert [event.sequence async for event in run] == list(range(1, CALCULATOR_EVENTS + 1))
        return run.outcome

    outcomes = await asyncio.gather(*(one(number) for number in range(50)))
    assert all(is_right(outcome) for outcome in outcomes)
    assert len([rollout async for rollout in client.list(page_size=7)]) == 50


@pytest.fixture
def threads(world: ServerAndTrainer) -> Iterator[Client]:
    """A synchronous client of the server."""
    with Client(world.address) as client:
        yield client


async def test_a_ready_spec(world: ServerAndTrainer, client: AsyncClient) -> None:
    spec = rollout_spec(world.asked(rollout_id="ready"))
    first = await client.start(spec, request_id="one")
    assert [event async for event in client.run(spec, request_id="one")][-1].HasField("finished")
    assert (first.rollout.spec.rollout_id, (await client.start(spec)).attached) == ("ready", False)


async def test_the_prompt_of_a_rollout_that_is_not_started(
    world: ServerAndTrainer, client: AsyncClient, threads: Client
) -> None:
    credentials = Credentials(completions_bearer="hush")  # arguments of `start` can be passed as they are
    rendered = await client.render_prompt(**world.asked(request_id="one", credentials=credentials))
    assert [rollout async for rollout in client.list()] == []
    assert rendered == await client.render_prompt(rollout_spec(world.asked()))
    assert rendered == await asyncio.to_thread(threads.render_prompt, **world.asked(completions=None))
    assert rendered.messages == [{"role": "user", "content": QUESTION}]
    assert rendered.tools == calculator_tools()
    run = client.run(**world.asked(), detail="full")  # this trainer renders for itself
    async for _ in run:
        pass
    assert run.outcome is not None
    assert samples(run.outcome)[0].prompt_ids == rendered.ids


async def test_threads_do_the_same(world: ServerAndTrainer, threads: Client) -> None:
    def everything() -> Rollout:
        run = threads.run(**world.asked(), detail="full")
        assert [event.sequence for event in run] == list(range(1, CALCULATOR_EVENTS + 1))
        assert is_right(run.outcome)
        assert run.started().uid == run.uid
        assert list(run) == []
        started = threads.start(**world.asked())
        watched = list(threads.watch(started.uid, after_sequence=2))
        assert [event.sequence for event in watched] == list(range(3, CALCULATOR_EVENTS + 1))
        assert list(threads.watch(started.uid, after_sequence=CALCULATOR_EVENTS)) == []
        assert [rollout.uid for rollout in threads.list(page_size=1)] == [started.uid, run.uid]
        assert [agent.name for agent in threads.agents()] == ["calculator", "gated", "measured"]
        assert [tool.name for tool in threads.tools()] == [tool.name for tool in started.tools]
        assert threads.server_info().max_running > 0
        threads.acknowledge(started.uid)
        assert threads.cancel(started.uid) == ()
        gated = threads.start(**world.asked(agent="gated"))
        with pytest.raises(NotFinished):
            threads.wait(gated.uid, timeout=0.1)
        with pytest.raises(DeadlineExceeded):
            list(threads.watch(gated.uid, timeout=0.1))
        assert threads.cancel(rollout_id=gated.rollout.spec.rollout_id, reason="enough") == (gated.uid,)
        assert threads.get(gated.uid).spec == gated.rollout.spec
        return threads.wait(gated.uid, timeout=60)

    assert (await asyncio.to_thread(everything)).outcome.cancellation.reason == "enough"


async def test_threads_share_a_client(world: ServerAndTrainer, threads: Client) -> None:
    def one(number: int) -> bool:
        run = threads.run(**world.asked(rollout_id=f"r/{number}"), detail="full")
        assert [event.sequence for event in run] == list(range(1, CALCULATOR_EVENTS + 1))
        return is_right(run.outcome)

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(50) as pool:
        assert all(await asyncio.gather(*(loop.run_in_executor(pool, one, number) for number in range(50))))


async def test_a_stream_is_left_with_its_loop(world: ServerAndTrainer, client: AsyncClient, threads: Client) -> None:
    """Breaking out of a loop detaches, even if no stream is closed explicitly."""
    grace = world.asked(agent="gated", cancel_after_detach=0)
    async for _ in client.run(**grace):
        break

    def in_a_thread() -> None:
        for _ in threads.run(**grace):
            break

    await asyncio.to_thread(in_a_thread)
    assert [await detached(client, rollout.uid) async for rollout in client.list()] == [True, True]


async def test_a_stream_is_left_with_its_block(world: ServerAndTrainer, client: AsyncClient, threads: Client) -> None:
    grace = world.asked(agent="gated", cancel_after_detach=0)
    async with client.run(**grace) as run:
        await anext(run)
    assert [event async for event in run] == []
    assert await detached(client, run.uid)

    def in_a_thread() -> str:
        with threads.run(**grace) as run:
            next(run)
        assert list(run) == []
        return run.uid

    uid = await asyncio.to_thread(in_a_thread)
    assert await detached(client, uid)


async def test_a_stream_is_closed_from_another_thread(
    world: ServerAndTrainer, client: AsyncClient, threads: Client
) -> None:
    run = threads.run(**world.asked(agent="gated", cancel_after_detach=0))
    reached = threading.Event()

    def read() -> list[RolloutEvent]:
        events = [next(run)]
        reached.set()
        return events + list(run)

    reading = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.to_thread(reached.wait)
    await asyncio.to_thread(run.close)
    assert kinds(await reading)[0] == "accepted"
    assert await detached(client, run.uid)


async def test_a_stream_is_closed_from_another_task(world: ServerAndTrainer, client: AsyncClient) -> None:
    run = client.run(**world.asked(agent="gated", cancel_after_detach=0))
    assert (await anext(run)).sequence == 1

    async def rest() -> list[RolloutEvent]:
        return [event async for event in run]

    reading = asyncio.create_task(rest())
    await asyncio.sleep(0.1)
    await run.aclose()
    assert await reading == []
    assert await detached(client, run.uid)


async def test_a_task_that_is_cancelled_as_its_stream_is_closed_stays_cancelled(
    world: ServerAndTrainer, client: AsyncClient
) -> None:
    run = client.run(**world.asked(agent="gated"))
    await run.started()
    watch = client.watch(run.uid, after_sequence=1)
    reading = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.1)
    reading.cancel()
    await watch.aclose()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_channel_that_its_user_closes_breaks_its_calls(world: ServerAndTrainer, client: AsyncClient) -> None:
    """It acts like a broken connection; the waiting task is not cancelled."""
    uid = (await client.start(**world.asked(agent="gated"))).uid
    channel = grpc.aio.insecure_channel(world.address)
    of_channel = AsyncClient(channel, retry=Retry(patience=0))
    waiting = (
        asyncio.create_task(of_channel.wait(uid)),
        asyncio.ensure_future(anext(of_channel.watch(uid, after_sequence=1))),
    )
    await asyncio.sleep(0.1)
    await channel.close()
    for task in waiting:
        with pytest.raises(Unavailable):
            await task


INTERRUPTED = """
import sys
from rollout_client import Client
with Client(sys.argv[1]) as client:
    try:
        for event in client.run(messages=[{"role": "user", "content": "x"}], completions=sys.argv[2], tokenizer="toy",
                                agent="gated", rollout_id="r", cancel_after_detach=0):
            print(event.sequence, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        input()
"""


def heeds_ctrl_c() -> None:
    """Restore SIGINT: a shell's background job ignores it, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def test_ctrl_c_leaves_the_stream(world: ServerAndTrainer, client: AsyncClient) -> None:
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTED, world.address, world.trainer.url),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        preexec_fn=heeds_ctrl_c,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGINT)
    assert await process.stdout.readline() == b"interrupted\n"
    (rollout,) = [each async for each in client.list(rollout_id="r")]
    assert await detached(client, rollout.uid)
    _, errors = await process.communicate(b"\n")
    assert (process.returncode, b"Traceback" in errors) == (0, False), errors.decode()


async def test_an_event_that_nobody_waited_for_any_more_is_not_lost(
    world: ServerAndTrainer, client: AsyncClient
) -> None:
    run = client.run(**world.asked(agent="measured", metadata={"notes": 3}))
    sequences: list[int] = []
    given_up = 0
    while run.outcome is None:
        try:
            sequences.append((await asyncio.wait_for(anext(run), 0.05)).sequence)
        except TimeoutError:
            given_up += 1
            world.measured.permits.release()
    assert given_up >= 3
    assert sequences == [1, 2, 3, 4, 5]


async def test_a_closed_client_says_so(world: ServerAndTrainer) -> None:
    client = AsyncClient(world.address)
    uid = (await client.start(**world.asked(agent="gated"))).uid
    waiting = [
        asyncio.ensure_future(client.wait(uid)),
        asyncio.ensure_future(anext(client.watch(uid, after_sequence=1))),
    ]
    await asyncio.sleep(0.1)
    await client.aclose()
    for task in waiting:
        with pytest.raises(RuntimeError, match="client is closed"):
            await task
    with pytest.raises(RuntimeError, match="client is closed"):
        await client.get(uid)
    await client.aclose()


async def test_a_closed_client_of_threads_says_so(world: ServerAndTrainer) -> None:
    client = Client(world.address)
    started = await asyncio.to_thread(lambda: client.start(**world.asked(agent="gated")))
    waiting = [
        asyncio.create_task(asyncio.to_thread(client.wait, started.uid)),
        asyncio.create_task(asyncio.to_thread(lambda: list(client.watch(started.uid)))),
    ]
    await asyncio.sleep(0.1)
    await asyncio.to_thread(client.close)
    for task in waiting:
        with pytest.raises(RuntimeError, match="client is closed"):
            await task
    with pytest.raises(RuntimeError, match="client is closed"):
        client.get(started.uid)
    client.close()


async def test_a_task_that_is_cancelled_is_cancelled(world: ServerAndTrainer, client: AsyncClient) -> None:
    uid = (await client.start(**world.asked(agent="gated", cancel_after_detach=10))).uid
    waiting = [
        asyncio.ensure_future(client.wait(uid)),
        asyncio.ensure_future(anext(client.watch(uid, after_sequence=1))),
    ]
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
