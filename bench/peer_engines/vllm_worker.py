"""vLLM's CPU build as a subject: `vllm_worker.py FOLDER THREADS DTYPE`. Its engine, stepped in this process."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from peer_engines.worker_loop import Stopwatch, cache_bytes, serve

CONTEXT = 1024


class Vllm:
    """vLLM's defaults, but for a small cache, no prefix cache and no second process."""

    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        self.cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self.cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm

        self.folder = Path(folder)
        self.vllm = vllm
        self.llm = vllm.LLM(
            folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=CONTEXT, enable_prefix_caching=False
        )
        self.numbers = itertools.count()

    def describe(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        import torch

        config = self.llm.llm_engine.vllm_config
        model = config.model_config.hf_text_config
        item, head_dim = config.model_config.dtype.itemsize, model.hidden_size // model.num_attention_heads

        def cache(first: int, second: int) -> float:
            context = first + second / 2
            return cache_bytes(model.num_hidden_layers, model.num_key_value_heads, head_dim, item, context)

        # Counted in the file: vLLM packs its weights into tensors that are no parameters.
        with safe_open(self.folder / "model.safetensors", framework="np") as file:
            weights = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys()) * item  # noqa: SIM118
        return {
            "version": self.vllm.__version__,
            "threads": len(self.cpus),
            # The head is the embedding table, so all of it is read.
            "bytes_per_step": [weights + cache(first, second) for first, second in shapes],
            "build": f"torch {torch.__version__}, compilation mode {config.compilation_config.mode}",
        }

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        engine = self.llm.llm_engine
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        watch = Stopwatch()
        engine.add_request(str(next(self.numbers)), {"prompt_token_ids": list(prompt)}, params)
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                for _ in output.outputs[0].token_ids[len(tokens) :]:
                    watch.note()
                tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens, "times": watch.times}

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """Continue all prompts at once. -> seconds until the last is done, and tokens made"""
        engine, made = self.llm.llm_engine, 0
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        for prompt in prompts:
            engine.add_request(str(next(self.numbers)), {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            made += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        return {"seconds": time.perf_counter() - begin, "tokens": made}


if __name__ == "__main__":
    serve(lambda: Vllm(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
