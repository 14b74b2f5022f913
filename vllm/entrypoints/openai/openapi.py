"""The OpenAPI page's description of bodies that FastAPI does not see."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from vllm.entrypoints.openai.errors import ErrorResponse

_REF_TEMPLATE = "#/components/schemas/{model}"


def describe(
    request: type[BaseModel] | None, response: type[Any], *, is_streamed: bool = False
) -> dict[str, Any]:
    """Return the part of an operation that tells its bodies.

    Args:
        request: the class that reads the request's body.
        response: the class that is written as the answer's body.
        is_streamed: the answer may come as server-sent events.
    """
    content: dict[str, Any] = {"application/json": {"schema": _ref(response.__name__)}}
    if is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "Successful Response", "content": content},
            "4XX": _error("The request cannot be served as it is."),
            "5XX": _error("The server has failed."),
        }
    }
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(request.__name__)}},
        }
    return operation


def set_openapi(
    app: FastAPI, requests: list[type[BaseModel]], responses: list[type[Any]]
) -> None:
    """Make `app` serve its OpenAPI document with the schemas of these classes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, routes=app.routes
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            _, of_requests = models_json_schema(
                [(request, "validation") for request in requests],
                ref_template=_REF_TEMPLATE,
            )
            schemas |= of_requests.get("$defs", {})
            _, of_responses = msgspec.json.schema_components(
                [*responses, ErrorResponse],
                ref_template="#/components/schemas/{name}",
            )
            schemas |= of_responses
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF_TEMPLATE.format(model=name)}


def _error(description: str) -> dict[str, Any]:
    schema = {"schema": _ref(ErrorResponse.__name__)}
    return {"description": description, "content": {"application/json": schema}}
