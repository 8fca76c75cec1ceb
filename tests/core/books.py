"""The expected state of a rollout, computed independently from its inputs, as an oracle for the machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rollout_server.core.conversation import State
from rollout_server.core.ledger import Parting, Role, Tokens, Turn
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.outcome import Metrics, RewardRule, TurnReward
from rollout_server.core.record import Answered, ToolReturned, ToolStarted

from tests.support.naive_ledger import NaiveLedger, NaiveLine


@dataclass(eq=False)
class Talk:
    """One conversation. `called` is the number of calls in its last turn, `ends` what a branch after each turn begins with."""

    line: NaiveLine
    messages: list[Message]
    state: State = State.OPEN
    turn: int = 0
    called: int = 0
    cut: bool = False
    running: dict[int, ToolStarted] = field(default_factory=dict)
    back: dict[int, ToolReturned] = field(default_factory=dict)
    ends: dict[int, Talk] = field(default_factory=dict)


class Books:
    """The expected state of one rollout."""

    def __init__(self, limits: Limits, start: list[Message]) -> None:
        self.limits = limits
        self.ledger = NaiveLedger()
        self.main = Talk(self.ledger.main, list(start))
        self.talks = [self.main]
        self.said = list(start)
        self.metrics = Metrics()
        self.warnings: list[tuple[str, int, int | None]] = []
        self.turn = 0
        self.tool_turns = 0
        self.rewards: dict[int, float] = {}
        self.homes: dict[int, str] = {}
        self.newest_step: int | None = None

    def oldest_step(self) -> int | None:
        """The lowest step of a trained token of the rollout's own model."""
        segments = [each for each in self.ledger.segments if each.role.trainable and not each.role.model]
        tokens = [token for each in segments for token in each.trajectory() if token.trains]
        return min((token.policy[1] for token in tokens if token.policy[1] is not None), default=None)

    def count(self, **amounts: float) -> None:
        more = {name: getattr(self.metrics, name) + n for name, n in amounts.items()}
        self.metrics = replace(self.metrics, **more)

    def says(self, talk: Talk, messages: list[Message]) -> None:
        talk.messages += messages
        self.said += messages

    def asking_is_over(self) -> str | None:
        size = sum(len(m.text.encode()) for m in self.said)
        for reason, used, limit in (
            ("max_tokens", self.metrics.generated_tokens, self.limits.generated_tokens),
            ("max_turns", self.turn, self.limits.turns),
            ("max_bytes", size, self.limits.bytes),
        ):
            if limit is not None and used >= limit:
                return reason
        return None

    def calling_is_over(self, talk: Talk) -> str | None:
        tokens, turns = self.limits.generated_tokens, self.limits.tool_turns
        if tokens is not None and self.metrics.generated_tokens >= tokens:
            return "max_tokens"
        if turns is not None and not talk.called and self.tool_turns >= turns:
            return "max_turns"
        return None

    def asked(self, talk: Talk) -> None:
        self.turn += 1
        talk.turn, talk.called, talk.state = self.turn, 0, State.ASKING

    def answered(self, talk: Talk, record: Answered) -> tuple[str, int, int, int] | None:
        drift = None
        if not talk.line.role.model:
            steps = [self.newest_step, record.policy_step, *(run.step for run in record.policy_runs)]
            self.newest_step = max((step for step in steps if step is not None), default=None)
        prompt, generated = record.usage or (0, 0)
        if record.token_ids is not None:
            generated = len(record.token_ids)
        known = record.reported is not None or (record.predicted is not None and not talk.line.missing)
        if known and record.token_ids is not None:
            drift = self.committed(talk, record, record.token_ids)
            prompt = len(talk.line.ids()) - generated
        else:
            self.skipped(talk, record)
            prompt = prompt if record.reported is None else len(record.reported)
        self.count(turns=1, completion_ms=record.elapsed_ms, completion_attempts=record.attempts)
        self.count(prompt_tokens=prompt, generated_tokens=generated)
        longest = max(self.metrics.max_context_tokens, prompt + generated)
        self.metrics = replace(self.metrics, max_context_tokens=longest)
        if drift is not None:
            self.warnings.append(("token_drift", record.turn, drift[1]))
        self.warnings += [(code, record.turn, None) for code, _ in record.notes]
        self.says(talk, [record.message])
        talk.cut, talk.state = record.finish_reason == "length", State.OPEN
        talk.ends[record.turn] = Talk(talk.line.here(), list(talk.messages), turn=record.turn, cut=talk.cut)
        return drift

    def committed(self, talk: Talk, record: Answered, answer: Tokens) -> tuple[str, int, int, int] | None:
        if talk.line.missing and talk.line.segment is None:
            self.warnings.append(("tokens_unknown", record.turn, None))
        turn = Turn(
            record.turn,
            answer,
            record.logprobs,
            record.predicted,
            record.reported,
            record.policy_runs,
        )
        drift = talk.line.commit(turn)
        self.homes[record.turn] = talk.line.id
        return drift

    def skipped(self, talk: Talk, record: Answered) -> None:
        """Count a turn without tokens, once per gap, and only if other turns have tokens."""
        if talk.line.segment is not None and not talk.line.missing:
            self.warnings.append(("tokens_unknown", record.turn, None))
        talk.line.skip()

    def started(self, talk: Talk, started: ToolStarted) -> None:
        self.tool_turns += not talk.called
        talk.called += 1
        talk.running[started.index] = started
        talk.state = State.CALLING

    def returned(self, talk: Talk, record: ToolReturned) -> None:
        del talk.running[record.index]
        talk.back[record.index] = record
        self.said.append(record.message)
        if not talk.running:
            talk.messages += [talk.back[index].message for index in sorted(talk.back)]
            self.count_calls(talk)
            talk.state = State.OPEN

    def count_calls(self, talk: Talk) -> None:
        records = list(talk.back.values())
        self.count(
            tool_calls=len(records),
            tool_failures=len([r for r in records if r.failed]),
            tool_ms=max((r.elapsed_ms for r in records), default=0.0),
        )
        talk.back.clear()

    def branched(self, talk: Talk, role: Role, after: int, parting: Parting | None) -> Talk:
        start = talk.ends[after] if after else Talk(talk.line.here(), talk.messages, turn=talk.turn, cut=talk.cut)
        line = replace(start.line, id=self.ledger.take(), role=role, parting=parting)
        other = Talk(line, list(start.messages), turn=start.turn, cut=start.cut)
        other.ends = {turn: end for turn, end in talk.ends.items() if turn <= start.turn}
        self.talks.append(other)
        return other

    def began(self, talk: Talk, kind: str, messages: list[Message], role: Role, parting: Parting | None) -> Talk:
        replaces = kind == "compaction" and parting is None
        self.said += messages
        if kind == "main" and not talk.turn and talk.line.kind == "main":
            talk.messages, talk.line.role = list(messages), role
            return talk
        other = Talk(
            self.ledger.line(kind, "" if kind == "main" else talk.line.id, talk.line.role if replaces else role),
            list(messages),
        )
        other.line.parting = parting
        self.talks.append(other)
        if replaces or kind == "main":
            talk.state = State.CLOSED
            self.main = other if talk is self.main else self.main
        return other

    def masked(self, turn: int) -> None:
        for token in (t for segment in self.ledger.segments for t in segment.tokens):
            token.out = token.out or (token.turn == turn and token.by == "model")

    def turn_rewards(self) -> list[TurnReward]:
        return [TurnReward(turn, value, self.homes.get(turn, "")) for turn, value in sorted(self.rewards.items())]

    def segment_rewards(
        self, rule: RewardRule, reward: float, roles: dict[str, float], *, stopped: bool
    ) -> dict[str, float]:
        """The reward of each segment by the rule; only segments that train have one."""
        judged = self.ledger.segments if stopped else []
        trained = [s for s in judged if s.role.trainable and any(t.trains for t in s.tokens)]
        if rule is not RewardRule.OWN:
            parts = len(trained) if rule is RewardRule.SPLIT else 1
            return {segment.id: reward / parts for segment in trained}
        found: dict[str, float] = {}
        for segment in trained:
            values = [value for turn, value in self.rewards.items() if self.homes.get(turn) == segment.id]
            values += [roles[segment.role.name]] if segment.role.name in roles else []
            if values:
                found[segment.id] = sum(values)
        return found
