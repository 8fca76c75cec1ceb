"""Cache of loaded tokenizers: each tokenizer is loaded once and shared by all rollouts that use it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache, partial
from typing import TypeAlias

from rollout_server.core.capture.call import OfferedTool
from rollout_server.core.capture.rendering import LaterSystem
from rollout_server.core.message import JSON, parse_object
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import Spec, TokenizerName
from rollout_server.edge.tokens.loader import LoaderSettings, read_tokenizer
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import RenderingForm
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool

_log = logging.getLogger(__name__)
_Key: TypeAlias = tuple[str, str]
_TOOLS = 256
_CHANGED = (
    "the server stopped while the rollout ran, and has another version of tokenizer {!r}, its chat template or transformers now: "
    "later turns would be rendered differently from earlier ones; start it again"
)
_LONGEST_SCHEMA = 16_000
"""In characters: a longer schema is parsed for each rollout, so that the parsed tools take little memory."""


class Tokenizers:
    """Load tokenizers and keep the most recently used ones. One instance belongs to one event loop.

    Loading and rendering have separate thread pools, so that a slow download does not delay the rendering of running rollouts.
    """

    def __init__(self, settings: LoaderSettings) -> None:
        if settings.cache_size < 1 or settings.threads < 1:
            raise ValueError("cache_size and threads must be at least 1")
        self._settings = settings
        self._loaders = ThreadPoolExecutor(settings.threads, thread_name_prefix="tokens-load")
        self._renderers = ThreadPoolExecutor(settings.threads, thread_name_prefix="tokens-render")
        self._kept: OrderedDict[_Key, LoadedTokenizer] = OrderedDict()
        self._loading: dict[_Key, asyncio.Future[LoadedTokenizer]] = {}

    async def load(self, name: TokenizerName) -> LoadedTokenizer:
        """Return the tokenizer with this name and revision; load it if it is not cached.

        Concurrent callers share one load. The load continues when one of its callers is cancelled. A failed load is not cached.
        A mapped name (`LoaderSettings.directories`) ignores its revision.

        Raises `RolloutFailed` (TOKENIZER) with a text that says what to do.
        """
        key = (name.name, "" if name.name in self._settings.directories else name.revision)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._loading:
            loading = asyncio.get_running_loop().run_in_executor(self._loaders, self._load, name)
            self._loading[key] = loading
            loading.add_done_callback(lambda done: self._loaded(key, done))
        return await asyncio.shield(self._loading[key])

    async def load_named(self) -> None:
        """Load the tokenizers that the settings name, up to the size of the cache. Log the ones that fail, and continue.

        The server calls this before it reports ready. Importing transformers and loading a tokenizer take seconds, which the
        first rollout would otherwise wait for.
        """
        for name, directory in list(self._settings.directories.items())[: self._settings.cache_size]:
            try:
                await self.load(TokenizerName(name))
            except RolloutFailed as error:  # its text is meant for callers and does not contain the directory
                _log.error("%s (%s); rollouts that name it will fail", error, directory)

    async def close(self) -> None:
        """Wait for renderings that are running. Loads are abandoned, because they may block on the network."""
        self._loaders.shutdown(wait=False)
        await asyncio.to_thread(self._renderers.shutdown)

    def _load(self, name: TokenizerName) -> LoadedTokenizer:
        files = read_tokenizer(name, self._settings)
        trusted = name.name in self._settings.directories
        loaded = LoadedTokenizer(
            name.name, files.tokenizer, self._renderers, files.ends, digest=files.digest, is_trusted=trusted
        )
        if loaded.probed.refusal:
            raise RolloutFailed(
                Failure(Category.TOKENIZER, f"tokenizer {name.name!r} cannot be used: {loaded.probed.refusal}")
            )
        return loaded

    def _loaded(self, key: _Key, done: asyncio.Future[LoadedTokenizer]) -> None:
        del self._loading[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[key] = done.result()
        if len(self._kept) > self._settings.cache_size:
            self._kept.popitem(last=False)


async def open_renderer(
    tokenizers: Tokenizers,
    name: TokenizerName | None,
    tools: Sequence[Tool | OfferedTool],
    form: RenderingForm | None = None,
    date: datetime | None = None,
    *,
    rendered_by: str = "",
) -> Renderer:
    """Return a renderer for one rollout; load the tokenizer if it is not cached.

    Args:
        form: how the trainer is known to render and count.
        date: what templates print as the current time; None: now.
        rendered_by: digest of what rendered the turns before a restart of the server; empty if there are none.

    Raises `RolloutFailed` if the tokenizer cannot be loaded, a template argument is refused, or (INTERRUPTED) the files are not
    those of `rendered_by` any more.
    """
    if name is None:
        raise RolloutFailed(
            Failure(
                Category.TOKENIZER, "the rollout names no tokenizer, so the server cannot render it; set a tokenizer"
            )
        )
    loaded = await tokenizers.load(name)
    if rendered_by and rendered_by != loaded.digest:
        raise RolloutFailed(Failure(Category.INTERRUPTED, _CHANGED.format(name.name)))
    switches = parse_object(name.template_kwargs_json) if name.template_kwargs_json else {}
    new = partial(Renderer, loaded, [as_function(tool) for tool in tools], switches, form=form, date=date)
    # In a thread: template arguments that were not seen before make the constructor probe the template again.
    return await loaded.run(new) if switches else new()


async def later_system(tokenizers: Tokenizers, spec: Spec) -> LaterSystem:
    """Return the role with which the rollout's chat template renders a system message behind other messages.

    Raises `RolloutFailed` if the tokenizer cannot be loaded.
    """
    if spec.tokenizer is None:
        return "user"
    loaded = await tokenizers.load(spec.tokenizer)
    return "system" if loaded.probed.later_system else "user"


def as_function(tool: Tool | OfferedTool) -> Mapping[str, JSON]:
    """Return the tool in OpenAI's format for function tools. The same tool is the same object, which must not be changed."""
    function = _function if len(tool.parameters_json_schema) <= _LONGEST_SCHEMA else _function.__wrapped__
    return function(tool.name, tool.description, tool.parameters_json_schema)


@lru_cache(_TOOLS)
def _function(name: str, description: str, parameters_json_schema: str) -> Mapping[str, JSON]:
    parameters = parse_object(parameters_json_schema)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
