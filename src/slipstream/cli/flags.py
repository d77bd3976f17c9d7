"""The one table of settings that can be given on the command line, in the environment and in a file.

`python -m slipstream.cli.flags` prints it as Markdown, which is kept as docs/flags.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from slipstream.core.config import EngineConfig, ServerConfig, env_name, parse_bytes
from slipstream.core.errors import ConfigError
from slipstream.core.sampling_params import SamplingParams


class Kind(Enum):
    """What a setting's value is; the value is what stands for it in a help text."""

    TEXT = "TEXT"
    PATH = "PATH"
    WHOLE = "N"
    NUMBER = "X"
    SIZE = "SIZE"
    SWITCH = ""
    TEXTS = "TEXT..."
    IDS = "ID,..."
    BIASES = "ID=X,..."


ENGINE, SERVER, SAMPLING, FILES = "Engine", "Server", "Sampling", "Files"


@dataclass(frozen=True)
class Flag:
    """One setting. `aliases` are other engines' spellings, `off_aliases` those that mean the switch's opposite."""

    name: str
    kind: Kind
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    off_aliases: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def off_option(self) -> str:
        return "--no-" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Its environment twin."""
        return env_name(self.name)


def _engine(name: str, kind: Kind, help: str, *aliases: str, off: tuple[str, ...] = ()) -> Flag:
    return Flag(name, kind, ENGINE, help, aliases, off)


def _server(name: str, kind: Kind, help: str, *aliases: str) -> Flag:
    return Flag(name, kind, SERVER, help, aliases)


def _sampling(name: str, kind: Kind, help: str, *aliases: str) -> Flag:
    return Flag(name, kind, SAMPLING, help, aliases)


FLAGS: tuple[Flag, ...] = (
    Flag("config", Kind.PATH, FILES, "A YAML file of settings; its keys are these flags' names"),
    _engine("model", Kind.TEXT, "Catalogue name, .gguf file, model folder or Hugging Face id", "--model-path"),
    _engine("tokenizer", Kind.PATH, "Folder of another tokenizer than the model's own", "--tokenizer-path"),
    _engine("chat_template", Kind.TEXT, "Another chat template: a file, or Jinja text"),
    _engine("generation_config", Kind.TEXT, "auto: sampling defaults as the model publishes them; neutral: none"),
    _engine(
        "numerics",
        Kind.TEXT,
        "native: weights as stored, packed for this processor; reference: dequantised, computed as transformers does; "
        "auto: native where it can be",
    ),
    _engine("dtype", Kind.TEXT, "With reference numerics: auto, float32 or bfloat16"),
    _engine("quantization", Kind.TEXT, "With native numerics: none, or int8 or int4 for weights stored unquantised"),
    _engine("device", Kind.TEXT, "Where the model runs: cpu"),
    _engine("threads", Kind.WHOLE, "Threads of a step (default: the CPUs this process may use)"),
    _engine("max_model_len", Kind.WHOLE, "Context to serve, in tokens (default: the model's)", "--context-length"),
    _engine("max_num_seqs", Kind.WHOLE, "Sequences that run at once", "--max-running-requests"),
    _engine("max_num_batched_tokens", Kind.WHOLE, "Tokens in one step at most", "--chunked-prefill-size"),
    _engine("max_step_ms", Kind.NUMBER, "Prompts are cut so that a step stays below this while others decode"),
    _engine("page_size", Kind.WHOLE, "Tokens in a page of the cache, a power of two", "--block-size"),
    _engine("kv_cache_dtype", Kind.TEXT, "With native numerics: what the cache holds, auto (bf16), bf16 or int8"),
    _engine(
        "cache_memory",
        Kind.SIZE,
        "Memory of the cache, such as 2GiB (default: from free memory)",
        "--kv-cache-memory-bytes",
    ),
    _engine(
        "prefix_caching",
        Kind.SWITCH,
        "Reuse the cache of prompts that begin alike",
        "--enable-prefix-caching",
        off=("--no-enable-prefix-caching", "--disable-radix-cache"),
    ),
    _engine("max_queue", Kind.WHOLE, "Requests that may wait before more are refused", "--max-queued-requests"),
    _engine("seed", Kind.WHOLE, "Seed of the random choices (default: a new one, which is reported)", "--random-seed"),
    _server("host", Kind.TEXT, "Address to listen on; 0.0.0.0: all of this machine's"),
    _server("port", Kind.WHOLE, "Port to listen on; 0: any that is free"),
    _server("api_key", Kind.TEXTS, "Requests must carry this key; may be repeated"),
    _server("served_model_name", Kind.TEXTS, "Name of the model in the API; may be repeated (default: as given)"),
    _server("cors_origins", Kind.TEXTS, "Web pages' origins that may use the API, *: all; may be repeated"),
    _server("max_body_size", Kind.SIZE, "Largest request body"),
    _server("isolate", Kind.SWITCH, "Run the engine in a process of its own that is started again when it dies"),
    _server("drain_seconds", Kind.NUMBER, "How long open requests may go on after SIGTERM"),
    _server("stall_seconds", Kind.NUMBER, "An engine whose step takes longer counts as stalled"),
    _server("log_level", Kind.TEXT, "debug, info, warning or error"),
    _server("log_format", Kind.TEXT, "text, or json: one object a line"),
    _server("ssl_certfile", Kind.PATH, "TLS certificate"),
    _server("ssl_keyfile", Kind.PATH, "TLS key"),
    _sampling("max_tokens", Kind.WHOLE, "Tokens to generate at most (default: what fits)", "--max-new-tokens"),
    _sampling("temperature", Kind.NUMBER, "0 takes the most likely token"),
    _sampling("top_k", Kind.WHOLE, "Keep the k most likely tokens; 0: all"),
    _sampling("top_p", Kind.NUMBER, "Keep the most likely tokens that make up this probability"),
    _sampling("min_p", Kind.NUMBER, "Drop tokens less likely than this times the most likely one"),
    _sampling("typical_p", Kind.NUMBER, "Keep the tokens nearest to the entropy that make up this probability"),
    _sampling("repetition_penalty", Kind.NUMBER, "Above 1: tokens seen before become less likely"),
    _sampling("frequency_penalty", Kind.NUMBER, "Taken from a token's logit each time it was generated"),
    _sampling("presence_penalty", Kind.NUMBER, "Taken from a token's logit once it was generated"),
    _sampling("logit_bias", Kind.BIASES, "Added to the logits of tokens"),
    _sampling("bad_words", Kind.TEXTS, "Words that must not be generated; may be repeated"),
    _sampling("allowed_token_ids", Kind.IDS, "The only tokens that may be generated"),
    _sampling("n", Kind.WHOLE, "Continuations of each prompt"),
    _sampling("min_tokens", Kind.WHOLE, "No end before this many tokens"),
    _sampling("stop", Kind.TEXTS, "End before this text appears; may be repeated"),
    _sampling("stop_token_ids", Kind.IDS, "End with any of these tokens"),
    _sampling("include_stop_str_in_output", Kind.SWITCH, "Keep the text that ended the output"),
    _sampling("ignore_eos", Kind.SWITCH, "Go on after the model's end of text"),
    _sampling("logprobs", Kind.WHOLE, "Report each token's log-probability and so many alternatives"),
    _sampling("prompt_logprobs", Kind.WHOLE, "The same for the prompt's tokens"),
    _sampling("echo", Kind.SWITCH, "Put the prompt before the output"),
    _sampling("skip_special_tokens", Kind.SWITCH, "Leave control tokens out of the text"),
)

BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}

# `config` is handled by the command line itself; the queue's limit matters to a server only.
SERVE_NAMES = tuple(flag.name for flag in FLAGS if flag.group in (ENGINE, SERVER))
ENGINE_NAMES = tuple(flag.name for flag in FLAGS if flag.group == ENGINE and flag.name != "max_queue")
SAMPLING_NAMES = tuple(flag.name for flag in FLAGS if flag.group == SAMPLING)
CHAT_NAMES = tuple(name for name in SAMPLING_NAMES if name not in ("n", "echo", "logprobs", "prompt_logprobs"))


def parse(flag: Flag, raw: Any, source: str) -> Any:
    """The value of `flag` from text, a list of texts (a repeated flag) or a YAML value.

    Raises ConfigError, which names `source`, the place the value came from.
    """
    try:
        return _PARSERS[flag.kind](raw)
    except ConfigError as error:
        raise ConfigError(error.message.replace("SOURCE", source), param=flag.name) from None
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ConfigError(f"{source}: {raw!r} is not {_WANTED[flag.kind]}", param=flag.name) from None


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _whole(raw: Any) -> int:
    if isinstance(raw, bool | float):
        raise TypeError
    return int(raw)


def _number(raw: Any) -> float:
    if isinstance(raw, bool):
        raise TypeError
    return float(raw)


def _size(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise TypeError
    return parse_bytes(raw, param="SOURCE")


def _switch(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        raw.lower()
    ]


def _texts(raw: Any) -> list[str]:
    if isinstance(raw, str):
        return [raw]
    return [_text(item) for item in raw]


def _split(raw: Any) -> list[Any]:
    """Items of repeated flags, of commas in a text, or of a list."""
    if isinstance(raw, int):
        return [raw]
    if isinstance(raw, str):
        raw = [raw]
    return [part for item in raw for part in (item.split(",") if isinstance(item, str) else [item])]


def _ids(raw: Any) -> list[int]:
    return [_whole(item) for item in _split(raw)]


def _biases(raw: Any) -> dict[int, float]:
    if isinstance(raw, Mapping):
        return {_whole(token): _number(bias) for token, bias in raw.items()}
    pairs = [item.partition("=") for item in _split(raw)]
    return {_whole(token): _number(bias) for token, _, bias in pairs}


_PARSERS = {
    Kind.TEXT: _text,
    Kind.PATH: _text,
    Kind.WHOLE: _whole,
    Kind.NUMBER: _number,
    Kind.SIZE: _size,
    Kind.SWITCH: _switch,
    Kind.TEXTS: _texts,
    Kind.IDS: _ids,
    Kind.BIASES: _biases,
}
_WANTED = {
    Kind.TEXT: "a text",
    Kind.PATH: "a path",
    Kind.WHOLE: "a whole number",
    Kind.NUMBER: "a number",
    Kind.SIZE: "a size; write for example 2GiB or 500MB",
    Kind.SWITCH: "true or false",
    Kind.TEXTS: "a text or a list of texts",
    Kind.IDS: "a list of token ids such as 1,2,3",
    Kind.BIASES: "a list of token ids and biases such as 17=-5,23=2.5",
}


def default_of(flag: Flag) -> Any:
    """What holds where nothing is given; None where it depends on the model or the machine."""
    of: Any = {ENGINE: EngineConfig, SERVER: ServerConfig}.get(flag.group, SamplingParams)
    return next((field.default for field in fields(of) if field.name == flag.name), None)


def markdown() -> str:
    """The table as a Markdown document."""
    lines = [
        "# Flags",
        "",
        "Made by `python -m slipstream.cli.flags`; change the table there.",
        "",
        "A flag on the command line wins over its environment variable, that over the file given with `--config`, and",
        "that over the default. In the file a flag is a key with `-` or `_` between its words. Switches are turned off",
        "by `--no-...`. Sampling defaults are the model's own where it publishes them (`--generation-config auto`).",
        "`serve` takes those of the engine and the server; `bench latency`, `bench throughput` and `doctor` those of",
        "the engine but `--max-queue`; `generate` these and those of sampling; `chat` all of `generate` but `--n`,",
        "`--echo`, `--logprobs` and `--prompt-logprobs`. In `generate` and `chat` `--seed` is the request's seed.",
    ]
    for group in (FILES, ENGINE, SERVER, SAMPLING):
        lines += ["", f"## {group}", "", "| flag | environment | default | meaning | also accepted |"]
        lines.append("|---|---|---|---|---|")
        lines += [_row(flag) for flag in FLAGS if flag.group == group]
    return "\n".join(lines) + "\n"


def shown_default(flag: Flag) -> str:
    """The default for people; empty where it depends on the model or the machine."""
    default = default_of(flag)
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, "", ()) else str(default)


def _row(flag: Flag) -> str:
    default = shown_default(flag)
    text = f"`{default}`" if default else ""
    usage = flag.option if flag.kind is Kind.SWITCH else f"{flag.option} {flag.kind.value}"
    also = ", ".join(f"`{alias}`" for alias in (*flag.aliases, *flag.off_aliases))
    return f"| `{usage}` | `{flag.env}` | {text} | {flag.help} | {also} |"


if __name__ == "__main__":
    print(markdown(), end="")
