"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.core.errors import InvalidRequestError, OverloadedError, SlipstreamError

RETRY_AFTER = 1
"""Seconds after which a client is told to come back."""

MAX_SHOWN = 1000
"""Characters of an error's message at most."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    503: "service_unavailable_error",
}


class HttpError(SlipstreamError):
    """An error that belongs to the protocol and not to the engine."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


def unknown_model(name: str, served: Sequence[str]) -> HttpError:
    known = ", ".join(served)
    return HttpError(
        404, f"the model {name!r} does not exist here; this server has {known}", param="model", code="model_not_found"
    )


def nested_too_deeply() -> InvalidRequestError:
    return InvalidRequestError("the body is nested too deeply")


def body_of(error: SlipstreamError) -> dict[str, Any]:
    """What the client gets."""
    kind = _TYPES.get(error.status, "server_error")
    param = None if error.param is None else _cut(error.param)
    return {"error": {"message": _cut(error.message), "type": kind, "param": param, "code": error.code}}


def _cut(text: str) -> str:
    """A text that may quote what the client sent, which may be megabytes."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def headers_of(error: SlipstreamError) -> Mapping[str, str]:
    """Headers that tell a client whether to try again."""
    if isinstance(error, OverloadedError) or error.status == 503:
        return {"retry-after": str(RETRY_AFTER)}
    if error.status == 401:
        return {"www-authenticate": "Bearer", "x-should-retry": "false"}
    return {"x-should-retry": "false"} if error.status < 500 else {}


def decode(raw: bytes, kind: type[Any]) -> Any:
    """A request body from JSON. Raises InvalidRequestError naming the field at fault."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise nested_too_deeply() from None


def _wrong_field(text: str) -> InvalidRequestError:
    """msgspec says "Expected `int`, got `str` - at `$.stop[0]`"."""
    reason, _, place = text.partition(" - at `")
    path = re.sub(r"^\$\.?", "", place.rstrip("`"))
    unknown = re.search(r"unknown field `(.*)`", reason)
    missing = re.search(r"missing required field `(.*)`", reason)
    if unknown or missing:
        name = (unknown or missing).group(1)  # type: ignore[union-attr]
        full = f"{path}.{name}" if path else name
        said = f"unknown field {full!r}" if unknown else f"the field {full!r} is required"
        return InvalidRequestError(said, param=full)
    shown = reason.replace("`", "")
    return InvalidRequestError(f"{path or 'the body'}: {shown[:1].lower()}{shown[1:]}", param=path or None)
