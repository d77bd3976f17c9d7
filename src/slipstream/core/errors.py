"""Errors a caller can act on. Each names what was wrong and, where there is one, the limit."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of all errors raised on purpose. `status` is the HTTP status a server answers with."""

    status = 500
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(SlipstreamError, ValueError):
    """A request that can never be served: the field in `param` is wrong."""

    status = 400


class ContextLengthError(InvalidRequestError):
    """The prompt (or prompt plus what was asked for) does not fit the model's context."""

    code = "context_length_exceeded"


class ConfigError(SlipstreamError, ValueError):
    """A setting of the engine is wrong or cannot be met on this machine."""

    status = 400


class LoadError(SlipstreamError):
    """A model's files are missing, damaged, of an unknown kind, or do not fit together."""


class OverloadedError(SlipstreamError):
    """The queue is full or the engine is shutting down; the request may be tried again."""

    status = 503


class EngineDeadError(SlipstreamError):
    """A step of the engine failed; requests that were in it cannot be finished."""


class RequestFailedError(SlipstreamError):
    """One request failed inside the engine; others go on."""
