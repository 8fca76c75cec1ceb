"""Factories that build the parts of a server from its settings. Modules that are slow to import are imported inside functions."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from osmosis.rollout.v1 import rollout_service_pb2, spec_pb2

from rollout_server.agent import Agent
from rollout_server.core.error import NotPossible, Violation
from rollout_server.core.spec import Dialect, DriftPolicy, Spec
from rollout_server.core.spec_validation import Bounds
from rollout_server.edge.api_keys import ApiKey, Keyring, key_of, read_entries
from rollout_server.edge.engine.further_models import EngineModels, read_endpoints
from rollout_server.edge.engine.samplers import Engines
from rollout_server.edge.engine.transport import Access
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.outcome.grpc import GrpcCourier
from rollout_server.edge.outcome.http import HttpCourier
from rollout_server.edge.outcome.reporter import OutcomeReporter
from rollout_server.edge.programs.runner import ProgramRunner
from rollout_server.edge.rpc.service import ServerFacts
from rollout_server.edge.rpc.tls import ClientTls, ServerTls, channel_credentials, server_credentials
from rollout_server.edge.stream.sampler import StreamTrainers
from rollout_server.edge.stream.stream import StreamLimits
from rollout_server.edge.stream.streams import Streams
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tokens.rendering_form import Arguments, RenderingForm
from rollout_server.edge.tools.pool import PoolLimits, ProcessPool
from rollout_server.edge.tools.token_count import TokenizerTokenCounter
from rollout_server.edge.toolsets.connector import DialectConnector
from rollout_server.edge.toolsets.mcp.connector import McpConnector
from rollout_server.edge.toolsets.tool_service import ToolServiceConnector
from rollout_server.edge.tracing.sdk import current_tracing
from rollout_server.edge.trainer.grpc_sampler import CompletionTrainers
from rollout_server.edge.trainer.http_client import HttpClient, HttpSettings
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.network_exposure import authenticates_callers, listens_on_loopback
from rollout_server.runtime.journal import Journal, JournalUnusable, MemoryJournal
from rollout_server.runtime.models import ModelLimits
from rollout_server.runtime.ports import Credentials, Sampler, Tool
from rollout_server.runtime.registry.dependencies import DeliveryRetryPolicy, RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.start_request import Capacity, Quota, StartRequest
from rollout_server.runtime.tools.remote_tool import ToolsetLimits
from rollout_server.runtime.tools.resources import ToolLimits, ToolResources
from rollout_server.runtime.tools.toolset import ToolsetConnector
from rollout_server.runtime.tools.toolsets import ObserveCall, Toolsets
from rollout_server.settings import TOY, Settings, WrongSettings
from rollout_server.settings.journal import journal_directory

if TYPE_CHECKING:
    from rollout_server.edge.tracing.tracing import Tracing

_log = logging.getLogger(__name__)
# Protocols in which a prompt can be sent as token ids, which token mode requires (D15).
_TAKE_IDS = frozenset({Dialect.GRPC, Dialect.STREAM, Dialect.VLLM, Dialect.SGLANG})
_JITTER = 0.25
"""Largest part by which the waits between attempts to deliver an outcome are longer."""
FEATURES = (
    "http_masked",
    "http_plain",
    "grpc_trainers",
    "token_mode",
    "engines",
    "outcome_delivery",
    "api_keys",
    "trainer_stream",
    "groups",
    "models",
    "model_endpoint",
    "policies",
    "redelivery",
    "token_texts",
    "text_search",
    "toolsets",
)


@dataclass(frozen=True, slots=True)
class Trainers:
    """Factories of samplers, one for each way in which the server calls a trainer or an engine."""

    masked: MaskedTrainers
    plain: PlainTrainers
    grpc: CompletionTrainers
    engines: Engines
    streams: StreamTrainers

    def open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        """Return the sampler of one rollout, chosen by the protocol of its completion target."""
        match spec.completions.dialect:
            case Dialect.HTTP_MASKED:
                return self.masked.open(spec, tools)
            case Dialect.HTTP_PLAIN:
                return self.plain.open(spec)
            case Dialect.GRPC:
                return self.grpc.open(uid, spec, tools)
            case Dialect.STREAM:
                return self.streams.open(uid, spec, tools)
            case Dialect.OPENAI | Dialect.VLLM | Dialect.SGLANG:
                return self.engines.open(spec, tools, tokens=spec.token_mode == spec_pb2.TOKEN_MODE_TOKENS)
            case Dialect.MCP:  # refused when the request was validated
                raise ValueError("an MCP server generates no completions")


def http_client(lookup: CheckedLookup, settings: Settings) -> HttpClient:
    """Return the HTTP client for trainers, engines and receivers of outcomes.

    Raises `WrongSettings` if ROLLOUT_TARGET_CA cannot be read.
    """
    tls = None
    if settings.target_ca is not None:
        with _naming("ROLLOUT_TARGET_CA"):
            # gRPC's check runs first, because its error names the file; that of `ssl` does not.
            channel_credentials(ClientTls(settings.target_ca))
            tls = ssl.create_default_context(cafile=settings.target_ca)
    return HttpClient(
        HttpSettings(
            timeout=settings.trainer_timeout_seconds,
            connections=settings.trainer_connections,
            resolver=lookup,
            tls=tls,
            quotes_strangers=authenticates_callers(settings),
        )
    )


def make_streams(settings: Settings, server_id: str = "") -> Streams:
    """Return the registry of streams that trainers open to this server."""
    return Streams(
        StreamLimits(
            grace=settings.stream_grace_seconds,
            timeout=settings.trainer_timeout_seconds,
            streams=settings.max_streams,
            of_caller=settings.max_streams_of_caller,
            rollouts=settings.stream_rollouts,
            unacknowledged=settings.stream_unacknowledged,
        ),
        server_id,
    )


def trainers(
    client: HttpClient, channels: Channels, tokenizers: Tokenizers, streams: Streams, settings: Settings
) -> Trainers:
    """Return the samplers of all protocols. Samplers of one protocol share one client."""
    retries = retry_policy(settings)
    form = None if settings.count_arguments == "auto" else RenderingForm(arguments=Arguments(settings.count_arguments))
    return Trainers(
        MaskedTrainers(client, tokenizers, form),
        PlainTrainers(client, retries),
        CompletionTrainers(channels, tokenizers, retries, settings.trainer_timeout_seconds),
        Engines(Access(client, retries), tokenizers),
        StreamTrainers(streams, tokenizers, retries),
    )


def further_models(engines: Engines, rules: TargetRules, settings: Settings) -> EngineModels:
    """Return the access to further models. Raises `WrongSettings` for entries and keys that cannot be used."""
    keys: list[str] = []
    with _naming("ROLLOUT_MODELS"):
        endpoints = read_endpoints(settings.models, ())
        for name, endpoint in endpoints.items():
            for wrong in rules.violations(endpoint.target.url, f"the URL of {name}"):
                raise ValueError(f"{wrong.field} {wrong.description}")
    if settings.models_keys is not None:
        keys += filter(str.strip, settings.models_keys.get_secret_value().split(","))
    if settings.models_keys_file is not None:
        with _naming("ROLLOUT_MODELS_KEYS_FILE"):
            lines = settings.models_keys_file.read_text(encoding="utf-8").splitlines()
            keys += [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    with _naming("ROLLOUT_MODELS_KEYS"):
        endpoints = read_endpoints(settings.models, keys)
    limits = ModelLimits(settings.models_calls, settings.models_tokens)
    return EngineModels(engines, endpoints, limits, settings.models_concurrency)


def retry_policy(settings: Settings) -> RetryPolicy:
    """Return how often, and for how long, a completion request is retried."""
    return RetryPolicy(
        settings.retries, settings.retry_base_seconds, settings.retry_max_seconds, settings.retry_after_seconds
    )


def reporter(client: HttpClient, channels: Channels, settings: Settings) -> OutcomeReporter:
    """Return the reporter that sends outcomes to their targets, over HTTP or gRPC."""

    def write_body(rollout: rollout_service_pb2.Rollout) -> bytes:
        # The body of POST /v1/rollout/completed is part of the asynchronous HTTP API, which the gateway defines.
        from rollout_gateway.osmosis_http.outcome import completed_body

        return completed_body(rollout)

    seconds = settings.delivery_timeout_seconds
    return OutcomeReporter(write_body, HttpCourier(client, seconds), GrpcCourier(channels, seconds))


def tracing_of_process() -> Tracing | None:
    """Return what traces rollouts with the SDK of this process; None without one."""
    from rollout_server import __version__

    return current_tracing(__version__)


def delivery_retry_policy(settings: Settings) -> DeliveryRetryPolicy:
    """Return how often, and for how long, the delivery of an outcome is retried."""
    return DeliveryRetryPolicy(
        settings.delivery_seconds,
        settings.retry_base_seconds,
        settings.retry_max_seconds,
        settings.delivery_retries,
        _JITTER,
    )


def toolset_connector(lookup: CheckedLookup, channels: Channels, settings: Settings) -> ToolsetConnector:
    """Return what opens sessions with MCP servers and ToolServices."""
    return DialectConnector(McpConnector(lookup, settings.target_ca), ToolServiceConnector(channels))


def tool_resources(
    tokenizers: Tokenizers, settings: Settings, connector: ToolsetConnector, observe: ObserveCall
) -> ToolResources:
    """Return what tool calls share: threads, processes, token counter and toolsets; and what runs programs.

    `observe` is called after each call of a toolset's tool.
    """
    limits = ToolLimits(threads=settings.tool_threads, output_bytes=settings.tool_output_bytes)
    pool = ProcessPool(PoolLimits(settings.tool_processes))
    toolsets = Toolsets(
        connector, ToolsetLimits(calls=settings.toolset_calls, call_seconds=settings.toolset_seconds), observe
    )
    return ToolResources(limits, pool, TokenizerTokenCounter(tokenizers), ProgramRunner(), toolsets)


def keyring(settings: Settings) -> Keyring:
    """Return the API keys in force. Raises `WrongSettings` for a key that cannot be used."""
    keys: list[ApiKey] = []
    for name, variable, secret in (
        ("default", "ROLLOUT_API_KEY", settings.api_key),
        ("admin", "ROLLOUT_ADMIN_KEY", settings.admin_key),
    ):
        if secret is not None:
            with _naming(variable):
                keys.append(key_of(name, secret.get_secret_value(), admin=name == "admin"))
    with _naming("ROLLOUT_API_KEYS"):
        entries = read_entries(settings.api_keys, "ROLLOUT_API_KEYS")
        if settings.api_keys and not entries:  # the setting asks for keys, so a server without one must not start
            raise ValueError("contains no key; `rollout keys new` makes one")
    with _naming("ROLLOUT_API_KEYS_FILE"):
        return Keyring([*keys, *entries], settings.api_keys_file)


def synchronous_key(settings: Settings, keys: Keyring, gateway_key: str) -> str:
    """Return the key that the gateway sends for POST /rollout without a key; "" if none is needed.

    With keys, gRPC refuses calls without one. The gateways of all workers send their `gateway_key`, as soon as a worker's socket is
    open; "" makes a new key.
    """
    return keys.anonymous_key(gateway_key) if keys.demands and not settings.synchronous_needs_key else ""


def target_rules(settings: Settings) -> TargetRules:
    """Return the rules for URLs in requests. Raises `WrongSettings`."""
    with _naming("ROLLOUT_TARGETS"):
        TargetRules.parse(settings.targets)
    with _naming("ROLLOUT_TARGET_SCHEMES"):
        return TargetRules.parse(settings.targets, settings.target_schemes, loopback=listens_on_loopback(settings))


def server_tls(settings: Settings) -> ServerTls | None:
    """Return the certificates of the gRPC port, None without TLS.

    Raises `WrongSettings` if only one of certificate and key is set, or a file cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            raise WrongSettings("ROLLOUT_TLS_CERT and ROLLOUT_TLS_KEY are needed together")
        return None
    tls = ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    with _naming("ROLLOUT_TLS_CERT, ROLLOUT_TLS_KEY or ROLLOUT_TLS_CLIENT_CA"):
        server_credentials(tls)
    return tls


def tokenizer_settings(settings: Settings) -> LoaderSettings:
    """Return where tokenizers are loaded from. The word `toy` is replaced by the directory of the built-in tokenizer."""
    from rollout_server.testing.tokenizer import TOY_TOKENIZER

    directories = {name: TOY_TOKENIZER if str(path) == TOY else path for name, path in settings.tokenizers.items()}
    return LoaderSettings(
        cache_size=settings.tokenizer_cache_size,
        trust_remote_code=settings.tokenizer_trust_remote_code,
        directories=directories,
        templates=settings.templates,
        allow_directories=settings.tokenizer_directories,
        local_files_only=settings.tokenizers_offline,
    )


def make_registry(
    agents: Sequence[Agent],
    trainers: Trainers,
    settings: Settings,
    dependencies: RegistryDependencies,
    *,
    shared: bool,
) -> RolloutRegistry:
    """Return the registry of rollouts of these agents.

    `shared`: several callers with their own API keys share the server, so one caller cannot take all of its queue and memory.
    """
    return RolloutRegistry(
        agents,
        trainers.open,
        capacity=Capacity(
            running=settings.max_running,
            queued=settings.max_queued,
            active_bytes=settings.max_active_bytes,
            per_caller=Quota(
                settings.max_running_per_caller,
                settings.max_queued_per_caller,
                settings.max_active_bytes_per_caller,
                settings.starts_per_minute_per_caller,
            ),
            shared=shared,
            finished=settings.max_records,
            finished_bytes=settings.max_record_bytes,
            finished_seconds=settings.record_ttl_seconds,
        ),
        bounds=Bounds(
            seconds=settings.max_seconds,
            default_seconds={Dialect.HTTP_MASKED: settings.timeout_seconds},
            on_drift=DriftPolicy(settings.on_drift),
            metadata_bytes=settings.max_metadata_bytes,
        ),
        dependencies=dependencies,
    )


async def open_journal(settings: Settings, stack: AsyncExitStack) -> Journal:
    """Return the journal that the settings name; `stack` closes it. Raises `WrongSettings` if it cannot be used."""
    directory = journal_directory(settings.journal, settings.grpc_port, durable_by_default=False)
    if directory is None:
        return MemoryJournal()
    from rollout_server.edge.journal import SqliteJournal  # imports SQLAlchemy, which only a durable journal needs

    key = settings.journal_key
    journal = SqliteJournal(directory, key.get_secret_value() if key is not None else None)
    with naming_journal():
        await journal.start()
    stack.push_async_callback(journal.close)
    return journal


@contextmanager
def naming_journal() -> Iterator[None]:
    """Turn errors of a journal that cannot be used into `WrongSettings`, which name its setting."""
    try:
        yield
    except JournalUnusable as error:
        raise WrongSettings(f"ROLLOUT_JOURNAL: {error}") from None


def server_facts(settings: Settings, rules: TargetRules, keys: Keyring, journal: Journal) -> ServerFacts:
    """Return what the server reports about itself, and its check of requests against the server's settings."""
    from rollout_server import __version__

    limit = settings.max_request_bytes
    return ServerFacts(
        __version__,
        (*FEATURES, "journal") if journal.is_durable else FEATURES,
        limit,
        time.time(),
        lambda request: violations(request, rules, models=settings.models_by_request),
        lambda: keys.demands,
    )


def violations(request: StartRequest, rules: TargetRules, *, models: bool = True) -> Sequence[Violation]:
    """Return the fields of a start request that this server's settings do not allow. `models`: requests may name further models.

    Raises `NotPossible` for a feature that this version does not support.
    """
    spec = request.spec
    if spec.token_mode == spec_pb2.TOKEN_MODE_TOKENS and spec.completions.dialect not in _TAKE_IDS:
        text = "token mode needs a gRPC trainer, or an engine of the dialect VLLM or SGLANG"
        raise NotPossible(text, reason="TOKEN_MODE_UNSUPPORTED")
    called = spec.completions.dialect is not Dialect.STREAM  # over a stream the trainer connected; no URL is called
    wrong = [*rules.violations(spec.completions.url, "spec.completions.url")] if called else []
    if spec.token_mode == spec_pb2.TOKEN_MODE_TOKENS and spec.tokenizer is None:
        wrong.append(Violation("spec.tokenizer", "is needed: in token mode the server renders"))
    if spec.outcome is not None:
        wrong += rules.violations(spec.outcome.url, "spec.outcome.url")
    if spec.tools is not None:
        wrong += rules.violations(spec.tools.url, "spec.tools.url")
    for name, target in spec.models.items():
        wrong += rules.violations(target.url, f"spec.models[{name}].url")
    if spec.models and not models:
        wrong.append(Violation("spec.models", "must be empty: this server's settings allow only its own models"))
    return [*wrong, *_unsendable(request.credentials), *_unnamed(request)]


def _unnamed(request: StartRequest) -> Sequence[Violation]:
    """Check that every model's bearer token has its target in the request: a key is sent to no other endpoint."""
    unknown = request.credentials.models.keys() - request.spec.models.keys()
    return [Violation("credentials.model_bearers", "has a name that is not in spec.models")] if unknown else []


def _unsendable(credentials: Credentials) -> Sequence[Violation]:
    named = {"completions_bearer": credentials.completions, "outcome_bearer": credentials.outcome}
    named |= {f"model_bearers[{name}]": bearer for name, bearer in credentials.models.items()}
    return [
        Violation(f"credentials.{name}", "must be printable ASCII: it becomes an HTTP header")
        for name, bearer in named.items()
        if not bearer.isascii() or not bearer.isprintable()
    ]


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    """Turn an error into `WrongSettings`, with the environment name of the setting in front."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = str(error)
        raise WrongSettings(text if text.startswith(variable) else f"{variable}: {text}") from None
