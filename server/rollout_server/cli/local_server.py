"""The server within a command's process, with a client, its log and, if no endpoint was given, a mock model."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from rollout_server.agent import Agent
from rollout_server.authoring.rollout_result import Result
from rollout_server.cli.flags import CompletionFlags

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import AsyncClient

    from rollout_server.authoring.endpoint import Endpoint
    from rollout_server.authoring.model_stubs import ModelStub
    from rollout_server.settings import Settings

_TOY = "toy"
_RECORDS = 64
_MAX_LINES = 50
_IN_THE_LOG = "; the server's log has the reason under rollout "
_LONGEST_REASON = 4096
_R = TypeVar("_R", bound=Result)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server.

    Args:
        client: a client of the server.
        endpoint: the endpoint that generates completions.
        model_stub: the mock model behind the endpoint; None for an endpoint of `--model-url`.
    """

    client: AsyncClient
    endpoint: Endpoint
    model_stub: ModelStub | None


@asynccontextmanager
async def serve_for_command(
    agents: Sequence[Agent], flags: CompletionFlags, concurrency: int = 1
) -> AsyncIterator[LocalServer]:
    """Serve agents for at most `concurrency` rollouts at the same time, with the endpoint of the flags.

    Raises `AuthorError` for flags that do not fit together and for an agent that runs elsewhere, RuntimeError or OSError if the
    server cannot start.
    """
    _check_runs_here(agents)
    stub = flags.model_stub()
    if stub is None:
        endpoint = flags.endpoint()
        async with _serve(agents, flags, concurrency) as client:
            yield LocalServer(client, endpoint, None)
        return

    async def prepare(client: AsyncClient) -> ModelStub:
        from rollout_server.authoring.mock_model import MockModel
        from rollout_server.authoring.model_stubs import MOCK

        if stub.name != MOCK:
            return stub
        # The mock model chooses among the tools that the server offers.
        return replace(stub, model=MockModel(await client.tools(agents[0].name)))

    async with AsyncExitStack() as stack:
        models: Sequence[str] = ()
        if stub.further:
            from rollout_server.testing.http.mock_engine import MockEngine

            models = (await stack.enter_async_context(MockEngine(stub.further))).entries
        yield await stack.enter_async_context(serve_with_stub(agents, prepare, flags, concurrency, models))


def _check_runs_here(agents: Sequence[Agent]) -> None:
    from rollout_server.authoring.author_traceback import AuthorError

    for agent in agents:
        if agent.external:
            text = "runs elsewhere, so this command cannot run it: `rollout serve` serves it, and whoever starts it gets its access"
            raise AuthorError(f"agent {agent.name!r} {text}")


@asynccontextmanager
async def serve_with_stub(
    agents: Sequence[Agent],
    prepare: Callable[[AsyncClient], Awaitable[ModelStub]],
    flags: CompletionFlags | None = None,
    concurrency: int = 1,
    models: Sequence[str] = (),
) -> AsyncIterator[LocalServer]:
    """Serve agents with a mock model, which `prepare` builds with a client of the running server.

    `models` are further models, as in ROLLOUT_MODELS, and replace the user's of the same names.
    The mock model runs behind the strict trainer over gRPC, so every token is verified and samples are complete.
    """
    from rollout_server.authoring.endpoint import Endpoint
    from rollout_server.testing.trainer import StrictTrainer

    flags = flags or CompletionFlags()
    async with _serve(agents, flags, concurrency, models) as client:
        stub = await prepare(client)
        async with StrictTrainer(model=stub.model, script=stub.script, requests_kept=_RECORDS) as trainer:
            url, label = f"grpc://{trainer.grpc_target}", f"mock model ({stub.name})"
            endpoint = Endpoint(url, "grpc", tokenizer=_TOY, sampling=flags.sampling, limits=flags.limits, label=label)
            yield LocalServer(client, endpoint, stub)


@asynccontextmanager
async def _serve(
    agents: Sequence[Agent], flags: CompletionFlags, concurrency: int, models: Sequence[str] = ()
) -> AsyncIterator[AsyncClient]:
    from rollout_client import AsyncClient

    from rollout_server.app import Server

    async with (
        Server(agents, _settings(agents, flags, concurrency, models)) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield client


def _settings(agents: Sequence[Agent], flags: CompletionFlags, concurrency: int, models: Sequence[str]) -> Settings:
    """Return the user's settings, adapted to a private server.

    Tokenizers, timeouts and retries stay. The server listens on loopback without TLS and keys, and may call any endpoint. It has
    HTTP only for agents that own their loop, which call their model over it. Its rollouts end with the command: a journal that the
    settings name belongs to the user's server.
    """
    from rollout_server.agent.own_loop import OwnLoopAgent
    from rollout_server.settings import load
    from rollout_server.settings.journal import MEMORY

    before = load()
    tokenizers = {_TOY: _TOY, **before.tokenizers, **flags.tokenizers}
    return load(
        host="127.0.0.1",
        grpc_port=0,
        http=any(isinstance(agent, OwnLoopAgent) for agent in agents),
        http_port=0,
        journal=MEMORY,
        public_url=None,
        metrics_port=None,
        drain_seconds=0,
        max_running=concurrency,
        max_records=_RECORDS + concurrency,
        api_key=None,
        admin_key=None,
        api_keys=(),
        api_keys_file=None,
        targets=(),
        tls_cert=None,
        tls_key=None,
        tls_client_ca=None,
        tokenizers=tokenizers,
        models=(*before.models, *models),
    )


class ServerLog(logging.Handler):
    """Prints each distinct line once, because a thousand rollouts may fail for the same reason, and keeps the error of each."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._printed: set[str] = set()
        self._reasons: dict[str, str] = {}

    def with_reason(self, result: _R) -> _R:
        """Return a result whose failure message ends with the error that the server logged, if it refers to the log.

        Outcomes leave that error out, because it may hold secrets and the caller may be someone else.
        """
        reason = self._reasons.pop(result.uid, "")
        what, refers, _ = result.message.partition(_IN_THE_LOG)
        return replace(result, message=f"{what}: {reason}") if reason and refers else result

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record's message with control characters escaped, unless the same line was printed before."""
        from rich.text import Text

        from rollout_server.inspection.escape import visible_lines

        error, uid = _error_text(record), getattr(record, "rollout_uid", None)
        if error and uid is not None:
            self._reasons.setdefault(uid, error[:_LONGEST_REASON])  # a cleanup may fail after what ended the rollout
        text = visible_lines(f"{record.getMessage()}: {error}" if error else record.getMessage())
        if text in self._printed or len(self._printed) >= _MAX_LINES:
            return
        self._printed.add(text)
        self._console.print(Text(text, "red" if record.levelno >= logging.ERROR else "yellow"), soft_wrap=True)


@contextmanager
def print_server_log(console: Console) -> Iterator[ServerLog]:
    """Print the server's warnings and errors to the console within the block."""
    root, handler = logging.getLogger(), ServerLog(console)
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    try:
        yield handler
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def _error_text(record: logging.LogRecord) -> str:
    """Return the error of a record with the author's file and line; empty without an error."""
    from rollout_server.authoring.author_traceback import author_error
    from rollout_server.runtime.errors import RewardFailed

    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return ""
    # The driver wraps a SystemExit of an agent, and a rubric what its functions raise. The cause has the author's traceback.
    wrapped = isinstance(error, RewardFailed) or isinstance(error.__cause__, SystemExit)
    mistake = author_error(error.__cause__ if wrapped and error.__cause__ else error, "")
    return str(mistake).removeprefix(": ")
