"""Slipstream as a subject: `slipstream_worker.py MODEL THREADS`. Set as `slipstream bench latency` sets it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import slipstream
from peer_engines.step_times import StepTimes
from peer_engines.worker_loop import Stopwatch, serve
from slipstream import LLM, SamplingParams
from slipstream.cli.bench_latency import Shape, bytes_per_step
from slipstream.core.request import RequestUpdate

LONGEST = 2304
"""Tokens of the sequence that single steps are timed with."""


class Slipstream:
    """The engine in this process, with the default numerics and no prefix cache."""

    def __init__(self, model: str, threads: int) -> None:
        self.llm = LLM(model, threads=threads, prefix_caching=False)
        self._steps: StepTimes | None = None

    def describe(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        loaded = self.llm.loaded
        dtype = str(loaded.device.dtype).removeprefix("torch.")
        return {
            "version": slipstream.__version__,
            "numerics": loaded.numerics if loaded.numerics == "native" else f"{loaded.numerics}, {dtype}",
            "threads": loaded.device.threads,
            "bytes_per_step": [bytes_per_step(self.llm, Shape(first, second, 1)) for first, second in shapes],
            "build": f"torch {torch.__version__}, {loaded.device.describe()}",
        }

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        tokens: list[int] = []

        def on_update(update: RequestUpdate) -> None:
            for delta in update.deltas:
                for token in delta.token_ids:
                    watch.note()
                    tokens.append(token)

        watch = Stopwatch()
        self.llm.generate(list(prompt), params, on_update=on_update)
        return {"tokens": tokens, "times": watch.times}

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """Continue all prompts at once. -> seconds until the last is done, and tokens made"""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begin = time.perf_counter()
        outputs = self.llm.generate([list(prompt) for prompt in prompts], params)
        return {
            "seconds": time.perf_counter() - begin,
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        }

    def steps(self, rows: Sequence[int], context: int, repeats: int) -> dict[str, Any]:
        """Times of single steps, see `StepTimes.measure`."""

        def measured() -> dict[str, Any]:
            if self._steps is None:
                self._steps = StepTimes(self.llm.loaded, LONGEST)
            return self._steps.measure(rows, context, repeats)

        return self.llm.run_in_engine(measured)

    def encode(self, text: str) -> dict[str, Any]:
        """The ids of a text, without control tokens."""
        return {"tokens": self.llm.get_tokenizer().encode(text)}

    def score(self, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
        """The mean log-probability of `tokens` as a continuation."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        logprobs = self.llm.generate([*prompt, *tokens], params)[0].prompt_logprobs
        assert logprobs is not None
        tail = zip(tokens, logprobs[-len(tokens) :], strict=True)
        return {"logprob": statistics.mean(entry[token].logprob for token, entry in tail if entry is not None)}


if __name__ == "__main__":
    serve(lambda: Slipstream(sys.argv[1], int(sys.argv[2])))
