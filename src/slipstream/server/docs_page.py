"""GET /docs: the routes and the fields of their bodies, as one page without scripts or outside assets."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.server.fields import Support, fields_of
from slipstream.server.openapi import BODIES

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.15rem; }
code, h2 span { font-family: ui-monospace, monospace; font-size: 0.92em; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
td, th { text-align: left; vertical-align: top; padding: 0.35rem 0.8rem 0.35rem 0; border-bottom: 1px solid #8884; }
"""


def page(document: Mapping[str, Any], model: str) -> str:
    """The page for an OpenAPI document; `model` is named in its example."""
    parts = [
        _route(path, method, operation)
        for path, ways in document["paths"].items()
        for method, operation in ways.items()
    ]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100})
    example = f"curl /v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Slipstream API</title><style>{_STYLE}</style>"
        f"<h1>Slipstream {html.escape(document['info']['version'])}</h1>"
        "<p>The OpenAPI document is at <a href=openapi.json>openapi.json</a>, the chat page at <a href=./>/</a>. "
        f"An example, behind this server's address:</p><p><code>{html.escape(example)}</code></p>" + "".join(parts)
    )


def _route(path: str, method: str, operation: Mapping[str, Any]) -> str:
    head = (
        f"<h2><span>{method.upper()} {html.escape(path)}</span></h2><p>{html.escape(operation.get('summary', ''))}</p>"
    )
    body = BODIES.get(path)
    return head if body is None else head + _fields(body)


def _fields(body: type[msgspec.Struct]) -> str:
    rows = []
    for name, field in fields_of(body).items():
        allowed = ", ".join(msgspec.json.encode(value).decode() for value in (None, *field.neutral))
        support = f"{field.support.value}: {allowed}" if field.support is Support.NEUTRAL else field.support.value
        cells = (f"<code>{name}</code>", html.escape(support), html.escape(field.text))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "<table><tr><th>field<th>support<th>what it does</tr>" + "".join(rows) + "</table>"
