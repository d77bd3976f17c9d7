"""From settings to a running engine: find the model, load it, plan memory, measure costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.cache.manager import CacheManager
from slipstream.cache.spec import longest_window
from slipstream.core.config import EngineConfig
from slipstream.core.damage import reading
from slipstream.core.errors import ConfigError
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.engine.calibrate import measure_costs
from slipstream.engine.core import Engine
from slipstream.engine.inputs import InputProcessor
from slipstream.engine.numerics import Device, choose_device, max_rows
from slipstream.engine.runner import Runner
from slipstream.loading import catalog
from slipstream.loading.checkpoint import Checkpoint, open_checkpoint
from slipstream.loading.weights import load_weights
from slipstream.models.base import CheckpointModel
from slipstream.models.registry import build_model
from slipstream.text.chat_template import ChatTemplate
from slipstream.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, what is done of it and its total."""

_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


@dataclass
class LoadedEngine:
    """An engine and what belongs to it. `report` says in a line each what was decided.

    `weight_bytes` are those that a step reads: of an untied embedding table single rows are read, so it is left out;
    all experts of a layer count, which is an upper bound.
    """

    config: EngineConfig
    engine: Engine
    inputs: InputProcessor
    model: CheckpointModel
    checkpoint: Checkpoint
    device: Device
    weight_bytes: int
    report: dict[str, str] = field(default_factory=dict)

    @property
    def numerics(self) -> str:
        """ "native" or "reference"."""
        return "native" if isinstance(self.device, NativeCpuDevice) else "reference"


def load_engine(config: EngineConfig, progress: Progress | None = None) -> LoadedEngine:
    """Load the model that `config` names and make an engine for it. Raises LoadError or ConfigError."""
    report: dict[str, str] = {}
    begin = time.perf_counter()
    path = catalog.resolve(config.model or None, fetch_missing=True, progress=progress)
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config)
    device, report["numerics"] = choose_device(config, model, checkpoint, _staged(progress, "packing"))
    report["device"] = device.describe()
    if isinstance(device, NativeCpuDevice):
        weights, form = device.weight_bytes, "packed"
        in_all = device.prepared.weights.size
    else:
        load_weights(model, checkpoint, device.dtype, _staged(progress, "loading"))
        in_all = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        weights, form = read_in_a_step(model), f"in {str(device.dtype).removeprefix('torch.')}"
    report["model"] = f"{path} ({_mib(in_all)} of weights {form})"

    max_model_len, pages = _plan_memory(config, model, device, report)
    caches = device.allocate(model.cache_specs(), pages, config.page_size)
    step = device.compile(model, caches)
    if progress is not None:
        progress("measuring", 0, 0)
    costs = measure_costs(
        step,
        max_model_len=max_model_len,
        page_size=config.page_size,
        row_tile=device.row_tile,
        max_rows=max_rows(config),
    )
    inputs = load_inputs(config, checkpoint, vocab_size=model.vocab_size, max_model_len=max_model_len)
    tokenizer = inputs.tokenizer
    assert tokenizer is not None
    engine = Engine(
        Runner(step),
        CacheManager(
            pages,
            config.page_size,
            window=longest_window(model.cache_specs()),
            prefix_caching=config.prefix_caching,
        ),
        costs,
        vocab_size=model.vocab_size,
        eos_ids={*checkpoint.eos_token_ids, *tokenizer.eos_ids},
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        max_sequences=config.max_num_seqs,
        max_rows=max_rows(config),
        max_step_ms=config.max_step_ms,
        row_tile=device.row_tile,
        sampler=device.sampler(model.vocab_size),
    )
    report["start"] = f"{time.perf_counter() - begin:.1f} s"
    return LoadedEngine(config, engine, inputs, model, checkpoint, device, weights, report)


def load_inputs(config: EngineConfig, checkpoint: Checkpoint, *, vocab_size: int, max_model_len: int) -> InputProcessor:
    """What turns callers' prompts into requests for a checkpoint's model; needs no weights."""
    path = checkpoint.path
    with reading(f"{path}: tokenizer"):
        tokenizer = load_tokenizer(config, checkpoint)
    with reading(f"{path}: chat template"):
        template = load_template(config, checkpoint, tokenizer)
    with reading(f"{path}: generation config"):
        generation = {**catalog.published_sampling(path), **checkpoint.generation_config}
        defaults = default_params(config, generation)
    return InputProcessor(
        tokenizer=tokenizer,
        template=template,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        defaults=defaults,
        seed=config.seed,
    )


@dataclass(frozen=True)
class ModelLoader:
    """Loads what a config names, in whichever process it is called; it can be pickled."""

    config: EngineConfig

    def engine(self, progress: Progress | None = None) -> LoadedEngine:
        """The whole engine."""
        return load_engine(self.config, progress)

    def inputs(self, *, vocab_size: int, max_model_len: int) -> InputProcessor:
        """Only what checks and tokenizes requests, for a process that runs no model."""
        checkpoint = open_checkpoint(catalog.resolve(self.config.model or None, fetch_missing=True))
        return load_inputs(self.config, checkpoint, vocab_size=vocab_size, max_model_len=max_model_len)


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that `config` names, else the checkpoint's own."""
    if config.tokenizer:
        return Tokenizer.from_folder(Path(config.tokenizer))
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf_metadata(checkpoint.metadata)
    return Tokenizer.from_folder(checkpoint.path)


def load_template(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template: a file or Jinja text that `config` names, else the checkpoint's own; None without one."""
    source = checkpoint.chat_template
    if config.chat_template:
        source = config.chat_template
        if "{" not in source:
            path = Path(source)
            if not path.is_file():
                raise ConfigError(f"chat_template: there is no file {source}", param="chat_template")
            source = path.read_text(encoding="utf-8")
    if source is None:
        return None
    eos = next(iter(tokenizer.eos_ids), None)
    return ChatTemplate(source, bos_token=tokenizer.text_of(tokenizer.bos_id), eos_token=tokenizer.text_of(eos))


def default_params(config: EngineConfig, generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a request that names none: the model's published ones, or neutral ones."""
    if config.generation_config != "auto":
        return SamplingParams()
    found = {name: generation_config[name] for name in _GENERATION_FIELDS if generation_config.get(name) is not None}
    return SamplingParams(**found)


def _plan_memory(
    config: EngineConfig, model: CheckpointModel, device: Device, report: dict[str, str]
) -> tuple[int, int]:
    """The context length to serve and the pages to allocate."""
    longest = model.max_position
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {longest} positions the model was made for",
            param="max_model_len",
        )
    length = config.max_model_len or longest
    specs = model.cache_specs()
    per_sequence = -(-length // config.page_size)
    pages = device.plan_pages(
        specs,
        config.page_size,
        budget=config.cache_memory,
        useful=per_sequence * config.max_num_seqs + 1,
        least=per_sequence + 1 if config.max_model_len else 2,
    )
    fits = min(length, (pages - 1) * config.page_size)
    bytes_in_all = pages * device.page_bytes(specs, config.page_size)
    source = "as set" if config.cache_memory else "from free memory"
    report["cache"] = f"{_mib(bytes_in_all)} ({source}): {(pages - 1) * config.page_size} tokens in {pages - 1} pages"
    report["context"] = f"{fits} tokens" + (f" (the model allows {longest})" if fits < longest else "")
    return fits, pages


def read_in_a_step(model: CheckpointModel) -> int:
    """Bytes of parameters but for an embedding table that the head does not share."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    head, table = getattr(model, "lm_head", None), getattr(model, "embed_tokens", None)
    if head is not None and table is not None:
        size -= table.weight.numel() * table.weight.element_size()
    return size


def _staged(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
