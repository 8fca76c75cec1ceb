"""`rollout view`: the page over saved rollouts, or over those of a running server, read-only."""

from __future__ import annotations

import os
import secrets
import webbrowser
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from rollout_server.cli.connection import API_KEY
from rollout_server.cli.errors import quiet_transformers, report_errors
from rollout_server.cli.flags import accept_flags, pick_flags, tokenizer_directories
from rollout_server.cli.json_output import AsJson, JsonOutput, open_output
from rollout_server.runtime.aio.stop_signals import StopSignals

if TYPE_CHECKING:
    import httpx
    from starlette.types import ASGIApp

    from rollout_server.archive.archive import Archive
    from rollout_server.archive.service import ArchiveService

_SECONDS = 600.0
_URLS = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class ViewFlags:
    """Arguments and flags of `rollout view`."""

    targets: Annotated[
        list[str], typer.Argument(metavar="FILE|DIR|URL...", help="Files and directories, or the URL of a gateway.")
    ]
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML file, which needs no server, and exit.")
    ] = None
    uid: Annotated[list[str] | None, typer.Option(help="Rollout for --html, repeatable. Default: all.")] = None
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 means any free port.")] = 0
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIRECTORY", help="Tokenizer to decode tokens, repeatable; also ROLLOUT_TOKENIZERS."),
    ] = None
    as_json: AsJson = False


@accept_flags(ViewFlags)
def view(**values: Any) -> None:
    """Show saved rollouts in the browser: the same page as that of a server.

    A FILE is the JSON of GET /v1/rollouts/UID?view=full, JSON lines of rollouts
    or samples, a results file of `rollout eval`, or a protobuf Rollout. A DIR has
    such files, or it is the journal of a stopped server. A URL is that of a
    running server's HTTP port; ROLLOUT_API_KEY is the key.

    Nothing is changed: rollouts cannot be started or cancelled here. Only
    programs of this machine that know the printed URL reach the page.

    With --json: a line {"serving": {"url"}} once it serves, or {"written":
    {"file", "rollouts", "bytes"}} with --html.
    """
    quiet_transformers()
    flags = pick_flags(ViewFlags, values)
    with report_errors("view"), open_output(as_json=flags.as_json) as output:
        from rollout_server.edge.grpc_loop import run_loop

        viewer = _Viewer(flags, output)
        urls = [target for target in flags.targets if target.startswith(_URLS)]
        if urls and len(flags.targets) > 1:
            raise ValueError("a URL is shown alone; leave out the other arguments")
        if urls:
            run_loop(_view_server(urls[0], viewer))
            return
        from rollout_server.archive.saved import open_archive

        with open_archive([Path(target) for target in flags.targets], _warn) as archive:
            run_loop(_view_archive(archive, tokenizer_directories(flags.tokenizer or []), viewer))


class _Viewer:
    """What to do with the page: write it, or serve it until Ctrl-C."""

    def __init__(self, flags: ViewFlags, output: JsonOutput) -> None:
        self._flags = flags
        self._output = output

    async def show(self, app: ASGIApp, fragment: str = "") -> None:
        """Serve an application under a path that cannot be guessed, or write what it shows."""
        import httpx
        from starlette.applications import Starlette
        from starlette.routing import Mount

        from rollout_server.archive.server import listening

        # Other users of the machine, and pages of other sites, reach a loopback port too.
        path = secrets.token_urlsafe(16)
        async with listening(Starlette(routes=[Mount(f"/{path}", app)]), self._flags.port) as origin:
            url = f"{origin}{path}/"
            if self._flags.html is not None:
                async with httpx.AsyncClient(base_url=url, timeout=_SECONDS, trust_env=False) as client:
                    await self.write(client)
                return
            self._announce(f"{url}{fragment}")
            await StopSignals().first.wait()

    @property
    def writes(self) -> bool:
        """Whether the page is written, and not served."""
        return self._flags.html is not None

    async def write(self, client: httpx.AsyncClient, uids: Sequence[str] = ()) -> None:
        """Write the HTML file. `uids`: the rollouts, if the user names none."""
        from rollout_server.archive.document import document_of

        assert self._flags.html is not None  # noqa: S101 - see `writes`
        content, count = await document_of(client, self._flags.uid or uids, _warn)
        self._flags.html.write_bytes(content)
        typer.echo(f"{self._flags.html}: {count} rollout{'' if count == 1 else 's'}, {len(content) / 1e6:.1f} MB")
        self._output.line({"written": {"file": str(self._flags.html), "rollouts": count, "bytes": len(content)}})

    def _announce(self, url: str) -> None:
        typer.echo(f"{url}\nCtrl-C ends it.")
        self._output.line({"serving": {"url": url}})
        if self._flags.open_browser:
            webbrowser.open(url)


async def _view_archive(archive: Archive, directories: Mapping[str, Path], viewer: _Viewer) -> None:
    from rollout_server.archive.server import archive_app

    async with _service(archive, directories) as service, archive_app(service) as app:
        await viewer.show(app, f"#/rollouts/{archive.uids[0]}" if len(archive.uids) == 1 else "")


@asynccontextmanager
async def _service(archive: Archive, directories: Mapping[str, Path]) -> AsyncIterator[ArchiveService]:
    """Yield a service with the tokenizers of the settings and of `directories`. Nothing is downloaded."""
    from rollout_server import __version__
    from rollout_server.archive.service import ArchiveService
    from rollout_server.assembly import tokenizer_settings
    from rollout_server.core.spec import TokenizerName
    from rollout_server.edge.tokens.cache import Tokenizers
    from rollout_server.settings import TOY, load

    chosen = {TOY: Path(TOY), **load().tokenizers, **directories}
    tokenizers = Tokenizers(tokenizer_settings(load(tokenizers=chosen, tokenizers_offline=True)))
    only = TokenizerName(next(iter(directories))) if len(directories) == 1 else None
    try:
        yield ArchiveService(archive, __version__, tokenizers, only)
    finally:
        await tokenizers.close()


async def _view_server(url: str, viewer: _Viewer) -> None:
    from rollout_server.archive.remote import check, connect, remote_app

    fragment = urlsplit(url).fragment
    async with connect(url, os.environ.get(API_KEY, "")) as client:
        await check(client)
        if viewer.writes:
            kind, _, name = fragment.partition("?")[0].strip("/").partition("/")
            await viewer.write(client, [name] if kind == "rollouts" and name else [])
        else:
            await viewer.show(remote_app(client), f"#{fragment}" if fragment else "")


def _warn(text: str) -> None:
    from rollout_server.inspection.escape import visible_lines

    typer.echo(visible_lines(text), err=True)
