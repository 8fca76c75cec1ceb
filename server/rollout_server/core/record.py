"""Records: the inputs of a rollout's state machine, in order (D1).

An event is a view of a record. Its sequence number is the record's position in the log, from 1. `Asked` and `ToolStarted` are also
intents: they wait for their result.

A tool may use its rollout. `by_tool` of a record is then the `key` of the call that issued it; it is empty for what the agent's own
methods issue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import AGENT, Drift, Logprobs, Origin, PolicyRun, Prediction, Role, Tokens
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import End, RewardResult, RewardRule, Stop, Warned
from rollout_server.core.segment import Plane
from rollout_server.core.spec import Sampling

RESAMPLED: Final = "resampled"
"""Code of notes and warnings about a turn that may have been generated more than once (D8)."""

START: Final = "start"
FINISH: Final = "finish"
"""Names of what agents that own their loop do: see `Observed.what`."""
TOOLS: Final = "tools"
SESSION: Final = "session"
"""Names of what concerns toolsets: see `Observed.what`."""

LARGEST_TURN_REWARD: Final = 1e9
MOST_REWARDS_OF_A_TURN: Final = 1000

FIRST: Final = "0"
"""Id of a rollout's first segment. Any segment of a conversation identifies the conversation."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server accepted the rollout; `messages` is the number of messages it starts with."""

    messages: int
    agent: str
    agent_version: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The agent requests a completion.

    Args:
        turn: the number of the turn, from 1.
        segment_id: the segment that the turn continues.
        turn_key: the idempotency key of the turn, `uid/segment/turn`; equal for all attempts.
        messages: the number of messages in the conversation.
        sampling: all sampling parameters of this turn; None uses those of the spec.
        by_tool: see the module.
    """

    turn: int
    segment_id: str
    turn_key: str
    messages: int
    sampling: Sampling | None = None
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """The completion of an open turn arrived.

    Args:
        message: the assistant message, verbatim.
        finish_reason: as the trainer sent it; empty if it sent none.
        token_ids: ids of the completion; None if the trainer sends none.
        logprobs: one per id of `token_ids`; None if unknown.
        predicted: what the server's rendering expected before the completion.
        reported: ids of the prompt as the trainer reports it, without the first `shared` ones; None if it reports none.
        shared: number of prompt tokens at the start that equal the segment so far. The machine removes them from the log, whose
            size would otherwise grow quadratically with the number of turns.
        mask_length: length of the response mask that was sent; None if none was sent.
        attempts: number of requests that were sent.
        elapsed_ms: milliseconds from the first request to the completion.
        usage: numbers of prompt and completion tokens by the trainer's count, used where it sends no ids.
        policy_version: the policy that generated the completion, in the trainer's notation; of several, the last one.
        notes: warnings about the completion, as (code, text).
        tool_calls: number of tool calls in the completion.
        around: text around the first token that differs from the prediction: expected, then reported. Both are empty without a
            difference, or if it cannot be located.
        planes: per-token values beside `token_ids`.
        extra_json: further fields of the trainer, as one JSON object; empty for none.
        policy_step: the step of `policy_version`; None if unknown.
        runs: the policies that generated the completion, in order, if it was aborted and resumed by others; together they have all
            tokens. Empty: all of it is of `policy_version`.
        rendered_by: digest of the tokenizer and the chat template that rendered `predicted`; empty without a rendering.
    """

    turn: int
    message: Message
    finish_reason: str
    token_ids: Tokens | None
    logprobs: Logprobs | None = None
    predicted: Prediction | None = None
    reported: Tokens | None = None
    shared: int = 0
    mask_length: int | None = None
    attempts: int = 1
    elapsed_ms: float = 0.0
    usage: tuple[int, int] | None = None
    policy_version: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    tool_calls: int = 0
    around: tuple[str, str] = ("", "")
    planes: tuple[Plane, ...] = ()
    extra_json: str = ""
    policy_step: int | None = None
    runs: tuple[PolicyRun, ...] = ()
    rendered_by: str = ""

    @property
    def policy_runs(self) -> tuple[PolicyRun, ...]:
        """The policies that generated `token_ids`, in order; none without ids."""
        if not self.token_ids:
            return ()
        return self.runs or (PolicyRun(len(self.token_ids), self.policy_version, self.policy_step),)

    def without_prefix(self, length: int) -> Answered:
        """Return the completion as it is logged: without the first `length` prompt tokens, which the segment contains."""
        if self.token_ids is None or self.reported is None or self.shared or not length:
            return self
        return replace(self, reported=self.reported[length:], shared=length)

    @property
    def generated(self) -> int:
        """The number of generated tokens; 0 if the trainer sends neither ids nor usage."""
        return len(self.token_ids) if self.token_ids is not None else (self.usage or (0, 0))[1]


@dataclass(frozen=True, slots=True)
class Appended:
    """The agent added messages to a conversation."""

    messages: tuple[Message, ...]
    segment_id: str = FIRST
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool call starts.

    Args:
        turn: the turn that called it, from 1.
        index: its position among the calls of the turn, from 0.
        call: the call.
        segment_id: the conversation.
        by_tool: see the module.
        repeatable: whether it may run again if the server stops before it has returned.
    """

    turn: int
    index: int
    call: ToolCall
    segment_id: str = FIRST
    by_tool: str = ""
    repeatable: bool = False

    @property
    def key(self) -> str:
        """What identifies the call in its rollout."""
        return f"{self.segment_id}/{self.turn}/{self.index}"


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """A tool call returned a message for the model. If `failed`, its content is an error text.

    `cancelled`: the agent cancelled the call. `used_state`: the tool used the agent's `run.state`.
    """

    turn: int
    index: int
    call: ToolCall
    message: Message
    failed: bool
    elapsed_ms: float = 0.0
    segment_id: str = FIRST
    cancelled: bool = False
    used_state: bool = False

    @property
    def key(self) -> str:
        """The `ToolStarted.key` of the call."""
        return f"{self.segment_id}/{self.turn}/{self.index}"


@dataclass(frozen=True, slots=True)
class Forked:
    """The agent opened a conversation.

    Args:
        segment_id: the first segment of the new conversation.
        of: a segment of the conversation that was forked.
        origin: origin of the first segment, as far as it is known before the first prompt. MAIN: the conversation of the rollout's
            first segment, which has other messages from now on.
        count: number of messages that the new conversation starts with.
        messages: messages given by the agent; empty for a branch, which has those of its parent.
        tools: names of the tools in the new conversation's chat template.
        role: the part that the new conversation plays, and its further model. A compaction keeps the role of the conversation it
            replaces, a branch the model of its parent.
        after_turn: for a branch that begins after an earlier turn of `of`, that turn; 0: after all messages so far.
        by_tool: see the module.
    """

    segment_id: str
    of: str
    origin: Origin
    count: int
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()
    role: Role = AGENT
    after_turn: int = 0
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The open turn of a conversation gets no completion. The conversation is closed, and the rollout continues.

    The agent stopped waiting for it, or its prompt is too long for the model, or the server was restarted: then an agent that owns
    its loop requests it again as another turn.
    """

    turn: int
    segment_id: str
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class CaptureSettled:
    """The calls of an agent that owns its loop were counted. `segment_id` is its main conversation.

    At most once in each process of the server: after a restart, the agent may call again.
    """

    segment_id: str
    report: CaptureReport


@dataclass(frozen=True, slots=True)
class Observed:
    """The agent used the clock, randomness or a side effect. The result is recorded, so that a replay returns the same.

    Args:
        what: "now", "random" or "once". Of agents that own their loop also `START`: the agent begins, for the first time; and
            `FINISH`: the agent, which runs elsewhere, has ended its work. `TOOLS`: toolsets were listed, before the agent begins.
            `SESSION`: a toolset is called whose session has state, for the first time.
        value_json: the result as JSON: a time in ISO 8601, a seed, what the agent's function returned, or the result of the work.
            "null" for `START`. For `TOOLS` the key "toolsets": for each the name, the SHA-256 of its list, and the tools themselves
            if the request names the toolset. For `SESSION` the name of the toolset.
        segment_id: the conversation of the `Run` that was called.
        number: number of the call of `once` in its conversation, from 1; 0 for a call by a tool, and for clock and randomness.
        after: number of records in the log when a call with a number began.
        concurrent: whether another call of `once` in the conversation was under way at the same time.
        by_tool: see the module.
    """

    what: str
    value_json: str
    segment_id: str = FIRST
    number: int = 0
    after: int = 0
    concurrent: bool = False
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class ModelCalled:
    """A further model returned a message to the agent. A replay returns the same one. Its tokens are in no sample.

    Args:
        model: the name by which the agent called it.
        message: the assistant message, verbatim.
        finish_reason: as the endpoint reports it; empty if it reports none.
        usage: numbers of prompt and completion tokens by the endpoint's count; None if it reports none.
        attempts: number of requests that were sent.
        elapsed_ms: milliseconds from the call to the completion.
        segment_id: the conversation of the `Run` that was called.
        number: number of the call among those with the same `digest` in its conversation, from 1; 0 for a call by a tool.
        digest: of the model, the messages and the sampling parameters; empty for a call by a tool.
        by_tool: see the module.
    """

    model: str
    message: Message
    finish_reason: str = ""
    usage: tuple[int, int] | None = None
    attempts: int = 1
    elapsed_ms: float = 0.0
    segment_id: str = FIRST
    number: int = 0
    digest: str = ""
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class Masked:
    """The completion of a turn does not train, as the agent's author or the server decided. `reason` is for people."""

    turn: int
    reason: str
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The agent gave a reward to a turn that has its completion. Rewards of one turn add up.

    Args:
        turn: the turn, from 1.
        value: from -`LARGEST_TURN_REWARD` to `LARGEST_TURN_REWARD`. A turn gets at most `MOST_REWARDS_OF_A_TURN`.
        by_tool: see the module.
    """

    turn: int
    value: float
    by_tool: str = ""


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """A segment was opened. Follows from an `Answered`."""

    turn: int
    segment_id: str
    origin: Origin
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DriftFound:
    """The trainer's prompt differs from the prediction. Follows from an `Answered`, and has its `around`."""

    turn: int
    segment_id: str
    drift: Drift
    around: tuple[str, str] = ("", "")

    @property
    def text(self) -> str:
        """A description of the drift, for people."""
        drift, (expected, reported) = self.drift, self.around
        text = f"turn {self.turn}: the reported prompt differs from the prediction at token {drift.index} ({drift.kind.value})"
        return f"{text}: expected {expected!r}, reported {reported!r}" if expected or reported else text


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of the agent or the server. `code` is a stable word."""

    turn: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The rollout continues after a restart of the server, for the `times`-th time.

    Its agent was replayed up to here. Or it owns its loop: then it runs elsewhere, or is run anew, as attempt `times` + 1.
    """

    times: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout ended. Always the last record. Times are in milliseconds.

    `warnings` are about what happened after the end was decided, such as a failed cleanup. `reward_rule` is the agent's.
    `policy_step` is the newest that was announced for the rollout; None if none was.
    """

    end: End
    reward_result: RewardResult = RewardResult()
    total_ms: float = 0.0
    queued_ms: float = 0.0
    warnings: tuple[Warned, ...] = ()
    reward_rule: RewardRule = RewardRule.COPY
    policy_step: int | None = None

    @property
    def final_reward(self) -> RewardResult:
        """The result of the reward. Only a rollout that completed has a reward and scores: a failure is not a low reward."""
        if isinstance(self.end, Stop):
            return self.reward_result
        return RewardResult(extra_json=self.reward_result.extra_json)


Deed: TypeAlias = "Forked | GivenUp | Observed | ModelCalled | Masked | Rewarded | CaptureSettled"
"""What an agent does besides turns, messages and tool calls."""

Input: TypeAlias = "Accepted | Asked | Answered | Appended | ToolStarted | ToolReturned | Deed | Note | Resumed | Ended"
Consequence: TypeAlias = "SegmentOpened | DriftFound"
Record: TypeAlias = "Input | Consequence"


def has_begun(records: Iterable[Record]) -> bool:
    """Return whether a log has more than the acceptance of its rollout and the lists of its tools."""
    return any(
        not (isinstance(record, Accepted) or (isinstance(record, Observed) and record.what == TOOLS))
        for record in records
    )
