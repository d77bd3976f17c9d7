"""Small engines around a double, and a driver that runs requests to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.cache.manager import CacheManager
from slipstream.cache.spec import longest_window
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices.tiled_step import TiledStep
from slipstream.engine.collect import OutputCollector
from slipstream.engine.core import Engine
from slipstream.engine.cost_model import CostModel
from slipstream.engine.inputs import InputProcessor
from slipstream.engine.runner import Runner, Step


def make_engine(
    model: Any,
    *,
    pages: int = 200,
    page_size: int = 4,
    max_sequences: int = 8,
    max_rows: int = 64,
    max_step_ms: float = 1e9,
    max_model_len: int = 256,
    prefix_caching: bool = True,
    eos_ids: Iterable[int] = (),
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
    costs: CostModel | None = None,
    device: Any = None,
) -> Engine:
    """An engine over `model` on `device`, by default on the CPU's tiled step with caches of `dtype`."""
    step: Step
    if device is None:
        caches = [torch.zeros(spec.shape(pages, page_size), dtype=dtype) for spec in model.cache_specs()]
        step = TiledStep(model, caches)
    else:
        step = device.compile(model, device.allocate(model.cache_specs(), pages, page_size))
    return Engine(
        Runner(step),
        CacheManager(pages, page_size, window=longest_window(model.cache_specs()), prefix_caching=prefix_caching),
        costs or CostModel(0.1, 0.1, 0.01),
        vocab_size=model.vocab_size,
        eos_ids=eos_ids,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        max_sequences=max_sequences,
        max_rows=max_rows,
        max_step_ms=max_step_ms,
        row_tile=16 if device is None else device.row_tile,
        sampler=None if device is None else device.sampler(model.vocab_size),
    )


def make_inputs(model: Any, *, max_model_len: int = 256, tokenizer: Any = None) -> InputProcessor:
    """The request checker that goes with `make_engine`."""
    return InputProcessor(
        tokenizer=tokenizer,
        template=None,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        defaults=SamplingParams(),
    )


class Driver:
    """Feeds an engine and collects what comes out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collectors: dict[str, OutputCollector] = {}
        self.errors: dict[str, Exception] = {}
        self.streamed: dict[tuple[str, int], str] = {}
        self.steps = 0

    def add(self, request: Request) -> None:
        self.collectors[request.id] = OutputCollector(request)
        self.engine.add(request)

    def abort(self, request_id: str) -> None:
        update = self.engine.abort(request_id)
        if update is not None:
            self.collectors[request_id].add(update)

    def step(self) -> None:
        """One step; every update is collected, and the text of deltas joined per choice."""
        self.steps += 1
        for update in self.engine.step():
            for delta in update.deltas:
                key = (update.request.id, delta.index)
                self.streamed[key] = self.streamed.get(key, "") + delta.text
            try:
                self.collectors[update.request.id].add(update)
            except Exception as error:
                self.errors[update.request.id] = error

    def run(self, requests: Iterable[Request] = (), between: Callable[[], None] | None = None) -> None:
        """Add the requests and step until nothing is left."""
        for request in requests:
            self.add(request)
        while self.engine.has_work:
            if between is not None:
                between()
            self.step()
            assert self.steps < 100_000, "the engine does not come to an end"

    def output(self, request_id: str) -> RequestOutput:
        return self.collectors[request_id].output

    def tokens(self, request_id: str) -> list[list[int]]:
        """The token ids of each choice."""
        return [choice.token_ids for choice in self.output(request_id).outputs]


def check_idle(engine: Engine) -> None:
    """Nothing is left behind: no sequence, no page in use, no reference on a cached page."""
    assert not engine.has_work
    assert engine.scheduler.running == []
    assert engine.scheduler.waiting == []
    cache = engine.cache
    assert cache.num_in_use == 0, f"{cache.num_in_use} pages leaked"
    assert cache.tree.num_unreferenced == cache.tree.num_nodes
    assert cache.pool.num_free + cache.tree.num_nodes == cache.pool.capacity
    cache.clear_prefixes()
    assert cache.pool.num_free == cache.pool.capacity
