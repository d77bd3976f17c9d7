"""Which field of which body is supported how.

`python -m slipstream.server.support` prints it as Markdown, which is kept as docs/api_support.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slipstream.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerateSampling,
    StreamOptions,
    TokenizeBody,
)
from slipstream.server.fields import Field, Support, fields_of

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "POST /v1/chat/completions": ChatBody,
    "POST /v1/completions": CompletionBody,
    "`stream_options` of both": StreamOptions,
    "POST /generate": GenerateBody,
    "`sampling_params` of POST /generate": GenerateSampling,
    "POST /tokenize": TokenizeBody,
    "POST /detokenize": DetokenizeBody,
}
"""Every body, and every object in one that has fields of its own, by the heading of its table."""


def markdown() -> str:
    """The tables as a Markdown document."""
    lines = [
        "# API support",
        "",
        "Made by `python -m slipstream.server.support`; change the fields in `server/bodies.py`.",
        "",
        f"- **{Support.IMPLEMENTED.value}**: the field does what the table says.",
        f"- **{Support.NEUTRAL.value}**: the field would change the answer and is not implemented. It may be null or",
        "  one of the values in the table, which change nothing; any other is refused with status 400 by its name.",
        f"- **{Support.ADVISORY.value}**: the field changes no token; its type is checked.",
        "",
        "A field that is in no table is refused with status 400. null stands for the default everywhere.",
    ]
    for heading, body in BODIES.items():
        lines += ["", f"## {heading}", "", "| field | support | meaning | neutral values |", "|---|---|---|---|"]
        lines += [_row(field) for field in sorted(fields_of(body).values(), key=_rank)]
    return "\n".join(lines) + "\n"


def _rank(field: Field) -> int:
    return list(Support).index(field.support)


def _row(field: Field) -> str:
    shown = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)
    if field.support is Support.NEUTRAL:
        shown = f"null, {shown}" if shown else "null"
    return f"| `{field.name}` | {field.support.value} | {field.text} | {shown} |"


if __name__ == "__main__":
    print(markdown(), end="")
