"""llama.cpp as a subject: `llama_cpp_worker.py GGUF THREADS`. `llama_decode` itself, with its default settings."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from peer_engines.worker_loop import Stopwatch, cache_bytes, serve

CONTEXT = 4352
MOST_ROWS = 512


class LlamaCpp:
    """A model and a context for one sequence; a prompt runs in calls of up to 512 tokens."""

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
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.token_batch = llama_cpp.llama_batch_init(MOST_ROWS, 0, 1)

    def describe(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        size = llama_cpp.llama_model_size(self.model)  # the head is the embedding table, so all of it is read
        heads = llama_cpp.llama_model_n_head(self.model)
        layers, kv_heads = llama_cpp.llama_model_n_layer(self.model), llama_cpp.llama_model_n_head_kv(self.model)
        head_dim = llama_cpp.llama_model_n_embd(self.model) // heads

        def cache(first: int, second: int) -> float:  # keys and values are float16
            return cache_bytes(layers, kv_heads, head_dim, 2, first + second / 2)

        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "threads": llama_cpp.llama_n_threads(self.context),
            "bytes_per_step": [size + cache(first, second) for first, second in shapes],
            "build": llama_cpp.llama_print_system_info().decode(),
        }

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(self.memory, True)
        watch = Stopwatch()
        for start in range(0, len(prompt), MOST_ROWS):
            chunk = prompt[start : start + MOST_ROWS]
            ends = start + len(chunk) == len(prompt)
            self._decode(chunk, start, wanted=1 if ends else 0)
        tokens = [self._best()]
        watch.note()
        for position in range(len(prompt), len(prompt) + count - 1):
            self._decode(tokens[-1:], position, wanted=1)
            tokens.append(self._best())
            watch.note()
        return {"tokens": tokens, "times": watch.times}

    def steps(self, rows: Sequence[int], context: int, repeats: int) -> dict[str, Any]:
        """Calls of `llama_decode` with so many tokens at a context, all with logits, in turns.

        -> `ms` of each call, for each count
        """
        llama_cpp.llama_memory_clear(self.memory, True)
        for start in range(0, context, MOST_ROWS):
            count = min(MOST_ROWS, context - start)
            self._decode([20 + 7919 * (start + i) % (self.vocab - 20) for i in range(count)], start, wanted=0)
        times: dict[str, list[float]] = {str(count): [] for count in rows}
        for repeat in range(-1, repeats):
            for count in rows:
                tokens = [20 + 7919 * (context + i) % (self.vocab - 20) for i in range(count)]
                begin = time.perf_counter()
                self._decode(tokens, context, wanted=count)
                llama_cpp.llama_synchronize(self.context)
                spent = time.perf_counter() - begin
                llama_cpp.llama_memory_seq_rm(self.memory, 0, context, -1)
                if repeat >= 0:
                    times[str(count)].append(spent * 1e3)
        return {"ms": times}

    def score(self, window: Sequence[int]) -> dict[str, Any]:
        """Log-probabilities of all tokens of a text but the first."""
        llama_cpp.llama_memory_clear(self.memory, True)
        found: list[float] = []
        for start in range(0, len(window), MOST_ROWS):
            chunk = window[start : start + MOST_ROWS]
            self._decode(chunk, start, wanted=len(chunk))
            for i, token in enumerate(window[start + 1 : start + 1 + len(chunk)]):
                row = self._logits(i).astype(np.float64)
                highest = row.max()
                found.append(float(row[token] - highest - np.log(np.exp(row - highest).sum())))
        return {"logprobs": found}

    def _decode(self, tokens: Sequence[int], position: int, wanted: int) -> None:
        """One call of `llama_decode`, logits for the last `wanted` tokens."""
        batch, count = self.token_batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, i >= count - wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self) -> int:
        """The best token after the last one that was decoded."""
        return int(np.argmax(self._logits(-1)))

    def _logits(self, index: int) -> Any:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, index), (self.vocab,))


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2])))
