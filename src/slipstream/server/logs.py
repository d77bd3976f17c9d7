"""How the server's log lines look: for people, or one JSON object a line."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping
from typing import Any


def set_up(level: str, form: str) -> None:
    """Send the log to stderr. `form` is text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("slipstream").setLevel(level.upper())
    # The server has its own line per request; uvicorn's and asyncio's news matter only if something is wrong.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = name != "uvicorn.access"  # without a handler uvicorn does not even make the line
        logger.setLevel(logging.WARNING)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts: Mapping[str, Any] = getattr(record, "facts", {})
        more = "".join(f" {name}={value}" for name, value in facts.items() if name not in ("method", "path"))
        line = f"{_time(record):%H:%M:%S} {record.levelname:<7} {record.getMessage()}{more}"
        return _visible(line) + _trace(self, record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        trace = _trace(self, record).strip()
        if trace:
            line["trace"] = trace
        return json.dumps(line, default=str)


def _visible(line: str) -> str:
    """What came from clients must not end the line or steer a terminal."""
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _time(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created).astimezone()


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""
