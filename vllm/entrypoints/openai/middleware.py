"""What happens to every HTTP request before and after its endpoint."""

import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.encoding import error_response
from vllm.entrypoints.openai.errors import ErrorInfo

# They tell nothing and cost nothing: load balancers ask them without a key, and a
# browser that opens a page has none. The dashboard's page asks its reader for one.
OPEN_PATHS = frozenset({"/health", "/ping", "/dashboard"})

_REQUEST_ID = re.compile(r"[!-~]{1,256}", re.ASCII)


class AuthenticationMiddleware:
    """Lets through only requests with one of the keys, except to OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] != "http" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ErrorInfo(
            "Missing or wrong API key: send the header Authorization: Bearer KEY",
            "AuthenticationError",
            None,
            401,
        )
        response = error_response(error, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            return True
        header = Headers(scope=scope).get("Authorization", "")
        scheme, _, token = header.partition(" ")
        digest = _digest(token.strip())
        # Every key is compared, in constant time, whatever the others gave.
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RequestIdMiddleware:
    """Sends `X-Request-Id` with every answer: the client's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with its id in `scope["state"]`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("X-Request-Id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HttpMetrics:
    """Counts and times of HTTP requests, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "http_requests",
            "Number of HTTP requests by method, status class and path.",
            ("method", "status", "handler"),
            registry=self.registry,
        )
        self.duration = Histogram(
            "http_request_duration_seconds",
            "Time from an HTTP request to the end of its answer.",
            ("method", "handler"),
            buckets=(0.1, 0.5, 1.0, 5.0, 10.0, 60.0),
            registry=self.registry,
        )


class HttpMetricsMiddleware:
    """Fills HttpMetrics."""

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, paths: frozenset[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        # Others count as "none": a client must not be able to add label values.
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            self._count(scope, status, time.perf_counter() - start)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        handler = path if path in self._paths else "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, f"{status // 100}xx", handler).inc()
        self._metrics.duration.labels(method, handler).observe(seconds)


_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
