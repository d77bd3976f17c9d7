"""A real server on a free port of this machine over a model that is a double: fast, and with a tokenizer of bytes.

`ServedModel` can be pickled, so the same double serves isolated (`serving(isolate=True)`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from torch import Tensor

from doubles.engines import make_engine
from doubles.hash_model import HashModel
from doubles.small_vocabularies import byte_metadata
from slipstream.core.config import EngineConfig, ServerConfig
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.inputs import InputProcessor
from slipstream.ops.rows import Rows
from slipstream.server.run import listen, url_of, uvicorn_config
from slipstream.server.service import Service
from slipstream.text.chat_template import ChatTemplate
from slipstream.text.tokenizer import Tokenizer

NAME = "double"
CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class SlowHashModel(HashModel):
    """A hash model whose steps take `step_ms`; `stalls` makes the next step wait until it is set free."""

    def __init__(self, vocab: int, step_ms: float) -> None:
        super().__init__(vocab)
        self.step_ms = step_ms
        self.go = threading.Event()
        self.go.set()
        self.fails: Exception | None = None

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        if self.step_ms:
            time.sleep(self.step_ms / 1e3)
        self.go.wait()
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        return super().forward(rows, caches)


@dataclass(frozen=True)
class ServedModel:
    """Makes the double; stands where `ModelLoader` does."""

    config: EngineConfig = field(default_factory=lambda: EngineConfig(model=NAME))
    step_ms: float = 0.0
    pages: int = 600
    max_model_len: int = 512
    max_sequences: int = 8
    temperature: float = 1.0

    def engine(self, progress: Any = None) -> Any:
        tokenizer = tokenizer_of_bytes()
        torch.set_num_threads(1)
        model = SlowHashModel(tokenizer.vocab_size, self.step_ms)
        engine = make_engine(
            model,
            pages=self.pages,
            max_model_len=self.max_model_len,
            max_sequences=self.max_sequences,
            eos_ids=tokenizer.eos_ids,
            tokenizer=tokenizer,
        )
        inputs = self.inputs(vocab_size=tokenizer.vocab_size, max_model_len=self.max_model_len)
        return SimpleNamespace(
            engine=engine, inputs=inputs, report={"device": "a double", "numerics": "reference: a double"}, model=model
        )

    def inputs(self, *, vocab_size: int, max_model_len: int) -> InputProcessor:
        tokenizer = tokenizer_of_bytes()
        return InputProcessor(
            tokenizer=tokenizer,
            template=ChatTemplate(TEMPLATE, eos_token="<|im_end|>"),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            defaults=SamplingParams(temperature=self.temperature),
            seed=1,
        )


def tokenizer_of_bytes() -> Tokenizer:
    """A token per byte, some words, and ChatML's control tokens; a turn ends with <|im_end|>."""
    marked = tuple((text, 3) for text in CONTROL)
    metadata = byte_metadata("qwen2", " the", " and", "ing", marked=marked)
    metadata["tokenizer.ggml.eos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    return Tokenizer.from_gguf_metadata(metadata)


class Serving:
    """A running server. `service` is its shared state, `model` the double if it runs in this process."""

    def __init__(self, served: ServedModel, config: ServerConfig) -> None:
        self.served = served
        self.config = config
        self.model: SlowHashModel | None = None
        self.sockets = listen(config)
        self.url = url_of(config, self.sockets[0])
        self.service = Service(config, served.config, self._make)
        self._server = uvicorn.Server(uvicorn_config(self.service))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def _make(self) -> AsyncEngine:
        if self.config.isolate:
            return AsyncEngine.isolated(self.served)  # type: ignore[arg-type]

        def load() -> Any:
            loaded = self.served.engine()
            self.model = loaded.model
            return loaded

        return AsyncEngine.over(load, max_queue=self.served.config.max_queue)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.service.start()
        self._ready.set()
        await self._server.serve(self.sockets)

    @property
    def engine(self) -> Any:
        """The Engine, if it runs in this process."""
        return self.service.loaded.worker.engine  # type: ignore[union-attr]

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60), "the server did not start"
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self.service.close()
        assert not self._thread.is_alive(), "the server did not stop"


@contextmanager
def serving(served: ServedModel | None = None, **settings: Any) -> Iterator[Serving]:
    """A server for the block. `settings` are ServerConfig's."""
    running = Serving(served or ServedModel(), ServerConfig(port=0, **settings))
    running.start()
    try:
        yield running
    finally:
        running.stop()
