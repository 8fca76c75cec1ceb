"""The local stack: a server with the author's agents, a strict trainer, and the scripted model of a test."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from rollout_client import Client, Target

from rollout_server.local_stack.loop_thread import LoopThread
from rollout_server.local_stack.result import FinishedRollout, finished_rollout, objections
from rollout_server.testing.script import Line, Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER

if TYPE_CHECKING:
    from rollout_server.agent import Agent
    from rollout_server.testing.trainer import StrictTrainer

_HOST: Final = "127.0.0.1"
_TOKENIZER: Final = "toy"

Form: TypeAlias = Literal["tokens", "messages"]
"""What the server sends to the trainer: token ids that the server rendered, or messages that the trainer renders."""


class LocalStack:
    """Serves agents on free ports until the `with` block ends. One server runs many rollouts.

    Args:
        trainer: the strict trainer to use; by default the stack starts its own.
        settings: settings of `rollout serve` by field name. A `.env` file is not read.

    Raises TypeError and ValueError for invalid agents and settings.
    """

    def __init__(
        self, loop: LoopThread, *agents: Agent, trainer: StrictTrainer | None = None, **settings: object
    ) -> None:
        self._loop = loop
        self._agents = agents
        self._settings = settings
        self._trainer = trainer
        self._stack = ExitStack()
        self._client: Client
        self.grpc_port = 0
        self.http_port = 0

    def __enter__(self) -> Self:
        from rollout_server.app import Server  # the import takes a second
        from rollout_server.settings import load
        from rollout_server.settings.journal import MEMORY
        from rollout_server.testing.trainer import StrictTrainer

        given = {
            "host": _HOST,
            "grpc_port": 0,
            "http_port": 0,
            "tokenizers": {_TOKENIZER: TOY_TOKENIZER},
            "journal": MEMORY,
        }
        settings = load(_env_file=None, **(given | self._settings))
        with ExitStack() as stack:
            server = self._enter(stack, Server(self._agents, settings))
            if self._trainer is None:
                self._trainer = self._enter(stack, StrictTrainer())
            self.grpc_port, self.http_port = server.grpc_port, server.http_port
            self._client = stack.enter_context(Client(f"{_HOST}:{server.grpc_port}"))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def client(self) -> Client:
        """A client of the server, for everything that `play` does not cover."""
        return self._client

    @property
    def trainer(self) -> StrictTrainer:
        """The strict trainer. Its `verdict(rollout_id)` has the findings about a rollout."""
        assert self._trainer is not None, "the local stack is not entered"  # noqa: S101 - a bug in the caller's code
        return self._trainer

    def play(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        model: ScriptedModel,
        *,
        form: Form = "tokens",
        **fields: Any,
    ) -> FinishedRollout:
        """Run one rollout to its end and return it. A rollout that fails is returned too, with its failure.

        Args:
            prompt: the user's message, or a whole conversation.
            model: the scripted completions.
            form: what the server sends to the trainer.
            fields: further fields of RolloutSpec: agent, limits, metadata ...

        Raises AssertionError if the strict trainer finds a wrong token or mask, RolloutError if the server refuses the rollout.
        """
        conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        rollout_id = fields.pop("rollout_id", f"test-{uuid.uuid4().hex}")
        self._loop.run(self.trainer.put_script(rollout_id, model.script))
        with self._client.run(
            messages=conversation,
            rollout_id=rollout_id,
            completions=Target(f"grpc://{self.trainer.grpc_target}", "grpc", replays_turn_keys=True),
            tokenizer=_TOKENIZER,
            token_mode=form,
            **fields,
        ) as run:
            events = list(run)
        finished = finished_rollout(self._client.get(run.uid, view="samples"), events)
        objection = objections(finished, self.trainer.verdict(rollout_id))
        if objection:
            raise AssertionError(f"the strict trainer objects: {objection}")
        return finished

    def _enter(self, stack: ExitStack, manager: Any) -> Any:
        entered = self._loop.enter(manager)
        stack.callback(self._loop.leave, manager)
        return entered


class ScriptedModel:
    """The completions of a model, in order: `model.calls("add", a=5, b=3).says("It is 8.")`.

    Each rollout gets all completions from the start. A rollout that requests more completions than there are fails, and its failure
    names the reason.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._calls = 0

    @property
    def script(self) -> Script:
        """The script for the strict trainer. Raises ValueError for a model without completions."""
        return Script(tuple(self._lines))

    def says(self, content: str, *, reasoning: str | None = None) -> Self:
        """Add a completion with a text, which ends the default loop."""
        return self.answers(ScriptedReply(content=content, reasoning=reasoning))

    def calls(self, tool: str, /, **arguments: object) -> Self:
        """Add a completion with one tool call."""
        return self.calls_together((tool, arguments))

    def calls_together(self, *calls: tuple[str, Mapping[str, object] | str]) -> Self:
        """Add a completion with several tool calls, each a tool's name and its arguments. A text as arguments is sent verbatim."""
        return self.answers(
            ScriptedReply(tool_calls=tuple(tool_call(self._id(), name, given) for name, given in calls))
        )

    def answers(self, line: Line) -> Self:
        """Add any line of `rollout_server.testing.script`: a truncated completion, a fault, a lie."""
        self._lines.append(line)
        return self

    def _id(self) -> str:
        self._calls += 1
        return f"call_{self._calls}"
