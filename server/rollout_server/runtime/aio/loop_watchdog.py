"""Finds code that blocks the event loop, and logs its source line. While the loop is blocked, all rollouts wait.

The loop records a heartbeat, and a watchdog thread checks it. If a heartbeat is late, some code computes, sleeps or reads
without awaiting; the stack of the loop's thread shows which. On a busy machine heartbeats are late, too. But then the loop's
thread is in asyncio's own code, and nothing is logged.

The watchdog thread does not read that stack itself: under CPython 3.11, a process crashed while it read the frames of a running
thread. Instead it sends a signal, whose handler Python calls on the main thread. Without a handler, SIGURG is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import ClassVar

from rollout_server.runtime.aio.source_location import authors_frames

_log = logging.getLogger(__name__)
_REMEMBERED = 256
_QUIET_SECONDS = 60.0
"""A function that blocks the loop repeatedly is logged once per this time."""
_LONG = 10
"""Multiple of the threshold after which blocking code is logged while it still blocks."""
_WAITING = ("/asyncio/", "/selectors.py", "/uvloop/", "/loop_watchdog.py")
_SIGNAL = signal.SIGURG
# Files that run the loop. These frames, and those that called them, do not show which code blocks the loop.
_RUNNING = ("/asyncio/events.py", "/asyncio/base_events.py", "/asyncio/runners.py", "/uvloop/")


class LoopWatch:
    """Watches the running loop. Code that blocks it longer than `seconds` is logged when it returns, or earlier if it lasts.

    Only a loop of the main thread is watched, and only if the process does not use SIGURG otherwise.

    The loop's thread and the watchdog thread share `_beat` and `_found` without a lock. `_found` is one tuple that names the
    heartbeat it belongs to, so a stack found for an earlier heartbeat is never reported for a later one.
    """

    _watching: ClassVar[set[LoopWatch]] = set()

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._listen, name="loop watch", daemon=True)
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._found: tuple[float, traceback.StackSummary] | None = None
        self._stacks = MostFrequentStack()
        self._reported_beat = 0.0
        self._reported: dict[tuple[str, str], float] = {}

    def start(self) -> None:
        """Start watching. Call once, on the loop's thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, LoopWatch._on_signal):
            _log.debug("the event loop is not watched for code that blocks it: it needs the main thread and SIGURG")
            return
        signal.signal(_SIGNAL, LoopWatch._on_signal)
        self._watching.add(self)
        self._beat = time.monotonic()
        self._beat_once()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, without waiting for the thread to end."""
        self._stopped.set()
        self._watching.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _beat_once(self) -> None:
        """Record a heartbeat. If it is late, log the code that the watchdog thread found meanwhile."""
        now, found, interval = time.monotonic(), self._found, self._seconds / 4
        blocked = now - self._beat - interval
        if blocked > self._seconds and found is not None and found[0] == self._beat != self._reported_beat:
            self._report(found[1], f"was blocked for {1000 * blocked:.0f} ms")
        self._beat, self._found = now, None
        self._timer = asyncio.get_running_loop().call_later(interval, self._beat_once)

    def _listen(self) -> None:
        main = threading.main_thread().ident
        while main is not None and not self._stopped.wait(self._seconds / 4):
            beat, found = self._beat, self._found
            late = time.monotonic() - beat
            if late >= self._seconds / 2:
                signal.pthread_kill(main, _SIGNAL)
            if late > _LONG * self._seconds and found is not None and found[0] == beat != self._reported_beat:
                self._reported_beat = beat
                self._report(found[1], f"has been blocked for {1000 * late:.0f} ms")

    @staticmethod
    def _on_signal(number: int, frame: FrameType | None) -> None:
        """Note which code the main thread runs, for the loops whose heartbeat is late."""
        now = time.monotonic()
        late = [each for each in LoopWatch._watching if now - each._beat >= each._seconds / 2]
        stack = _stack_of(frame) if late else traceback.StackSummary()
        if _run_by_loop(stack):
            for each in late:
                each._found = (each._beat, each._stacks.add(each._beat, stack))

    def _report(self, stack: Sequence[traceback.FrameSummary], what: str) -> None:
        frames = _relevant_frames(stack)
        authors = authors_frames(frames)
        holder = (authors or frames)[-1]
        holder_key, now = _holder_key(holder), time.monotonic()
        if now - self._reported.get(holder_key, now - _QUIET_SECONDS) < _QUIET_SECONDS:
            return
        if len(self._reported) >= _REMEMBERED:
            self._reported.clear()
        self._reported[holder_key] = now
        text = "".join(traceback.format_list(list(frames))).rstrip()
        advice = "all rollouts wait for it. Use await, a thread or a process"
        where = f"{holder.filename}:{holder.lineno} in {holder.name}"
        # A warning only if an author's code blocks. On a busy machine, library code may be found here by chance.
        level = logging.WARNING if authors else logging.INFO
        _log.log(level, "the event loop %s at %s; %s:\n%s", what, where, advice, text)


class MostFrequentStack:
    """Chooses among the stacks that were found during one heartbeat: the one of the function that was found most often.

    The last stack would often be of code that runs for a moment after the blocking code, before the next heartbeat.
    """

    def __init__(self) -> None:
        self._beat = 0.0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._key = ("", "")
        self._chosen = traceback.StackSummary()

    def add(self, beat: float, stack: traceback.StackSummary) -> traceback.StackSummary:
        """Count a stack, and return the chosen one of this heartbeat."""
        if beat != self._beat:
            self._beat = beat
            self._counts.clear()
        frames = _relevant_frames(stack)
        key = _holder_key((authors_frames(frames) or frames)[-1])
        self._counts[key] += 1
        if key == self._key or self._counts[key] > self._counts[self._key]:
            self._key, self._chosen = key, stack
        return self._chosen


def _stack_of(frame: FrameType | None) -> traceback.StackSummary:
    """Return the stack of a frame without its source lines: to read them, Python checks the file of every frame for changes."""
    frames = [
        traceback.FrameSummary(each.f_code.co_filename, line, each.f_code.co_name, lookup_line=False)
        for each, line in traceback.walk_stack(frame)
    ]
    return traceback.StackSummary(reversed(frames))


def _holder_key(holder: traceback.FrameSummary) -> tuple[str, str]:
    return holder.filename, holder.name


def _relevant_frames(stack: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Return the frames from the author's first one on, or from the coroutine or callback that the loop runs."""
    ran = _run_by_loop(stack)
    authors = authors_frames(ran)
    return ran[ran.index(authors[0]) :] if authors else ran


def _run_by_loop(stack: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Return the frames of the coroutine or callback that the loop runs; none if the loop waits.

    Without asyncio's own innermost frames: code in C that lets no thread run is found as soon as it returns, and the next line
    may already be `await asyncio.sleep()`.
    """
    running = [index for index, frame in enumerate(stack) if _is_of(frame, _RUNNING)]
    ran = list(stack[running[-1] + 1 :] if running else stack)
    while ran and _is_of(ran[-1], _WAITING):
        ran.pop()
    return ran


def _is_of(frame: traceback.FrameSummary, parts: Sequence[str]) -> bool:
    return any(part in frame.filename for part in parts)


class LoopLag:
    """Sleeps repeatedly and reports to `observe` how late it woke, in seconds, never below 0."""

    def __init__(self, observe: Callable[[float], None], interval: float = 0.1) -> None:
        self._observe = observe
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start on the running loop. Has no effect if already started."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="loop lag")

    async def stop(self) -> None:
        """Stop and wait for the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due = now() + self._interval
            await asyncio.sleep(self._interval)
            self._observe(max(0.0, now() - due))
