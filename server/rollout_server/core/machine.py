"""The machine: the referee between an agent, a trainer and the tools.

Theory. An agent says what it wants (`ask`, `start_calls`), the world says what happened (an answer, a tool's result, a timer, a
cancel), and all of it is written down as one list of records. The machine reads records and nothing else: the state of a
rollout is a fold over its log, so the same records give the same outcome, and a log can be replayed. It holds no clock and does
no I/O; whoever drives it performs what `Asked` and `ToolStarted` want and comes back with the result.

    OPEN --Asked--> ASKING --Answered--> OPEN --ToolStarted--> CALLING --last ToolReturned--> OPEN
    any state but ENDED --Ended--> ENDED

Laws (tests/core/test_machine.py): each intent takes its own result and nothing else; no new intent once a limit is met; exactly one
outcome, which always holds messages, ledger and metrics so far; the same records give the same outcome.

A record that does not fit the state is a fault in our code, never of a trainer or an author: `IllegalRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rollout_server.core.ledger import Ledger, Tokens, Turn, pack_tokens
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Failure, Metrics, Outcome, Stop, Warned
from rollout_server.core.record import (
    RESAMPLED,
    Accepted,
    Answered,
    Appended,
    Asked,
    Consequence,
    DriftFound,
    Ended,
    Input,
    Note,
    Record,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)


class IllegalRecord(Exception):
    """A record that does not fit the state it meets: our fault."""


class State(Enum):
    """Where a rollout is, as seen by its machine."""

    OPEN = "open"
    ASKING = "asking"
    CALLING = "calling"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Over:
    """The machine's answer to a wish that a limit forbids."""

    stop: Stop


class Machine:
    """One rollout. `accept` is the only way in."""

    def __init__(self, uid: str, messages: Sequence[Message], limits: Limits) -> None:
        self.uid = uid
        self.limits = limits
        self.ledger = Ledger()
        self.state = State.OPEN
        self.turn = 0
        self._messages = list(messages)
        self._bytes = sum(_size(m) for m in messages)
        self._metrics = Metrics()
        self._warnings: list[Warned] = []
        self._tool_turns = 0
        self._calls = 0
        self._pending: dict[int, ToolStarted] = {}
        self._returned: dict[int, ToolReturned] = {}
        self._last_answer: Answered | None = None
        self._resampled: Note | None = None
        self._outcome: Outcome | None = None
        self._begun = False

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far. Only the machine adds to it."""
        return self._messages

    @property
    def metrics(self) -> Metrics:
        """What was used so far."""
        return self._metrics

    @property
    def last_answer(self) -> Answered | None:
        """The newest answer."""
        return self._last_answer

    @property
    def outcome(self) -> Outcome | None:
        """The terminal value, once there is one."""
        return self._outcome

    @property
    def size(self) -> int:
        """About how many bytes the rollout holds: messages and tokens, each in the log and in what was made of it."""
        return 2 * self._bytes + 16 * sum(len(segment) for segment in self.ledger.segments)

    def ask(self) -> Asked | Over:
        """What a completion at this point would be, or why there is none to be."""
        over = self._exhausted(turns=True)
        if over is not None:
            return over
        turn, segment = self.turn + 1, self.ledger.current_id
        return Asked(turn, segment, f"{self.uid}/{segment}/{turn}", len(self._messages))

    def start_calls(self, calls: Iterable[ToolCall]) -> tuple[ToolStarted, ...] | Over:
        """What running these calls would be, or why they do not run."""
        over = self._no_calls()
        if over is not None:
            return over
        return tuple(ToolStarted(self.turn, index, call) for index, call in enumerate(calls, start=self._calls))

    def natural_stop(self) -> Stop:
        """How a rollout ends whose agent has nothing more to do: a token limit that was met goes first."""
        over = self._exhausted(turns=False)
        return over.stop if over is not None else self._stop("stop")

    def accept(self, record: Input) -> tuple[Record, ...]:
        """Applies a record. Returns what belongs into the log: what follows from it, then the record. Raises `IllegalRecord`."""
        if self.state is State.ENDED:
            raise IllegalRecord(f"{type(record).__name__} after the end")
        follows: tuple[Consequence, ...] = ()
        match record:
            case Answered():
                follows, record = self._answered(record)
            case Asked():
                self._asked(record)
            case Appended():
                self._appended(record)
            case ToolStarted():
                self._tool_started(record)
            case ToolReturned():
                self._tool_returned(record)
            case Ended():
                self._ended(record)
            case Accepted():
                self._require(not self._begun, record)
            case Note():
                self._resampled = record if record.code == RESAMPLED else self._resampled
            case _:
                raise IllegalRecord(f"{type(record).__name__} follows from other records and is not accepted")
        self._begun = True
        return (*follows, record)

    def _asked(self, record: Asked) -> None:
        self._require(self.state is State.OPEN and record == self.ask(), record)
        self.turn = record.turn
        self._calls = 0
        self._resampled = None
        self.state = State.ASKING

    def _answered(self, record: Answered) -> tuple[tuple[Consequence, ...], Answered]:
        held = self.ledger.current.ids() if self.ledger.current is not None else pack_tokens()
        self._require(
            self.state is State.ASKING and record.turn == self.turn and 0 <= record.shared <= len(held), record
        )
        follows = self._commit(record, held)
        self._count_answer(record)
        self._warnings.extend(Warned(code, text, record.turn) for code, text in record.notes)
        self._add((record.message,))
        self.state = State.OPEN
        opened = any(isinstance(consequence, SegmentOpened) for consequence in follows)
        self._last_answer = record if opened else _compact(record, len(held))
        return follows, self._last_answer

    def _commit(self, record: Answered, held: Tokens) -> tuple[Consequence, ...]:
        answer = record.token_ids
        if answer is None or (record.reported is None and (record.predicted is None or self.ledger.gap)):
            self._skip(record)
            return ()
        late = self.ledger.gap and self.ledger.current is None
        reported = None if record.reported is None else held[: record.shared] + record.reported
        asked_in, segments = self.ledger.current_id, len(self.ledger.segments)
        turn = Turn(record.turn, answer, record.logprobs, record.predicted, reported, record.policy_version)
        try:
            drift = self.ledger.commit(turn)
        except ValueError as error:
            raise IllegalRecord(f"turn {record.turn}: {error}") from error
        if late:
            self._warn_of_gap(
                record.turn, "the answers before this turn came without ids: they are part of its masked prompt"
            )
        follows: list[Consequence] = []
        if drift is not None:
            found = DriftFound(record.turn, asked_in, drift, record.around)
            follows.append(found)
            self._warnings.append(Warned("token_drift", found.text, record.turn, drift.index))
        if len(self.ledger.segments) > segments:
            opened = self.ledger.segments[-1]
            prompt = len(reported) if reported is not None else opened.spans[0].stop
            follows.append(SegmentOpened(record.turn, opened.id, opened.origin, prompt))
        return tuple(follows)

    def _skip(self, record: Answered) -> None:
        if self.ledger.current is not None and not self.ledger.gap:
            missing = "token_ids" if record.token_ids is None else "prompt_token_ids"
            self._warn_of_gap(record.turn, f"the trainer sent no {missing}, so the turn is in no training sample")
        self.ledger.skip()

    def _warn_of_gap(self, turn: int, text: str) -> None:
        self._warnings.append(Warned("tokens_unknown", f"turn {turn}: {text}", turn))

    def _count_answer(self, record: Answered) -> None:
        generated, prompt = self._lengths(record)
        m = self._metrics
        self._metrics = replace(
            m,
            turns=m.turns + 1,
            completion_ms=m.completion_ms + record.elapsed_ms,
            completion_attempts=m.completion_attempts + record.attempts,
            generated_tokens=m.generated_tokens + generated,
            prompt_tokens=m.prompt_tokens + prompt,
            max_context_tokens=max(m.max_context_tokens, prompt + generated),
        )

    def _lengths(self, record: Answered) -> tuple[int, int]:
        usage = record.usage or (0, 0)
        generated = len(record.token_ids) if record.token_ids is not None else usage[1]
        if record.reported is not None:
            return generated, record.shared + len(record.reported)
        segment = self.ledger.current
        if segment is not None and not self.ledger.gap:  # the turn is in the ledger
            return generated, len(segment) - generated
        return generated, usage[0]

    def _appended(self, record: Appended) -> None:
        self._require(self.state is State.OPEN, record)
        self._add(record.messages)

    def _tool_started(self, record: ToolStarted) -> None:
        fits = record.index == self._calls and record.turn == self.turn and self._no_calls() is None
        self._require(self.state in (State.OPEN, State.CALLING) and fits, record)
        self._tool_turns += not self._calls
        self._calls += 1
        self._pending[record.index] = record
        self.state = State.CALLING

    def _tool_returned(self, record: ToolReturned) -> None:
        started = self._pending.get(record.index)
        self._require(started is not None and started.call == record.call and started.turn == record.turn, record)
        del self._pending[record.index]
        self._returned[record.index] = record
        if not self._pending:
            self._finish_calls()

    def _finish_calls(self) -> None:
        self._add(tuple(self._returned[index].message for index in sorted(self._returned)))
        self._count_calls()
        self._returned.clear()
        self.state = State.OPEN

    def _ended(self, record: Ended) -> None:
        if self.state is State.ASKING and self._resampled is not None:  # no answer came to tell of it
            self._warnings.append(Warned(RESAMPLED, self._resampled.text, self.turn))
        self._count_calls()
        self._metrics = replace(self._metrics, total_ms=record.total_ms, queued_ms=record.queued_ms)
        self._outcome = Outcome(
            end=replace(record.end, turn=self.turn) if isinstance(record.end, Failure) else record.end,
            messages=tuple(self._messages),
            segments=self.ledger.segments,
            metrics=self._metrics,
            verdict=record.verdict,
            warnings=tuple(self._warnings),
        )
        self.state = State.ENDED

    def _count_calls(self) -> None:
        """Counts the calls of the turn that have returned. Those that still run when the rollout ends were not answered."""
        returned = self._returned.values()
        m = self._metrics
        self._metrics = replace(
            m,
            tool_calls=m.tool_calls + len(returned),
            tool_failures=m.tool_failures + sum(r.failed for r in returned),
            tool_ms=m.tool_ms + max((r.elapsed_ms for r in returned), default=0.0),
        )

    def _add(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)
        self._bytes += sum(_size(m) for m in messages)

    def _exhausted(self, *, turns: bool) -> Over | None:
        limits, used = self.limits, self._metrics
        if limits.generated_tokens is not None and used.generated_tokens >= limits.generated_tokens:
            return Over(self._stop("max_tokens"))
        if turns and limits.turns is not None and self.turn >= limits.turns:
            return Over(self._stop("max_turns"))
        if turns and limits.bytes is not None and self._bytes >= limits.bytes:
            return Over(self._stop("max_bytes"))
        return None

    def _no_calls(self) -> Over | None:
        over, limit = self._exhausted(turns=False), self.limits.tool_turns
        if over is None and limit is not None and not self._calls and self._tool_turns >= limit:
            return Over(self._stop("max_turns"))
        return over

    def _stop(self, reason: str) -> Stop:
        return Stop(reason, truncated=self._last_answer is not None and self._last_answer.finish_reason == "length")

    def _require(self, fits: bool, record: Record) -> None:
        if not fits:
            raise IllegalRecord(f"{record!r} in state {self.state.value}, turn {self.turn}")


def replay(machine: Machine, records: Iterable[Record]) -> Machine:
    """Feeds a log to a fresh machine. Raises `IllegalRecord` where what follows is not what the log says."""
    logged: list[Record] = []
    for record in records:
        if isinstance(record, SegmentOpened | DriftFound):
            logged.append(record)
        elif machine.accept(record) != (*logged, record):
            raise IllegalRecord(f"the log says {logged!r} before {record!r}")
        else:
            logged.clear()
    if logged:
        raise IllegalRecord(f"the log ends with {logged!r}, which no record led to")
    return machine


def _compact(record: Answered, held: int) -> Answered:
    """The answer as it is logged: without the tokens of its prompt that the segment holds anyway."""
    if record.token_ids is None or record.reported is None or record.shared:
        return record
    return replace(record, reported=record.reported[held:], shared=held)


def _size(message: Message) -> int:
    return len(message.text.encode("utf-8", "surrogatepass"))
