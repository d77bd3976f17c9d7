"""The OpenAPI document: bodies from the same classes that decode them, and what every route may answer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from slipstream.server.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

_STREAMING = ("/v1/chat/completions", "/v1/completions", "/generate")

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


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
    document["components"] = {"schemas": {**components, "Error": _ERROR}}
    references = dict(zip(BODIES, schemas, strict=True))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _fill(operation, path, references.get(path))
    return document


def _fill(operation: dict[str, Any], path: str, body: Any) -> None:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path in _STREAMING:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = ["401", "404", "503"]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        statuses += ["400", "413", "415", "500"]
    operation["responses"] = {"200": {"description": "The answer", "content": content}}
    for status in sorted(statuses):
        operation["responses"][status] = {"description": "An error", "content": error}
