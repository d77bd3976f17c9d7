"""transformers as a subject: `transformers_worker.py FOLDER THREADS DTYPE`. A forward pass a token, with its cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from peer_engines.worker_loop import Stopwatch, cache_bytes, serve


class Transformers:
    """The model in transformers' default attention."""

    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def describe(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        config, item = self.model.config, self.model.dtype.itemsize
        head_dim = config.hidden_size // config.num_attention_heads

        def cache(first: int, second: int) -> float:
            context = first + second / 2
            return cache_bytes(config.num_hidden_layers, config.num_key_value_heads, head_dim, item, context)

        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return {
            "version": transformers.__version__,
            "threads": torch.get_num_threads(),
            # The head is the embedding table, so all of it is read.
            "bytes_per_step": [weights + cache(first, second) for first, second in shapes],
            "build": f"torch {torch.__version__}, attention {config._attn_implementation}",
        }

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        watch = Stopwatch()
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(prompt)])
        tokens: list[int] = []
        for _ in range(count):
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
            watch.note()
            ids = torch.tensor([tokens[-1:]])
        return {"tokens": tokens, "times": watch.times}


if __name__ == "__main__":
    serve(lambda: Transformers(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
