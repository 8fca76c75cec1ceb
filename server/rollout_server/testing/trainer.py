"""`StrictTrainer`: a real server that plays a trainer, judges whoever calls it, and fails on demand."""

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
from rollout_server.testing.checks.judge import Judge
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
    """A trainer of the synchronous or the asynchronous dialect (docs/design.md, A and B) on a port of its own.

    ``async with StrictTrainer() as trainer:`` serves at `trainer.url` until the block ends:

    * ``POST /v1/chat/completions``: judged, then answered by the rollout's script, or by `model` where there is none.
      422 with ``{"detail": text}`` for a refused call, 401 for a wrong key, 502 where the tools cannot be had.
    * ``POST /v1/rollout/completed``, in the asynchronous dialect: judged, then met as the rollout's script says.
    * ``GET /health``; ``GET /verdicts``, one summary for each rollout; ``GET /verdict?rollout_id=``, everything.
    * ``PUT /script?rollout_id=``: a script as JSON, see `script_json`.
    * gRPC at `grpc_target`: `osmosis.rollout.v1.CompletionService` in message and in token mode, see
      `completions` and `token_mode`.

    With `async with trainer.connected("host:port") as stream` it is a client instead, see `TrainStream`.

    The arguments:

    * `tokenizer_dir`: a local directory with a tokenizer and its chat template.
    * `scripts`, by rollout id; `script` is for all other ids, and by default leaves everything to `model`, which speaks in
      a thread of the trainer's.
    * `dialect`: see `TrainerDialect`.
    * `replays_keys`: a turn that is asked for again under its ``Idempotency-Key`` gets the answer that it had, and the key
      is repeated in the answer's header; else the turn is generated anew. By default keys are replayed over gRPC, and not in
      the asynchronous dialect.
    * `reuses_ids`: an id of that dialect may begin anew once its outcome is settled; else a rollout is refused after it.
    * `settled` is called with the verdict of each rollout whose outcome is acknowledged or refused for good.
    * `tools` are rendered into every prompt; or those of `tools_from`, the base URL of a gateway whose ``GET /tools`` is
      asked once, on first use, with the API key `tools_key`. With neither, or with `render_tools` off, prompts are rendered
      without tools.
    * `api_key`: demanded as ``Authorization: Bearer`` for completions (over gRPC in the metadata) and for outcomes, and
      for nothing else.
    * `parse_arguments`: tool call arguments that came as JSON text are rendered as objects, as vLLM-style fronts do.
    * `template_kwargs`: switches of the chat template, for all prompts.
    * `port` and `grpc_port`: 0 for any free one; without gRPC, `grpc_port` is None.
    * `requests_kept`: of how many requests `requests` and `completions` tell.

    Entering raises OSError for an address that cannot be had, ValueError for a tokenizer without a chat template.
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
        """The base URL, without a trailing slash: what goes into `server_url`."""
        return f"http://{target(self.host, self.port)}"

    @property
    def grpc_target(self) -> str:
        """What a gRPC channel is opened to. ValueError if the trainer does not listen for gRPC."""
        if self.grpc_port is None:
            raise ValueError("this trainer does not listen for gRPC")
        return target(self.host, self.grpc_port)

    @property
    def requests(self) -> tuple[SeenRequest, ...]:
        """The requests for completions that came over HTTP, oldest first, refused ones too."""
        return tuple(self._requests)

    @property
    def completions(self) -> tuple[SeenCompletion, ...]:
        """The same for gRPC."""
        return tuple(self._completions)

    def verdict(self, rollout_id: str) -> Verdict | None:
        """What the judge found about one rollout; None where no call came under this id."""
        return self._engine_thread.judge.verdict(rollout_id)

    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of all rollouts that are kept, the one called least recently first."""
        return self._engine_thread.judge.verdicts()

    def deliveries(self, rollout_id: str) -> tuple[ReceivedOutcome, ...]:
        """The deliveries of a rollout's outcome, oldest first, refused ones too."""
        return self._receiver.deliveries(rollout_id)

    def outcome(self, rollout_id: str) -> DeliveredOutcome | None:
        """What a rollout came to, as it was delivered first; None where nothing was delivered."""
        return self._engine_thread.judge.outcome(rollout_id)

    async def delivered(self, rollout_id: str, times: int = 1) -> tuple[ReceivedOutcome, ...]:
        """Waits until a rollout's outcome was delivered so many times."""
        await self._receiver.changed.until(lambda: len(self.deliveries(rollout_id)) >= times)
        return self.deliveries(rollout_id)

    async def completed(self, rollout_id: str) -> Mapping[str, Any]:
        """Waits until a rollout's outcome is settled, acknowledged or refused for good, and returns its body."""
        await self._receiver.changed.until(lambda: self._settled_outcome(rollout_id) is not None)
        outcome = self._settled_outcome(rollout_id)
        assert outcome is not None  # noqa: S101 - just waited for
        return outcome.body

    def connected(self, server: str, *, credit: int = 256, api_key: str = "") -> TrainStream:
        """A stream to a rollout server at host:port, on which at most `credit` asks are to be under way, to be entered.

        `api_key` is what the server wants.
        """
        return TrainStream(self._completion_calls, server, credit, api_key)

    @asynccontextmanager
    async def down(self) -> AsyncIterator[None]:
        """While the block lasts nobody listens on the HTTP port: connections are closed, and new ones refused."""
        await self._stop_listening()
        try:
            yield
        finally:
            self._listener = await HttpServer.open(self._app, self.host, self.port)

    def start_anew(self, rollout_id: str) -> None:
        """Ends a rollout on the trainer's side: the next call under this id is a first one."""
        self._engine_thread.judge.start_anew(rollout_id)
        self._receiver.begin_anew(rollout_id)

    async def put_script(self, rollout_id: str, script: Script) -> None:
        """Gives a rollout its script, and starts it anew."""
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
        judge = Judge(await load, reuses_ids=self.reuses_ids)
        scripts = Scripts(self.scripts, self.script)
        engine = Engine(judge, self.model, scripts, replays_keys=bool(self.replays_keys))
        return EngineThread(
            judge,
            engine,
            scripts,
            ToolList(self.tools, self.tools_from, self.tools_key, rendered=self.render_tools),
            thread,
        )
