"""The live page as one HTML file over saved rollouts, which works without a server and without network access."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

SLOT: Final = '"ROLLOUTS-DATA"'
"""Stands where the JSON of the rollouts belongs. The page fills it, too, when it exports a rollout."""

_ENTRY: Final = 'import "page/app.js";'
_POLICY: Final = (
    "default-src 'none'; script-src {scripts} data:; style-src {styles}; img-src data:; "
    "require-trusted-types-for 'script'; trusted-types 'none'; base-uri 'none'; form-action 'none'"
)


@cache
def standalone_page(title: str = "Rollouts", intro: str = "", style: str = "") -> str:
    """Return the page with an empty slot for rollouts.

    Its modules are in an import map of `data:` URLs, so they stay as they are. The policy allows them, but no connections.

    Args:
        title: text of the document's title and of its first heading.
        intro: trusted HTML above the list of rollouts.
        style: CSS of `intro`.
    """
    files = resources.files("rollout_gateway.page") / "files"
    index = (files / "index.html").read_text(encoding="utf-8")
    imports = {f"page/{name}": _data_url("text/javascript", content) for name, content in sorted(_modules(files))}
    imported = msgspec.json.encode({"imports": imports}).decode()
    sheets = re.findall(r'rel="stylesheet" href="page/(.*?)"', index)
    css = "".join((files / sheet).read_text(encoding="utf-8") for sheet in sheets) + style
    policy = _POLICY.format(scripts=f"{source_hash(imported)} {source_hash(_ENTRY)}", styles=source_hash(css))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{escape(title)}</title>\n'
        f'<link rel="icon" href="{_data_url("image/svg+xml", (files / "icon.svg").read_bytes())}">\n<style>{css}</style>\n'
        f'<script type="importmap">{imported}</script>\n'
    )
    data = f'<script type="application/json" id="rollouts">{SLOT}</script>\n<script type="module">{_ENTRY}</script>\n'
    above = f'<section id="intro">{intro}</section>\n' if intro else ""
    page = index
    for part, new in (
        (r"<title>.*<script [^\n]*</script>\n(?=</head>)", head),
        (r"<nav.*?</nav>\n", ""),
        (r"(?=<main)", above),
        (r"<noscript>.*?</noscript>\n", "<noscript><p>This page needs JavaScript.</p></noscript>\n" + data),
    ):
        page, found = re.subn(part, new.replace("\\", r"\\"), page, flags=re.DOTALL)
        if found != 1:
            raise RuntimeError(f"index.html has {found} parts {part!r}")
    return page


def standalone_document(rollouts: bytes, page: str | None = None) -> bytes:
    """Return a page with the rollouts in its slot.

    Args:
        rollouts: JSON text of `{"rollouts": [{"rollout", "events", "texts"}]}`: JSON of the REST API with the view "full", its
            events with the detail "full", and by segment id the texts of its tokens.
        page: a page of `standalone_page`; None: the one without an introduction.
    """
    before, _, after = (page or standalone_page()).encode().partition(SLOT.encode())
    # No text can end the script element then, nor begin a comment in it.
    return before + rollouts.replace(b"<", rb"\u003c") + after


def _modules(folder: Traversable, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the JavaScript files of a folder and the folders in it, with their paths."""
    for each in folder.iterdir():
        if each.is_dir():
            yield from _modules(each, f"{path}{each.name}/")
        elif each.name.endswith(".js"):
            yield path + each.name, each.read_bytes()


def _data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def source_hash(text: str) -> str:
    """Return the source expression of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
