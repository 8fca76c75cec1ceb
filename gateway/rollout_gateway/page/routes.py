"""The HTML pages `/` and `/docs`, and the files that they load."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rollout_gateway.page.standalone import source_hash, standalone_page

_PAGE: Final = "/page"
_DOCS: Final = "/docs/files"
# Relative to the page: links stay valid behind a proxy that serves the gateway under a path prefix.
_LOCAL: Final = _DOCS.removeprefix("/")
_INLINE: Final = re.compile(r"<script(?: type=\"importmap\")?>(.*?)</script>", re.DOTALL)

# `no-cache`: a browser asks whether a file has changed, so that an upgrade never mixes modules of two versions.
_HEADERS: Final = {"cache-control": "no-cache", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the file, or 304 if the browser has it."""
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def add_pages(app: FastAPI) -> None:
    """Add the live page at `/`, Swagger UI at `/docs`, and the files that they load.

    Both pages work without internet access and behind a path prefix. Neither contains state, so loading them needs no API key.
    """
    files = resources.files("rollout_gateway.page") / "files"
    live = (files / "index.html").read_text(encoding="utf-8")
    swagger = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url=f"{_LOCAL}/swagger-ui-bundle.js",
        swagger_css_url=f"{_LOCAL}/swagger-ui.css",
        swagger_favicon_url=f"{_LOCAL}/favicon.png",
    )
    # The page writes text of models and tools into the document. Trusted Types refuse every way of parsing it as HTML.
    _add_page(app, "/", live, "img-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'")
    _add_page(app, "/docs", bytes(swagger.body).decode(), "img-src 'self' data:")
    app.add_route(f"{_PAGE}/standalone.html", _standalone, include_in_schema=False)
    app.mount(_PAGE, _PageFiles(directory=str(files)))
    app.mount(_DOCS, StaticFiles(directory=str(resources.files("fastapi_offline") / "static")))


def _add_page(app: FastAPI, path: str, html: str, more: str) -> None:
    """Add a page. Its Content-Security-Policy allows its inline scripts, this origin's files, and `more`."""
    scripts = " ".join(map(source_hash, _INLINE.findall(html)))
    policy = (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self'; connect-src 'self'; {more}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    async def page(_: Request) -> HTMLResponse:
        return HTMLResponse(html, headers={"content-security-policy": policy, **_HEADERS})

    app.add_route(path, page, include_in_schema=False)


def _standalone(_: Request) -> HTMLResponse:
    """Return the document into which the page exports rollouts. It has its own policy."""
    return HTMLResponse(standalone_page(), headers={"content-security-policy": "frame-ancestors 'none'", **_HEADERS})
