"""An HTTP client of asyncio streams that can leave at any byte; for many at once."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from urllib.parse import urlsplit


class Left(Exception):
    """The server closed the connection where more was to come."""


class Connection:
    """Requests one after the other over one connection, which is made anew after it was left."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = address.hostname, address.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._chunked = False
        self._left = 0  # bytes of the body, or of its chunk, that are not read
        self._done = True
        self.kept = False
        """The connection was used before, and nothing of this request's answer has come."""

    async def send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, length: int | None = None
    ) -> None:
        """Send a request; `length` states another length than the body has. What was not read before is left."""
        if not self._done:
            await self.leave()
        if self._streams is None or self._streams[0].at_eof():
            await self.leave()
            self._streams = await asyncio.open_connection(*self._address)
            self.kept = False
        else:
            self.kept = True
        lines = [f"{method} {path} HTTP/1.1", "host: test", *(f"{name}: {value}" for name, value in headers.items())]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(body) if length is None else length}"]
        writer = self._streams[1]
        self._done = False
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    async def head(self) -> int:
        """The status, once it is there."""
        status = int((await self._line()).split()[1])
        self.kept = False
        headers: dict[bytes, bytes] = {}
        while line := (await self._line()).strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        self._left = 0 if self._chunked else int(headers.get(b"content-length", b"0"))
        self._done = not self._chunked and not self._left
        return status

    async def some(self, most: int = 1 << 16) -> bytes:
        """A piece of the body; empty at its end."""
        if self._done:
            return b""
        if self._chunked and not self._left:
            self._left = int(await self._line(), 16)
            if not self._left:
                await self._line()
                self._done = True
                return b""
        assert self._streams is not None
        piece = await self._streams[0].read(min(most, self._left))
        if not piece:
            raise Left("in a body")
        self._left -= len(piece)
        if not self._left:
            if self._chunked:
                await self._line()
            else:
                self._done = True
        return piece

    async def rest(self) -> bytes:
        """The rest of the body."""
        pieces = []
        while piece := await self.some():
            pieces.append(piece)
        return b"".join(pieces)

    async def leave(self, *, reset: bool = False) -> None:
        """Close the connection, with a reset instead of an end if asked for."""
        streams, self._streams, self._done = self._streams, None, True
        if streams is None:
            return
        writer = streams[1]
        if reset:
            own: socket.socket = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()

    async def _line(self) -> bytes:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line.endswith(b"\n"):
            raise Left("in a head")
        return line
