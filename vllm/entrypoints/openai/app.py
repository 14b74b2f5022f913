"""The web application: which path is answered by what."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from vllm import envs
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.dashboard import add_dashboard_routes
from vllm.entrypoints.openai.encoding import error_response, json_response
from vllm.entrypoints.openai.errors import (
    ClientDisconnectedError,
    ErrorInfo,
    error_from,
    error_from_status,
)
from vllm.entrypoints.openai.in_flight import EventStreamResponse, InFlightRequests
from vllm.entrypoints.openai.middleware import (
    AuthenticationMiddleware,
    HttpMetrics,
    HttpMetricsMiddleware,
    RequestIdMiddleware,
)
from vllm.entrypoints.openai.openapi import describe, set_openapi
from vllm.entrypoints.openai.protocol.chat import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.protocol.common import GenerationRequest
from vllm.entrypoints.openai.protocol.completion import (
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
)
from vllm.entrypoints.openai.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.request_body import IgnoredFieldsReporter, read_json
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_engine import EngineClient, choose_request_id
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from vllm.exceptions import EngineDeadError
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.version import __version__

# Templates and tokenizers; the tokenizer runs without the interpreter's lock.
_NUM_THREADS = 2
# nginx's number for a client that has left; nobody receives it.
_CLIENT_CLOSED_REQUEST = 499


def build_app(engine: EngineClient, args: FrontendArgs) -> FastAPI:
    """Return the application that serves `engine`.

    `app.state.in_flight` holds the requests that are being answered.
    """
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompt")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="vllm",
        version=__version__,
        lifespan=lifespan,
        docs_url=None if args.disable_fastapi_docs else "/docs",
        redoc_url=None,
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",
    )
    in_flight = InFlightRequests()
    app.state.in_flight = in_flight
    models = OpenAIServingModels(engine.vllm_config)
    parts = (engine, models, args, pool)
    chat = OpenAIServingChat(*parts)
    completion = OpenAIServingCompletion(*parts)
    tokenization = OpenAIServingTokenization(*parts)
    add = partial(_add_post_route, app, _Answerer(in_flight))
    add(
        "/v1/chat/completions",
        chat.create,
        ChatCompletionRequest,
        ChatCompletionResponse,
        is_streamed=True,
    )
    add(
        "/v1/completions",
        completion.create,
        CompletionRequest,
        CompletionResponse,
        is_streamed=True,
    )
    add("/tokenize", tokenization.tokenize, TokenizeRequest, TokenizeResponse)
    add("/detokenize", tokenization.detokenize, DetokenizeRequest, DetokenizeResponse)
    _add_model_routes(app, models)
    http_metrics = HttpMetrics()
    _add_monitoring_routes(app, engine, http_metrics)
    if args.enable_server_load_tracking:
        _add_load_route(app, in_flight)
    if engine.dashboard is not None:
        add_dashboard_routes(app, engine.dashboard)
    if envs.VLLM_SERVER_DEV_MODE:
        _add_development_routes(app, engine)
    set_openapi(
        app,
        [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest],
        [
            ChatCompletionResponse,
            ChatCompletionChunk,
            CompletionResponse,
            CompletionChunk,
            TokenizeResponse,
            DetokenizeResponse,
            ModelCard,
            ModelList,
        ],
    )
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_unforeseen)
    _add_middleware(app, args, http_metrics)
    return app


def _add_post_route(
    app: FastAPI,
    answerer: "_Answerer",
    path: str,
    serve: Callable[[Any, str], Awaitable[Any]],
    request: type[BaseModel],
    response: type[Any],
    *,
    is_streamed: bool = False,
) -> None:
    app.add_api_route(
        path,
        answerer.endpoint(request, serve),
        methods=["POST"],
        openapi_extra=describe(request, response, is_streamed=is_streamed),
        response_class=Response,
        name=path.strip("/").replace("/", "_"),
    )


class _Answerer:
    """Turns a serving method into an endpoint that answers whatever happens."""

    def __init__(self, in_flight: InFlightRequests) -> None:
        self._in_flight = in_flight
        self._reporter = IgnoredFieldsReporter()

    def endpoint(
        self, model: type[BaseModel], serve: Callable[[Any, str], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint that reads `model` and answers with `serve`."""

        async def handle(request: Request) -> Response:
            headers: dict[str, str] = {}
            parsed: BaseModel | None = None
            try:
                parsed = await read_json(request, model)
                headers = self._reporter.report(parsed.unknown_fields())  # type: ignore[attr-defined]
                request_id = _request_id(request, parsed)
                work = _first_part(serve(parsed, request_id))
                result = await self._in_flight.run(work, request.receive)
            except ClientDisconnectedError:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            except Exception as exception:
                error = error_from(exception)
                if isinstance(parsed, GenerationRequest):
                    error.param = parsed.field_of(error.param)
                return error_response(error, headers)
            if isinstance(result, tuple):
                first, events = result
                return EventStreamResponse(first, events, self._in_flight, headers)
            return json_response(result, headers=headers)

        return handle


async def _first_part(
    work: Awaitable[Any],
) -> tuple[bytes, AsyncGenerator[bytes, None]] | Any:
    """Return the answer, or the first events of a stream and the rest.

    The wait lets a request that cannot be served fail with a status of its own.
    """
    result = await work
    if not isinstance(result, AsyncGenerator):
        return result
    return await anext(result, b""), result


def _request_id(request: Request, parsed: BaseModel) -> str:
    of_body = getattr(parsed, "request_id", None)
    of_state = getattr(request.state, "request_id", None)
    return choose_request_id(of_body, of_state or request.headers.get("X-Request-Id"))


def _add_model_routes(app: FastAPI, models: OpenAIServingModels) -> None:
    async def list_models() -> Response:
        return json_response(models.list())

    async def show_model(name: str) -> Response:
        try:
            return json_response(models.show(name))
        except Exception as exception:
            return error_response(error_from(exception))

    for path, endpoint, response in (
        ("/v1/models", list_models, ModelList),
        ("/v1/models/{name:path}", show_model, ModelCard),
    ):
        app.add_api_route(
            path,
            endpoint,
            openapi_extra=describe(None, response),
            response_class=Response,
        )


def _add_monitoring_routes(
    app: FastAPI, engine: EngineClient, http_metrics: HttpMetrics
) -> None:
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        try:
            await engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response()

    # Two routes, or both would have the same id in the OpenAPI document.
    for method in ("GET", "POST"):
        app.add_api_route(
            "/ping",
            health,
            methods=[method],
            name=f"ping_{method.lower()}",
            response_class=Response,
        )

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        registries = (get_prometheus_registry(), http_metrics.registry)
        text = b"".join(generate_latest(registry) for registry in registries)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_load_route(app: FastAPI, in_flight: InFlightRequests) -> None:
    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": len(in_flight)})


def _add_development_routes(app: FastAPI, engine: EngineClient) -> None:
    @app.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache() -> Response:
        try:
            await engine.reset_prefix_cache()
        except Exception as exception:
            return error_response(error_from(exception))
        return Response()


async def _answer_http_exception(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, HTTPException), "registered for this class"
    error = error_from_status(exception.status_code, str(exception.detail))
    return error_response(error, exception.headers)


async def _answer_unforeseen(request: Request, exception: Exception) -> Response:
    # The server logs it with its traceback.
    error = ErrorInfo("Internal server error", "InternalServerError", None, 500)
    return error_response(error)


def _add_middleware(app: FastAPI, args: FrontendArgs, metrics: HttpMetrics) -> None:
    """Wrap the application, from the inside to the outside."""
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    if args.api_key:
        app.add_middleware(AuthenticationMiddleware, api_keys=args.api_key)
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
        )
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HttpMetricsMiddleware, metrics=metrics, paths=paths)
