"""The page at /dashboard and the data that it draws."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response

from vllm.entrypoints.openai.encoding import json_response

if TYPE_CHECKING:
    from vllm.v1.metrics.dashboard.collector import Dashboard

# Nothing that a model or a client says may run in the page or leave it.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; script-src {script}; style-src {style}"
)


def add_dashboard_routes(app: FastAPI, dashboard: "Dashboard") -> None:
    """Serve the page of `dashboard`."""
    page = files("vllm.entrypoints.openai").joinpath("dashboard.html").read_bytes()
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _POLICY.format(
            script=_hash_of(page, "script"), style=_hash_of(page, "style")
        ),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @app.get("/dashboard", include_in_schema=False)
    async def show_page() -> Response:
        return Response(page, headers=headers, media_type="text/html")

    @app.get("/dashboard/data", include_in_schema=False)
    async def tell_data(request: str | None = None) -> Response:
        return json_response(
            dashboard.snapshot(request), headers={"Cache-Control": "no-store"}
        )


def _hash_of(page: bytes, tag: str) -> str:
    """Return the one element of this kind as a source of a content security policy."""
    name = tag.encode()
    [content] = re.findall(rb"<%s>(.*?)</%s>" % (name, name), page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    return f"'sha256-{digest}'"
