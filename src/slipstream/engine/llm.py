"""Offline generation: give prompts, get outputs."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from slipstream.core.config import EngineConfig
from slipstream.core.errors import EngineDeadError, InvalidRequestError
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.build import LoadedEngine, Progress, load_engine
from slipstream.engine.collect import OutputCollector
from slipstream.engine.core import Engine
from slipstream.engine.inputs import Prompt
from slipstream.engine.worker import EngineWorker, Result
from slipstream.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]
OnUpdate = Callable[[RequestUpdate], None]


class LLM:
    """A model that generates in this process.

    `model` is a catalogue name, a .gguf file, a Hugging Face folder or hub id; empty: the default model. Other settings
    are those of `EngineConfig`. Use as a context manager, or call `shutdown`.
    """

    def __init__(self, model: str = "", *, progress: Progress | None = None, **settings: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **settings})
        self._start(lambda: load_engine(config, progress))

    @classmethod
    def over(cls, load: Callable[[], LoadedEngine]) -> LLM:
        """An LLM around what `load` makes in the engine's thread; what it raises is raised here."""
        llm = cls.__new__(cls)
        llm._start(load)
        return llm

    def _start(self, load: Callable[[], LoadedEngine]) -> None:
        self.loaded: LoadedEngine

        def build() -> Engine:
            self.loaded = load()
            return self.loaded.engine

        self._worker = EngineWorker(build)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        on_update: OnUpdate | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; all run together. -> outputs in the order of the prompts.

        A prompt is text, a list of token ids, or a mapping (see `slipstream.engine.inputs.Prompt`). `on_update` is
        called in this thread with each step's news. Raises InvalidRequestError before anything runs if a prompt or
        parameter is wrong, and the error of the first request that fails.
        """
        several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
        single = not several or (len(prompts) > 0 and isinstance(cast(Sequence[Any], prompts)[0], int))
        each = cast(Sequence[Prompt], [prompts] if single else prompts)
        params = _per_prompt(sampling_params, len(each))
        make = self.loaded.inputs.request
        return self._run([make(p, s, priority=priority) for p, s in zip(each, params, strict=True)], on_update)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        on_update: OnUpdate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several through the model's chat template; see `generate`.

        `options` are those of `ChatTemplate.render`; `chat_template_kwargs` are further variables of the template.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequestError("messages must be a list of messages, or a list of such lists", param="messages")
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        each: Sequence[Any] = [messages] if single else messages
        params = _per_prompt(sampling_params, len(each))
        make = self.loaded.inputs.chat
        more = {"priority": priority, "chat_template_kwargs": chat_template_kwargs, **options}
        requests = [make(m, s, **more) for m, s in zip(each, params, strict=True)]
        return self._run(requests, on_update)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        tokenizer = self.loaded.inputs.tokenizer
        assert tokenizer is not None
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that names no parameters: the model's published ones."""
        return self.loaded.inputs.defaults

    def run_in_engine(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread between two steps; torch's threads are fastest there."""
        return self._worker.call(function)

    def shutdown(self) -> None:
        """Stop the engine's thread."""
        self._worker.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, requests: list[Request], on_update: OnUpdate | None) -> list[RequestOutput]:
        news = _News(at_once=on_update is not None)
        collectors = {request.id: OutputCollector(request) for request in requests}
        open_ids = set(collectors)
        try:
            sink = news.put
            for request in requests:
                self._worker.submit(request, sink, bounded=False)
            while open_ids:
                for update in self._next(news):
                    if update.finished:
                        open_ids.discard(update.request.id)
                    collectors[update.request.id].add(update)
                    if on_update is not None:
                        on_update(update)
        finally:
            for request_id in open_ids:
                self._worker.abort(request_id)
        return [collectors[request.id].output for request in requests]

    def _next(self, news: _News) -> Sequence[RequestUpdate]:
        """Wait for updates, but not for an engine that is gone."""
        while True:
            updates = news.get(timeout=5.0)
            if updates:
                return updates
            if not self._worker.alive:
                raise EngineDeadError("the engine's thread has ended")


class _News:
    """Updates on their way from the engine's thread to the caller's.

    A thread that wakes up for every token takes a core, and the interpreter lock, from the step. Where nobody looks at
    tokens as they come, it wakes up when something has ended or `SOME` updates have come together; that many are taken
    in faster than a step takes.
    """

    SOME = 64

    def __init__(self, *, at_once: bool) -> None:
        self._waiting: list[RequestUpdate] = []
        self._some = 1 if at_once else self.SOME
        self._wake: queue.SimpleQueue[list[RequestUpdate]] = queue.SimpleQueue()

    def put(self, updates: Sequence[RequestUpdate]) -> None:
        """Called in the engine's thread."""
        waiting = self._waiting
        waiting += updates
        if len(waiting) < self._some and not any(update.finished for update in updates):
            return
        self._waiting = []
        self._wake.put(waiting)

    def get(self, timeout: float) -> Sequence[RequestUpdate]:
        """The next updates; none when `timeout` seconds have passed."""
        try:
            return self._wake.get(timeout=timeout)
        except queue.Empty:
            return ()


def _per_prompt(params: Params, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}",
            param="sampling_params",
        )
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(params)} entries for {count} prompts", param="sampling_params"
        )
    return params
