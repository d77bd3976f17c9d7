"""The routes, put together."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from slipstream import __version__
from slipstream.core.errors import InvalidRequestError, OverloadedError, SlipstreamError
from slipstream.engine.inputs import InputProcessor
from slipstream.server import chat, completions, docs_page, generate, metrics, text_routes
from slipstream.server.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    StreamOptions,
    TokenizeBody,
)
from slipstream.server.errors import HttpError, decode, nested_too_deeply, unknown_model
from slipstream.server.fields import check_neutral
from slipstream.server.middleware import CLIENT_GONE, BodyLimit, Keys, Log
from slipstream.server.openapi import describe
from slipstream.server.responses import EventStream, JsonAnswer, error_response, failure, json_response
from slipstream.server.service import Service

LARGE = 64 * 1024
"""Bodies above so many bytes are decoded away from the event loop."""

_PAGE = {part.name: part for part in (files("slipstream.server") / "page").iterdir() if part.is_file()}
_PAGE_POLICY = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

BodyType = TypeVar("BodyType", bound=Body)
Prepare = Callable[[InputProcessor, BodyType], Any]


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service."""
    app = FastAPI(
        title="Slipstream",
        version=__version__,
        redoc_url=None,
        docs_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    _generation_routes(app, service)
    _text_routes(app, service)
    _model_routes(app, service)
    _operation_routes(app, service)
    _page_routes(app, service)
    describe(app)
    app.add_exception_handler(SlipstreamError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_middleware(BodyLimit, limit=service.config.max_body_size)
    if service.config.api_key:
        app.add_middleware(Keys, keys=service.config.api_key)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Log, service=service)
    return app


async def read(service: Service, request: Request, kind: type[BodyType]) -> BodyType:
    """The body of a request, decoded and checked for fields that are not implemented."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, f"the content type must be application/json, not {content_type or 'missing'}")
    raw = await request.body()
    body: BodyType = await service.in_pool(decode, raw, kind) if len(raw) > LARGE else decode(raw, kind)
    check_neutral(body)
    options = getattr(body, "stream_options", None)
    if isinstance(options, StreamOptions) and not getattr(body, "stream", False):
        raise HttpError(400, "stream_options needs stream: true", param="stream_options")
    return body


async def prepared(service: Service, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` makes of a body, in the pool. What recurses over a body's values may meet too deep ones."""
    try:
        return await service.in_pool(function, *args)
    except RecursionError:
        raise nested_too_deeply() from None


async def run(
    service: Service, request: Request, kind: type[BodyType], prepare: Prepare[BodyType], answer: Callable[..., Any]
) -> Response:
    """One generation: read, prepare in the pool, run, answer whole or in events."""
    scope = request.scope
    engine = service.engine()
    body = await read(service, request, kind)
    model = service.model(getattr(body, "model", None))
    more = {} if kind is GenerateBody else {"model": model, "fingerprint": service.fingerprint}

    async def ready() -> Any:
        requests = await prepared(service, prepare, engine.inputs, body)
        if len(requests) > service.engine_config.max_queue:
            raise InvalidRequestError(
                f"a request of {len(requests)} prompts can never be queued: {service.engine_config.max_queue} may wait",
                param="text" if kind is GenerateBody else "prompt",
            )
        job = service.job(engine, requests, scope["slipstream.arrived"], scope["slipstream.summary"])
        return answer(body, job, **more)

    async def whole() -> Any:
        service.opened()
        try:
            return await (await ready()).whole()
        finally:
            service.closed()

    async def chunks() -> AsyncGenerator[bytes, None]:
        service.opened()
        try:
            made = await ready()
            async with aclosing(made.chunks()) as events:
                async for chunk in events:
                    yield chunk
        finally:
            service.closed()

    return EventStream(chunks) if getattr(body, "stream", False) else JsonAnswer(whole)


def _generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", tags=["OpenAI"], summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        return await run(service, request, ChatBody, chat.prepare, chat.ChatAnswer)

    @app.post("/v1/completions", tags=["OpenAI"], summary="Continue texts or token ids")
    async def text_completions(request: Request) -> Response:
        return await run(service, request, CompletionBody, completions.prepare, completions.CompletionAnswer)

    @app.post("/generate", tags=["SGLang"], summary="Continue texts or token ids, in SGLang's shape")
    async def generate_text(request: Request) -> Response:
        return await run(service, request, GenerateBody, generate.prepare, generate.GenerateAnswer)


def _text_routes(app: FastAPI, service: Service) -> None:
    async def converted(
        request: Request, kind: type[TokenizeBody] | type[DetokenizeBody], convert: Callable[..., Any]
    ) -> Response:
        engine = service.engine()
        body = await read(service, request, kind)
        service.model(body.model)
        return json_response(await prepared(service, convert, engine.inputs, body))

    @app.post("/tokenize", tags=["Tokenizer"], summary="Token ids of a text or a conversation")
    async def tokenize(request: Request) -> Response:
        return await converted(request, TokenizeBody, text_routes.tokenize)

    @app.post("/detokenize", tags=["Tokenizer"], summary="The text of token ids")
    async def detokenize(request: Request) -> Response:
        return await converted(request, DetokenizeBody, text_routes.detokenize)

    @app.get("/tokenizer_info", tags=["Tokenizer"], summary="Special tokens and the chat template")
    async def tokenizer_info() -> Response:
        return json_response(text_routes.tokenizer_info(service.engine().inputs))


def _model_routes(app: FastAPI, service: Service) -> None:
    def card(name: str) -> Mapping[str, Any]:
        engine = service.loaded
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "slipstream",
            "root": service.engine_config.model or service.names[0],
            "parent": None,
            "max_model_len": None if engine is None else engine.inputs.max_model_len,
        }

    @app.get("/v1/models", tags=["OpenAI"], summary="The served names")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    # A name may hold slashes, as a hub's do.
    @app.get("/v1/models/{model:path}", tags=["OpenAI"], summary="One served name")
    async def model(model: str) -> Response:
        if model not in service.names:
            raise unknown_model(model, service.names)
        return json_response(card(model))


def _operation_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", tags=["Operations"], summary="200 while the process serves HTTP")
    async def live() -> Response:
        return json_response({"status": "live"})

    def ready() -> Response:
        state = service.state
        if state != "ready":
            raise OverloadedError(f"the server is {state}", code=state)
        return json_response({"status": "ready"})

    @app.get("/health/ready", tags=["Operations"], summary="200 while requests are taken, else 503")
    async def health_ready() -> Response:
        return ready()

    @app.get("/health", tags=["Operations"], summary="The same as /health/ready")
    async def health() -> Response:
        return ready()

    # Some load balancers probe with HEAD.
    for path, answer in (("/health/live", live), ("/health/ready", health_ready), ("/health", health)):
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @app.get("/version", tags=["Operations"], summary="The server's version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics", tags=["Operations"], summary="Prometheus metrics in vLLM's and SGLang's names")
    async def prometheus() -> Response:
        return Response(metrics.render(service), media_type=metrics.CONTENT_TYPE)

    @app.get("/stats", tags=["Operations"], summary="The figures of the chat page")
    async def stats() -> Response:
        return json_response(metrics.stats_of(service))


def _page_routes(app: FastAPI, service: Service) -> None:
    def page_file(name: str) -> Response:
        path = _PAGE.get(name)
        if path is None:
            raise HttpError(404, f"there is no {name!r} here", code="not_found")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(path.read_bytes(), media_type=kind, headers=_PAGE_POLICY)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return page_file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        page = docs_page.page(app.openapi(), service.names[0])
        return Response(page, media_type="text/html", headers=docs_page.HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_part(name: str) -> Response:
        return page_file(name)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(failure(error))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while it sent its body; nobody reads what is returned."""
    request.scope["slipstream.disconnected"] = True
    return Response(status_code=CLIENT_GONE)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = HttpError(error.status_code, f"{request.method} {request.url.path}: {str(error.detail).lower()}")
    response = error_response(shown)
    response.headers.update(error.headers or {})
    return response
