"""llama.cpp as a subject: `llama_cpp_worker.py GGUF THREADS`. `llama_decode` itself, with its default settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from peer_engines.worker_loop import Stopwatch, cache_bytes, serve

CONTEXT = 1024
MOST_ROWS = 512


class LlamaCpp:
    """A model and a context for one sequence; a prompt is one call of up to 512 tokens."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, MOST_ROWS, MOST_ROWS
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(MOST_ROWS, 0, 1)

    def describe(self, input_len: int, output_len: int) -> dict[str, Any]:
        size = llama_cpp.llama_model_size(self.model)  # the head is the embedding table, so all of it is read
        heads = llama_cpp.llama_model_n_head(self.model)
        layers, kv_heads = llama_cpp.llama_model_n_layer(self.model), llama_cpp.llama_model_n_head_kv(self.model)
        head_dim = llama_cpp.llama_model_n_embd(self.model) // heads
        cache = cache_bytes(layers, kv_heads, head_dim, 2, input_len + output_len / 2)  # keys and values are float16
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "threads": llama_cpp.llama_n_threads(self.context),
            "bytes_per_step": size + cache,
            "build": llama_cpp.llama_print_system_info().decode(),
        }

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        watch = Stopwatch()
        tokens = [self._step(prompt, 0)]
        watch.note()
        for position in range(len(prompt), len(prompt) + count - 1):
            tokens.append(self._step(tokens[-1:], position))
            watch.note()
        return {"tokens": tokens, "times": watch.times}

    def _step(self, tokens: Sequence[int], position: int) -> int:
        """One call of `llama_decode`. -> the best next token"""
        batch, last = self.batch, len(tokens) - 1
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, i == last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = llama_cpp.llama_get_logits_ith(self.context, last)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.vocab,))))


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2])))
