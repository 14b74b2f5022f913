"""Starts the engine and the HTTP server beside it, watches both, and ends both."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.logger import configure_logging, init_logger
from vllm.platforms import leave_processors
from vllm.utils.process_heap import settle_heap

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from vllm.entrypoints.openai.in_flight import InFlightRequests
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

# Seconds.
_CLOSE_TIMEOUT_S = 5


def run_server(args: argparse.Namespace) -> None:
    """Serve until a signal comes.

    Args:
        args: the parsed flags of the engine and of `add_frontend_args`.

    Raises:
        UnsupportedError: this set-up cannot be served.
        VLLMValidationError: a flag's value cannot be used.
        OSError: the address cannot be listened on.
        SystemExit: 1, the engine has stopped by itself.
    """
    import uvloop

    start = time.perf_counter()
    if envs.VLLM_CONFIGURE_LOGGING:
        configure_logging("APIServer")
    frontend = FrontendArgs.from_namespace(args)
    check_ssl_files(frontend)
    # Before the engine: an address in use must not cost a start.
    listener = listen(frontend)
    _warn_if_open(frontend)
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    from vllm.v1.engine.async_llm import AsyncLLM

    # Beside the start of the engine process, and not before it: that is the longer way.
    loader = threading.Thread(target=_load_web_modules, name="load-web", daemon=True)
    loader.start()
    engine = AsyncLLM.from_vllm_config(vllm_config)
    try:
        loader.join()
        settle_heap()
        # Not before: the engine's process would have begun with what is left.
        leave_processors(envs.VLLM_CPU_OMP_THREADS_BIND or frozenset())
        is_healthy = uvloop.run(serve(engine, frontend, listener, start))
    finally:
        engine.shutdown()
        if frontend.uds and os.path.exists(frontend.uds):
            os.unlink(frontend.uds)
    if not is_healthy:
        raise SystemExit(1)


def _load_web_modules() -> None:
    for name in (
        "vllm.entrypoints.openai.app",
        "vllm.entrypoints.openai.http_protocol",
    ):
        import_module(name)


def check_ssl_files(args: FrontendArgs) -> None:
    """Check that HTTPS has what it needs, if it is asked for.

    Raises:
        VLLMValidationError: a file is missing, or the two are no key and certificate.
    """
    if not args.ssl_keyfile and not args.ssl_certfile:
        return
    if not args.ssl_keyfile or not args.ssl_certfile:
        raise VLLMValidationError(
            "HTTPS needs both --ssl-keyfile and --ssl-certfile",
            parameter="ssl_certfile" if args.ssl_keyfile else "ssl_keyfile",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The empty password: a key that has one must not stop the start with a prompt.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except OSError as error:
        raise VLLMValidationError(
            f"--ssl-certfile {args.ssl_certfile} and --ssl-keyfile {args.ssl_keyfile} "
            f"must be readable PEM files that belong together, without a password: "
            f"{error.strerror or error}",
            parameter="ssl_certfile",
        ) from None


def listen(args: FrontendArgs) -> socket.socket:
    """Return a socket that is bound to the address of `args`, not open yet.

    Raises:
        OSError: the address is in use or does not exist.
    """
    if args.uds:
        return _listen_on_file(args.uds)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise OSError(f"--host {args.host}: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {args.host} port {args.port}: {error.strerror}; choose "
            "another --port"
        ) from None
    return listener


def _listen_on_file(path: str) -> socket.socket:
    if os.path.exists(path):
        raise OSError(f"--uds {path}: the file exists already; remove it")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        # Only this user: whoever reaches the socket may use the server.
        os.chmod(path, 0o600)
    except OSError as error:
        listener.close()
        raise OSError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def _warn_if_open(args: FrontendArgs) -> None:
    is_local = args.uds or args.host in ("127.0.0.1", "localhost", "::1")
    if not is_local and not args.api_key:
        logger.warning(
            "Listening on %s without an --api-key: whoever reaches this machine can "
            "use the server",
            args.host,
        )


async def serve(
    engine: "AsyncLLM", args: FrontendArgs, listener: socket.socket, start: float
) -> bool:
    """Serve until a signal comes or the engine stops; return whether it was healthy."""
    from vllm.entrypoints.openai.app import build_app

    app = build_app(engine, args)
    server = make_server(app, args)
    _configure_server_logs(args)
    stopper = _Stopper(server, app.state.in_flight)
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopper.stop)
    watcher = asyncio.ensure_future(_watch(engine, server))
    logger.info(
        "Serving %s on %s after %.2f s",
        ", ".join(engine.vllm_config.model_config.served_model_name),
        _describe_address(args, listener),
        time.perf_counter() - start,
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        stopper.cancel()
        is_healthy = stopper.was_asked or not engine.errored
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return is_healthy


def make_server(app: "FastAPI", args: FrontendArgs) -> "uvicorn.Server":
    """Return the HTTP server of `app`."""
    import uvicorn

    from vllm.entrypoints.openai.http_protocol import LimitedHttpProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave signals alone: uvicorn would end the process by them."""
            yield

    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        log_config=None,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        server_header=False,
        root_path=args.root_path,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=int(envs.VLLM_SHUTDOWN_GRACE) + _CLOSE_TIMEOUT_S,
    )
    return Server(config)


class _Stopper:
    """Ends the server after a signal: first new work, then old, then all."""

    def __init__(self, server: "uvicorn.Server", in_flight: "InFlightRequests") -> None:
        self._server = server
        self._in_flight = in_flight
        self._timer: asyncio.TimerHandle | None = None
        self.was_asked = False

    def stop(self) -> None:
        """Take no new requests; give those in flight a moment. Twice: at once."""
        if self.was_asked:
            self._in_flight.stop()
            self._server.force_exit = True
            return
        self.was_asked = True
        logger.info("Shutting down, %d requests in flight", len(self._in_flight))
        self._server.should_exit = True
        loop = asyncio.get_running_loop()
        grace = envs.VLLM_SHUTDOWN_GRACE
        self._timer = loop.call_later(grace, self._in_flight.stop)

    def cancel(self) -> None:
        """Forget what is still to come."""
        if self._timer is not None:
            self._timer.cancel()


async def _watch(engine: "AsyncLLM", server: "uvicorn.Server") -> None:
    """Stop the server when the engine has stopped."""
    error: EngineDeadError
    try:
        error = await engine.wait_until_dead()
    except EngineDeadError as dead:
        error = dead
    logger.error("The server stops, since it has no engine. %s", error)
    # Requests in flight are answered before the server leaves.
    server.should_exit = True


class PathFilter(logging.Filter):
    """Drops the access lines of some paths."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, version, status.
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        return str(args[2]).partition("?")[0] not in self._paths


def _configure_server_logs(args: FrontendArgs) -> None:
    """Write uvicorn's lines in the form of our own."""
    if not envs.VLLM_CONFIGURE_LOGGING:
        return
    server_logger = logging.getLogger("uvicorn")
    server_logger.handlers = logging.getLogger("vllm").handlers
    server_logger.propagate = False
    access_logger = logging.getLogger("uvicorn.access")
    if args.disable_access_log_for_endpoints:
        access_logger.addFilter(PathFilter(args.disable_access_log_for_endpoints))
    if args.disable_uvicorn_access_log:
        access_logger.disabled = True


def _describe_address(args: FrontendArgs, listener: socket.socket) -> str:
    if args.uds:
        return f"unix:{args.uds}"
    scheme = "https" if args.ssl_keyfile else "http"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{args.root_path}"
