"""How a worker answers the harness: JSON lines on stdin and stdout. Standard library only, for every environment."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1


class Subject(Protocol):
    """One engine with one model loaded. Some can do more, see their own methods."""

    def describe(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Version, settings, and `bytes_per_step`: for each shape (prompt, output) what a decoding step reads.

        That is the weights once, and keys and values at the shape's mean context.
        """

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """Continue a prompt greedily by `count` tokens, with nothing cached.

        -> `tokens`, and `times`: seconds from the start to each of them.
        """


class Stopwatch:
    """Seconds since it was made, noted once for each token."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.times: list[float] = []

    def note(self) -> None:
        self.times.append(time.perf_counter() - self._begin)


def cache_bytes(layers: int, kv_heads: int, head_dim: int, item_bytes: int, context: float) -> float:
    """Bytes of the keys and values of `context` tokens."""
    return 2 * layers * kv_heads * head_dim * item_bytes * context


def serve(load: Callable[[], Subject]) -> None:
    """Load, say so, then answer one request a line until stdin ends. A request names a method and its arguments.

    What libraries print goes to stderr, so that stdout carries answers only.
    """
    if sys.platform == "linux":  # a stopped worker must not outlive the harness
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    subject: Subject | None = None
    begin = time.perf_counter()

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        subject = load()
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"load_s": time.perf_counter() - begin})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(getattr(subject, request.pop("do"))(**request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
