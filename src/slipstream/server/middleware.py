"""What happens around every request: an id, a key, a limit on the body, a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.core.errors import OverloadedError
from slipstream.server.errors import HttpError
from slipstream.server.responses import error_response, failure
from slipstream.server.service import Service

logger = logging.getLogger("slipstream.access")

OPEN_PATHS = ("/", "/health", "/version", "/metrics", "/docs", "/openapi.json", "/favicon.ico")
"""Paths that need no key: what a browser must load to ask for one, and what probes and collectors read."""

OPEN_TREES = ("/page/", "/health/")
"""And all below these."""

QUIET_PATHS = ("/health", "/health/live", "/health/ready", "/metrics", "/stats", "/favicon.ico")
"""Paths that are polled; their requests are logged at level debug."""

CLIENT_GONE = 499
"""What is logged and counted where a client left before it got a status; the number is nginx's."""


class Log:
    """Gives each request an id and logs how it ended. A client that left is an event like others, not an error."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else uuid.uuid4().hex
        scope["slipstream.arrived"] = began
        scope["slipstream.summary"] = {}
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).append("x-request-id", request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            shown = failure(error)
            if not status:
                await error_response(shown)(scope, receive, send_with_id)
        finally:
            self._log(scope, status, request_id, time.monotonic() - began)

    def _log(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        service, path = self._service, scope["path"]
        gone = scope.get("slipstream.disconnected", False)
        service.disconnects += gone
        if gone and not status:
            status = CLIENT_GONE
        route = getattr(scope.get("route"), "path", "other")
        service.requests_by_status[route, status] = service.requests_by_status.get((route, status), 0) + 1
        client = scope.get("client")
        facts: dict[str, Any] = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round(seconds * 1e3, 1),
            "id": request_id,
            **({"client": client[0]} if client else {}),
            **scope["slipstream.summary"],
            **({"disconnected": True} if gone else {}),
        }
        level = logging.DEBUG if path in QUIET_PATHS or path.startswith("/page/") else logging.INFO
        logger.log(level, "%s %s", facts["method"], path, extra={"facts": facts})


class Keys:
    """Refuses requests without one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._allowed(scope):
            error = HttpError(401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_TREES):
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # Every key is compared, in constant time: how long it takes tells nothing.
        found = [hmac.compare_digest(given, own) for own in self._keys]
        return scheme.lower() == "bearer" and any(found)


HELD_BODIES = 16
"""Bodies of the largest size that may be held at once. Past that, bodies above SMALL_BODY are refused."""

SMALL_BODY = 2**18

BODY_SECONDS = 30.0
"""How long a client may pause within its body."""


class BodyLimit:
    """Refuses bodies that are too large, also those that do not say so, and bounds what all together hold."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            await error_response(self._error())(scope, receive, send)
            return
        received, whole = 0, False

        async def counted() -> Message:
            nonlocal received, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS)
            except TimeoutError:
                raise HttpError(408, f"the body paused for {BODY_SECONDS:g} s", code="body_too_slow") from None
            whole = not message.get("more_body", False)
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                received += size
                self._held += size
                if received > self._limit:
                    raise self._error()
                if received > SMALL_BODY and self._held > HELD_BODIES * self._limit:
                    raise OverloadedError("too many large bodies are being read; try again later")
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= received

    def _error(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._limit} bytes (max_body_size)", code="body_too_large")
