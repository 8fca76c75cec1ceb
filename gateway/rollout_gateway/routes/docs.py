"""The page at /docs: Swagger UI, from files that are installed with this package, so that it needs no internet."""

import base64
import hashlib
import re
from importlib import resources
from typing import Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import HTMLResponse

_FILES: Final = "/docs/files"
# Relative to the page, so that they hold behind a proxy that serves the gateway under a prefix.
_LOCAL: Final = _FILES.removeprefix("/")
_SCRIPT: Final = re.compile("<script>(.*?)</script>", re.DOTALL)


def add_docs(app: FastAPI) -> None:
    """Adds the page and the files that it loads."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url=f"{_LOCAL}/swagger-ui-bundle.js",
        swagger_css_url=f"{_LOCAL}/swagger-ui.css",
        swagger_favicon_url=f"{_LOCAL}/favicon.png",
    )
    html = bytes(page.body).decode()
    headers = {"content-security-policy": _policy(html)}

    async def docs(_: Request) -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    app.add_route("/docs", docs, include_in_schema=False)
    app.mount(_FILES, StaticFiles(directory=str(resources.files("fastapi_offline") / "static")))


def _policy(html: str) -> str:
    """Only this origin, and of scripts in the page only those that it has now."""
    digests = (hashlib.sha256(script.encode()).digest() for script in _SCRIPT.findall(html))
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
