"""`StrictTrainer`: a reference trainer that verifies every request, answers with scripted completions and fails on demand."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp

from rollout_server.testing import TrainerDialect
from rollout_server.testing.checks.judge import RequestJudge
from rollout_server.testing.checks.renderer import PlainRenderer, Tools
from rollout_server.testing.checks.verdict import DeliveredOutcome, Verdict
from rollout_server.testing.grpc.completions import Completions, SeenCompletion
from rollout_server.testing.grpc.service import CompletionServer, CompletionService, target
from rollout_server.testing.grpc.train_stream import TrainStream
from rollout_server.testing.http.app import SeenRequest, Speech, TrainerApp
from rollout_server.testing.http.outcome_receiver import OutcomeReceiver, ReceivedOutcome
from rollout_server.testing.http.server import HttpServer
from rollout_server.testing.http.wire import Bearer
from rollout_server.testing.model.calculator import CalculatorModel, Model
from rollout_server.testing.model.engine import Engine, Scripts
from rollout_server.testing.model.engine_thread import EngineThread, ToolList
from rollout_server.testing.script import Script
from rollout_server.testing.tokenizer import TOY_TOKENIZER


@dataclass(eq=False)
class StrictTrainer:
    """A trainer for the synchronous or the asynchronous HTTP API (docs/design.md, A and B) and for gRPC.

    ``async with StrictTrainer() as trainer:`` serves at `trainer.url` until the block ends:

    * ``POST /v1/chat/completions``: verifies the request, then answers with the rollout's script, or with `model` if there is none.
      422 with ``{"detail": text}`` for a refused request, 401 for a wrong key, 502 if the tools cannot be fetched.
    * ``POST /v1/rollout/completed``, asynchronous HTTP API only: verifies the outcome, then responds as the rollout's script says.
    * ``GET /health``; ``GET /verdicts``: one summary per rollout; ``GET /verdict?rollout_id=``: the full verdict.
    * ``PUT /script?rollout_id=``: sets a script as JSON, see `script_json`.
    * gRPC at `grpc_target`: `osmosis.rollout.v1.CompletionService` in message mode and in token mode, see
      `completions` and `token_mode`.

    With `async with trainer.connected("host:port") as stream` the trainer is a client instead, see `TrainStream`.

    Args:
        tokenizer_dir: a local directory with a tokenizer and its chat template.
        scripts: scripts by rollout id. `script` applies to all other ids; the default script uses `model` for every turn.
        dialect: see `TrainerDialect`.
        replays_keys: a retried turn (same ``Idempotency-Key``) gets the same completion, and the response repeats the key in a
            header. Otherwise the turn is generated again. Default: True over gRPC, False for the asynchronous HTTP API.
        reuses_ids: asynchronous HTTP API only: a rollout id may be used again once its outcome is settled. Otherwise it is refused.
        settled: called with the verdict of each rollout whose outcome was acknowledged or finally refused.
        model: generates the completions that no script defines, in the trainer's own thread.
        tools: rendered into every prompt. Alternatively `tools_from`: the base URL of a gateway; the trainer requests its
            ``GET /tools`` once, on first use, with the API key `tools_key`. With neither, or if `render_tools` is False, prompts
            are rendered without tools.
        api_key: required as ``Authorization: Bearer`` for completions (over gRPC in the metadata) and for outcomes only.
        parse_arguments: render tool call arguments that are JSON text as objects, as vLLM-style front ends do.
        template_kwargs: arguments of the chat template, for all prompts.
        port, grpc_port: 0 selects any free port. `grpc_port` None disables gRPC.
        requests_kept: maximum length of `requests` and of `completions`.

    Entering raises OSError if an address cannot be bound, and ValueError for a tokenizer without a chat template.
    """

    tokenizer_dir: Path = TOY_TOKENIZER
    _: KW_ONLY
    scripts: Mapping[str, Script] = field(default_factory=dict)
    script: Script = field(default_factory=lambda: Script(then_model=True))
    dialect: TrainerDialect = TrainerDialect.MASKED
    replays_keys: bool | None = None
    reuses_ids: bool = False
    settled: Callable[[Verdict], None] = lambda _verdict: None
    model: Model = field(default_factory=CalculatorModel)
    tools: Tools | None = None
    tools_from: str | None = None
    tools_key: str | None = None
    render_tools: bool = True
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int | None = 0
    parse_arguments: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    requests_kept: int = 4096
    _requests: "deque[SeenRequest]" = field(init=False, repr=False)
    _completions: "deque[SeenCompletion]" = field(init=False, repr=False)
    _engine_thread: EngineThread = field(init=False, repr=False)
    _completion_calls: Completions = field(init=False, repr=False)
    _receiver: OutcomeReceiver = field(init=False, repr=False)
    _app: ASGIApp = field(init=False, repr=False)
    _listener: HttpServer = field(init=False, repr=False)
    _open: AsyncExitStack = field(init=False, repr=False)

    async def __aenter__(self) -> Self:
        self._requests = deque(maxlen=self.requests_kept)
        self._completions = deque(maxlen=self.requests_kept)
        async with AsyncExitStack() as stack:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strict-trainer")
            stack.callback(thread.shutdown, wait=False)
            self._engine_thread = await self._start_engine_thread(thread)
            bearer = Bearer(self.api_key)
            self._receiver = OutcomeReceiver(self._engine_thread, bearer, self.settled)
            speech = Speech(TrainerDialect(self.dialect), bool(self.replays_keys))
            self._app = TrainerApp(self._engine_thread, speech, bearer, self._receiver, self._requests).asgi()
            self._listener = await HttpServer.open(self._app, self.host, self.port)
            stack.push_async_callback(self._stop_listening)
            self.port = self._listener.port
            replays = self.replays_keys is None or self.replays_keys
            self._completion_calls = Completions(self._engine_thread, self._completions, replays_keys=replays)
            stack.push_async_callback(self._completion_calls.close)
            if self.grpc_port is not None:
                server = CompletionServer(CompletionService(self._completion_calls, self.api_key))
                self.grpc_port = await server.open(self.host, self.grpc_port)
                stack.push_async_callback(server.close)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    @property
    def url(self) -> str:
        """The base URL without a trailing slash, for `server_url`."""
        return f"http://{target(self.host, self.port)}"

    @property
    def grpc_target(self) -> str:
        """The target of a gRPC channel to this trainer. Raises ValueError if the trainer does not listen for gRPC."""
        if self.grpc_port is None:
            raise ValueError("this trainer does not listen for gRPC")
        return target(self.host, self.grpc_port)

    @property
    def requests(self) -> tuple[SeenRequest, ...]:
        """The completion requests received over HTTP, oldest first, including refused ones."""
        return tuple(self._requests)

    @property
    def completions(self) -> tuple[SeenCompletion, ...]:
        """The completion requests received over gRPC, oldest first, including refused ones."""
        return tuple(self._completions)

    def verdict(self, rollout_id: str) -> Verdict | None:
        """Return the verdict of one rollout; None if no request had this id."""
        return self._engine_thread.judge.verdict(rollout_id)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return all stored verdicts, least recently used first."""
        return self._engine_thread.judge.verdicts()

    def deliveries(self, rollout_id: str) -> tuple[ReceivedOutcome, ...]:
        """Return the deliveries of a rollout's outcome, oldest first, including refused ones."""
        return self._receiver.deliveries(rollout_id)

    def outcome(self, rollout_id: str) -> DeliveredOutcome | None:
        """Return a rollout's outcome as first delivered; None if none was delivered."""
        return self._engine_thread.judge.outcome(rollout_id)

    async def delivered(self, rollout_id: str, times: int = 1) -> tuple[ReceivedOutcome, ...]:
        """Wait until a rollout's outcome was delivered at least `times` times, and return the deliveries."""
        await self._receiver.changed.until(lambda: len(self.deliveries(rollout_id)) >= times)
        return self.deliveries(rollout_id)

    async def completed(self, rollout_id: str) -> Mapping[str, Any]:
        """Wait until a rollout's outcome is settled (acknowledged or finally refused), and return its body."""
        await self._receiver.changed.until(lambda: self._settled_outcome(rollout_id) is not None)
        outcome = self._settled_outcome(rollout_id)
        assert outcome is not None  # noqa: S101 - just waited for
        return outcome.body

    def connected(self, server: str, *, credit: int = 256, api_key: str = "") -> TrainStream:
        """Return a stream to the rollout server at host:port, an async context manager.

        `credit` is the maximum number of pending completion requests. `api_key` is the API key of the server.
        """
        return TrainStream(self._completion_calls, server, credit, api_key)

    @asynccontextmanager
    async def down(self) -> AsyncIterator[None]:
        """Take the HTTP port down during the block: open connections are closed and new ones refused."""
        await self._stop_listening()
        try:
            yield
        finally:
            self._listener = await HttpServer.open(self._app, self.host, self.port)

    def start_anew(self, rollout_id: str) -> None:
        """Discard a rollout's state and keep its verdict as an earlier one: the next request counts as the first one."""
        self._engine_thread.judge.start_anew(rollout_id)
        self._receiver.begin_anew(rollout_id)

    async def put_script(self, rollout_id: str, script: Script) -> None:
        """Set the script of a rollout and discard its state, as `start_anew` does."""
        await self._engine_thread.put_script(rollout_id, script)
        self._receiver.begin_anew(rollout_id)

    async def _stop_listening(self) -> None:
        await self._listener.close()

    def _settled_outcome(self, rollout_id: str) -> DeliveredOutcome | None:
        outcome = self.outcome(rollout_id)
        return outcome if outcome and outcome.answered is not None else None

    async def _start_engine_thread(self, thread: ThreadPoolExecutor) -> EngineThread:
        load = asyncio.get_running_loop().run_in_executor(
            thread,
            lambda: PlainRenderer.load(
                self.tokenizer_dir, parse_arguments=self.parse_arguments, template_kwargs=self.template_kwargs
            ),
        )
        judge = RequestJudge(await load, reuses_ids=self.reuses_ids)
        scripts = Scripts(self.scripts, self.script)
        engine = Engine(judge, self.model, scripts, replays_keys=bool(self.replays_keys))
        return EngineThread(
            judge,
            engine,
            scripts,
            ToolList(self.tools, self.tools_from, self.tools_key, rendered=self.render_tools),
            thread,
        )
