"""The OpenAPI document: bodies from the same classes that decode them, and what every route may answer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from slipstream.server.answers import ANSWERS, ERROR, EVENT
from slipstream.server.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody
from slipstream.server.fields import fields_of
from slipstream.server.support import BODIES as SUPPORTED

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

_STREAMING = ("/v1/chat/completions", "/v1/completions", "/generate")


def describe(app: FastAPI) -> None:
    """Make the app's OpenAPI document say what its routes take and answer."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas, components = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    for body in SUPPORTED.values():
        for name, field in fields_of(body).items():
            shown = components[body.__name__]["properties"][name]
            shown.update(field.schema)
            if name == "model":
                shown["enum"] = [None, *app.state.service.names]
    document["components"] = {"schemas": {**components, "Error": ERROR}}
    if app.state.service.config.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    references = dict(zip(BODIES, schemas, strict=True))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _fill(operation, path, references.get(path))
    return document


def _fill(operation: dict[str, Any], path: str, body: Any) -> None:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if path != "/metrics":
        content = {"application/json": {"schema": ANSWERS[path]}}
    if path in _STREAMING:
        content["text/event-stream"] = {"schema": EVENT}
    statuses = ["401", "404", "503"]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        statuses += ["400", "408", "413", "415", "500"]
    operation["responses"] = {"200": {"description": "The answer", "content": content}}
    for status in sorted(statuses):
        operation["responses"][status] = {"description": "An error", "content": error}
