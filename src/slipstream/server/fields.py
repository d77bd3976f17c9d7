"""How a field of a request body is supported, declared once where the field is.

Every field is in one class. An *implemented* field does what its documentation says. A *neutral* field changes the
answer but is not implemented: it is accepted with the values that change nothing and refused with any other. An
*advisory* field cannot change tokens; it is accepted, checked for its type, and has no effect unless its text says so.
A field in no class is unknown and refused by name.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import msgspec

from slipstream.core.errors import InvalidRequestError


class Support(Enum):
    """The classes, as the support table names them."""

    IMPLEMENTED = "implemented"
    NEUTRAL = "neutral values only"
    ADVISORY = "advisory"


@dataclass(frozen=True)
class Field:
    """One field of a body. `schema` is what its JSON schema says beyond its type."""

    name: str
    support: Support
    text: str
    schema: Mapping[str, Any]

    @property
    def neutral(self) -> tuple[Any, ...]:
        """The values that a field which is not implemented may have, null aside."""
        return tuple(self.schema["enum"][1:]) if self.support is Support.NEUTRAL else ()


def implemented(text: str, schema: Mapping[str, Any] | None = None, **limits: Any) -> msgspec.Meta:
    """The field does what `text` says. `limits` are msgspec's, such as min_length."""
    return _meta(Support.IMPLEMENTED, text, schema or {}, **limits)


def between(low: float, high: float | None = None, *, above: bool = False) -> dict[str, Any]:
    """The schema of a number's limits, which are checked where it is used. `above`: it must be above `low`."""
    return {"exclusiveMinimum" if above else "minimum": low, **({} if high is None else {"maximum": high})}


def neutral(*values: Any, text: str = "not implemented") -> msgspec.Meta:
    """The field is accepted with null or one of `values` only."""
    return _meta(Support.NEUTRAL, text, {"enum": [None, *values]})


def advisory(text: str, **limits: Any) -> msgspec.Meta:
    """The field changes no token."""
    return _meta(Support.ADVISORY, text, {}, **limits)


def _meta(support: Support, text: str, schema: Mapping[str, Any], **limits: Any) -> msgspec.Meta:
    # As text, since typing takes equal annotations for one: a field that may be 1 would become one that may be true.
    shown = msgspec.json.encode(schema).decode()
    return msgspec.Meta(description=text, extra={"support": support, "schema": shown}, **limits)


@cache
def fields_of(body: type[msgspec.Struct]) -> Mapping[str, Field]:
    """The fields of a body by name. Raises TypeError for a field without a class."""
    return {field.name: field for field in _walk(body)}


def _walk(body: type[msgspec.Struct]) -> Iterator[Field]:
    for name, hint in typing.get_type_hints(body, include_extras=True).items():
        metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
        known = [meta for meta in metas if meta.extra and "support" in meta.extra]
        if len(known) != 1:
            raise TypeError(f"{body.__name__}.{name} must be in exactly one class of support")
        extra = known[0].extra or {}
        yield Field(name, extra["support"], known[0].description or "", msgspec.json.decode(extra["schema"]))


def check_neutral(body: msgspec.Struct, path: str = "") -> None:
    """Refuse a field that is not implemented and has a value that would change the answer. `path` leads to the body."""
    for name, field in fields_of(type(body)).items():
        if field.support is not Support.NEUTRAL:
            continue
        value = getattr(body, name)
        if value is None or any(_same(value, allowed) for allowed in field.neutral):
            continue
        allowed = " or ".join(msgspec.json.encode(v).decode() for v in (None, *field.neutral))
        raise InvalidRequestError(
            f"{path}{name} is not supported here: {field.text}; it may be {allowed}", param=path + name
        )


def _same(value: Any, allowed: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
