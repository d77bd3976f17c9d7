"""From settings to a listening server, and to its end."""

from __future__ import annotations

import asyncio
import faulthandler
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from slipstream.core.config import EngineConfig, ServerConfig, keep_tokenizers_serial
from slipstream.core.errors import ConfigError
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.build import ModelLoader, Progress
from slipstream.server.app import make_app
from slipstream.server.protocol import Protocol
from slipstream.server.service import Service

logger = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0005
"""Seconds a busy Python thread keeps the interpreter while the engine's thread waits for it; Python's own 5 ms, at each
of a step's operations, would add up."""

FORCED_SECONDS = 2.0
"""How long the engine may go on after the second signal: its step ends in that time, or never does. A thread that
runs while the interpreter ends would fail in ways that mean nothing."""

OnReady = Callable[[Service, str], None]


def serve(
    server: ServerConfig, engine: EngineConfig, on_ready: OnReady | None = None, progress: Progress | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError for an address in use, and what loading the model raises.

    The address is bound before the model is loaded; meanwhile /health/live answers 200 and /health/ready 503.
    """
    set_up_process()
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(server, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: there is no file {path}", param=name)
    sockets = listen(server)
    url = url_of(server, sockets[0])
    if not server.api_key and not _is_local(sockets):
        logger.warning("anybody who reaches %s can use this server: it has no --api-key", server.host)

    def report(stage: str, done: int, total: int) -> None:
        service.report(stage, done, total)
        if progress is not None:
            progress(stage, done, total)

    service = Service(server, engine, lambda: make_engine(server, engine, report))
    logger.info("listening on %s; loading %s", url, service.names[0])
    HttpServer(service, on_ready, url).run_on(sockets)


def set_up_process() -> None:
    """Settings of the whole process that keep everything else out of the engine's way."""
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL)
    # One text at a time has no use for the tokenizer's own threads, which would take the CPU from the engine's.
    keep_tokenizers_serial()


def make_engine(server: ServerConfig, engine: EngineConfig, progress: Progress) -> AsyncEngine:
    """The engine in a thread of this process, or in a process of its own."""
    loader = ModelLoader(engine)
    if server.isolate:
        return AsyncEngine.isolated(loader, progress=progress)
    return AsyncEngine.over(lambda: loader.engine(progress), max_queue=engine.max_queue)


def listen(server: ServerConfig) -> list[socket.socket]:
    """The bound sockets, one per address that the host name has. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host: {server.host} is not an address here ({error.strerror})", param="host") from None
    sockets = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            reason = f"{server.host}:{server.port} cannot be used ({error.strerror}); choose another with --port"
            raise ConfigError(f"--port: {reason}", param="port") from None
        sockets.append(sock)
    return sockets


def _is_local(sockets: list[socket.socket]) -> bool:
    """Whether only this machine can reach them."""
    return all(ipaddress.ip_address(sock.getsockname()[0]).is_loopback for sock in sockets)


def url_of(server: ServerConfig, sock: socket.socket) -> str:
    """The address to give to people."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if server.ssl_certfile else 'http'}://{host}:{sock.getsockname()[1]}"


def uvicorn_config(service: Service) -> uvicorn.Config:
    """How uvicorn serves the service's application. Loading is not its business, nor are logs."""
    return uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=Protocol,
        lifespan="off",
        timeout_graceful_shutdown=5,
        ssl_certfile=service.config.ssl_certfile,
        ssl_keyfile=service.config.ssl_keyfile,
    )


class HttpServer(uvicorn.Server):
    """uvicorn, which on the first signal drains before it stops, and on the second stops at once."""

    def __init__(self, service: Service, on_ready: OnReady | None, url: str) -> None:
        super().__init__(uvicorn_config(service))
        self._service = service
        self._on_ready = on_ready
        self._url = url
        self._signals = 0
        self._failure: BaseException | None = None

    def run_on(self, sockets: list[socket.socket]) -> None:
        """Serve, and raise what loading raised."""
        try:
            with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
                runner.run(self._main(sockets))
        finally:
            self._service.close(FORCED_SECONDS if self.force_exit else 10.0)
        if self._failure is not None:
            raise self._failure

    async def _main(self, sockets: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        loading = asyncio.create_task(self._load())
        await self.serve(sockets)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    async def _load(self) -> None:
        try:
            await self._service.start()
        except Exception as error:
            self._failure = error
            self.should_exit = True
            return
        if self._on_ready is not None:
            self._on_ready(self._service, self._url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM."""
        self._signals += 1
        if self._signals > 1 or self._service.state == "loading":
            self._stop(force=True)
            return
        logger.info("%s: no more requests are taken", signal.Signals(sig).name)
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._drain()))

    async def _drain(self) -> None:
        await self._service.drain()
        self._stop()

    def _stop(self, *, force: bool = False) -> None:
        # uvicorn has a trace for every request that it cuts off from now on; that is meant.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.force_exit = self.force_exit or force
        self.should_exit = True
