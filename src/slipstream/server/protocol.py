"""uvicorn's HTTP protocol, which also notices that a client has gone while a request of its waits behind another."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_PIPELINED = 16
"""Requests that may wait behind one on the same connection."""


class Protocol(HttpToolsProtocol):
    """uvicorn stops reading a connection while requests wait on it, so it does not see the connection's end, and then
    tells it to the last request, not to the one that runs. Here reading goes on, within a limit."""

    _running: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
