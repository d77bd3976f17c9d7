"""A stand-in for LLM that answers with its prompt in capitals, word by word, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from slipstream.core.errors import ContextLengthError
from slipstream.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams


class EchoLLM:
    """`asked` keeps every prompt or conversation with its parameters. `interrupt_at`: the word before which Ctrl-C
    comes. A prompt of more than 50 words is too long."""

    def __init__(self, *, template: bool = True, interrupt_at: int | None = None, **settings: Any) -> None:
        self.settings = settings
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.interrupt_at = interrupt_at
        self.shut_down = False
        self.loaded = SimpleNamespace(
            inputs=SimpleNamespace(template=object() if template else None),
            report={"model": "echo", "device": "none", "context": "50 words", "cache": "none"},
        )

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5, top_k=7)

    def shutdown(self) -> None:
        self.shut_down = True

    def generate(self, prompts: Any, params: SamplingParams, *, on_update: Any = None) -> list[RequestOutput]:
        each = [prompts] if isinstance(prompts, str) else prompts
        return [self._one(prompt, prompt, params, on_update) for prompt in each]

    def chat(self, messages: Sequence[Any], params: SamplingParams, *, on_update: Any = None) -> list[RequestOutput]:
        each = [messages] if isinstance(messages[0], Mapping) else messages
        return [self._one(m, m[-1]["content"], params, on_update) for m in each]

    def _one(
        self, asked: Any, text: str, params: SamplingParams, on_update: Callable[[RequestUpdate], None] | None
    ) -> RequestOutput:
        self.asked.append((asked, params))
        words = text.split()
        if len(words) > 50:
            raise ContextLengthError(f"the prompt has {len(words)} tokens", param="prompt")
        pieces = [word.upper() if i == 0 else " " + word.upper() for i, word in enumerate(words)]
        metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.25, last_token_time=1.25 + 0.1 * (len(words) - 1))
        ids = list(range(len(words)))
        request = Request("r", ids, params, len(words), 99, text, metrics=metrics)
        for number, piece in enumerate(pieces):
            if number == self.interrupt_at:
                raise KeyboardInterrupt
            if on_update is not None:
                on_update(RequestUpdate(request, [ChoiceDelta(0, piece, [number])]))
        entry = {5: Logprob(-0.5, 2, "x"), 6: Logprob(-0.25, 1, "y")}
        choices = [
            CompletionOutput(
                index,
                "".join(pieces),
                ids,
                logprobs=None if params.logprobs is None else [entry] * len(ids),
                finish_reason="stop",
            )
            for index in range(params.n)
        ]
        return RequestOutput("r", text, ids, choices, True, num_cached_tokens=1, seed=99, metrics=metrics)
