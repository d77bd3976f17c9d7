"""Reading a tokenizer from a folder in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import LoadError

if TYPE_CHECKING:
    import tokenizers


def read_folder(folder: Path, end_of_turn: Sequence[str]) -> dict[str, Any]:
    """The arguments of `Tokenizer` for the files in a folder.

    Args:
        folder: with tokenizer.json and, optionally, the other files that Hugging Face writes.
        end_of_turn: spellings of control tokens that count as EOS where the vocabulary has them.

    Raises:
        LoadError: tokenizer.json is missing, or a file is damaged.
    """
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise LoadError(f"There is no tokenizer.json in {folder}.")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{file} cannot be read as a tokenizer: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    bos = _id_of(backend, settings.get("bos_token"))
    if bos is None and "bos_token" not in settings:
        bos = config.get("bos_token_id")
    eos = [_id_of(backend, settings.get("eos_token")), *_as_list(generation.get("eos_token_id"))]
    if eos == [None]:
        eos = _as_list(config.get("eos_token_id"))
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    eos += [special[text] for text in end_of_turn if text in special]
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        # Where it is not said, the post-processor shows it: it writes BOS even for an empty text.
        add_bos = bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    return {
        "backend": backend,
        "bos_id": bos,
        "eos_ids": [i for i in eos if isinstance(i, int)],
        "add_bos": bool(add_bos),
        "chat_template": _chat_template(folder, settings),
    }


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{file} is damaged: {error}.") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} is damaged: it should hold an object.")
    return value


def _id_of(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """A token is written as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
