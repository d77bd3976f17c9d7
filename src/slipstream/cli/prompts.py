"""What `generate` is asked: one prompt, or the lines of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class Ask:
    """User turns, each answered before the next is asked. `source` says where they came from."""

    turns: tuple[str, ...]
    source: str


def choose(arguments: Sequence[str], prompt: str | None, prompt_file: Path | None) -> tuple[str | None, list[Ask]]:
    """-> the model named by position, if any, and what to ask.

    One argument is the prompt, or the model if the prompt comes by --prompt or --prompt-file; two are model and prompt.
    """
    arguments = list(arguments)
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other", param="prompt")
    elsewhere = prompt is not None or prompt_file is not None
    if len(arguments) > (1 if elsewhere else 2):
        raise ConfigError(f"{arguments[-1]!r} is one argument too many; put a prompt of several words in quotes")
    if prompt_file is not None:
        asks = read_prompt_file(prompt_file)
    else:
        if prompt is None:
            if not arguments:
                raise ConfigError("there is no prompt: slipstream generate [MODEL] PROMPT", param="prompt")
            prompt = arguments.pop()
        asks = [Ask((prompt,), "the prompt")]
    return (arguments[0] if arguments else None), asks


def read_prompt_file(path: Path) -> list[Ask]:
    """The lines of a JSONL file, each an object with `prompt` or `turns`; other keys are left alone."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompt-file: {path} cannot be read ({error.strerror})", param="prompt_file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt-file: {path} is not UTF-8 text", param="prompt_file") from None
    asks = [_ask(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not asks:
        raise ConfigError(f"--prompt-file: {path} has no prompts", param="prompt_file")
    return asks


def _ask(line: str, source: str) -> Ask:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON ({error})", param="prompt_file") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("turns" in value):
        raise ConfigError(f"{source} must be an object with either `prompt` or `turns`", param="prompt_file")
    turns = value["turns"] if "turns" in value else [value["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{source}: prompt is a text and turns a list of texts, none empty", param="prompt_file")
    return Ask(tuple(turns), source)
