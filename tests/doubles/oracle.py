"""What the engine must answer, computed token by token in float64 without cache, batches or the engine's code.

It follows the answer given: at each token it computes the score of every token from scratch and demands that the one
taken has the highest score (within rounding), and that the answer ends exactly where the rules say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from slipstream.core.outputs import CompletionOutput, TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams

Logits = Callable[[list[int]], np.ndarray]
"""From all tokens so far to the next token's logits [vocab]."""

ROUNDING = 2e-4


def _splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def _finalise(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def noise(seed: int, choice: int, position: int, vocab: int) -> np.ndarray:
    """Gumbel noise [vocab] from the documented hash of (seed, choice, position, token)."""
    mask = (1 << 64) - 1
    key = _splitmix(_splitmix(seed & mask) ^ (choice * 0xD1342543DE82EF95 & mask))
    key = _splitmix(key ^ _splitmix(position))
    hashes = [_finalise(_finalise((token + key) & 0xFFFFFFFF) ^ key >> 32) for token in range(vocab)]
    return np.array([-math.log(-math.log1p(-min((h + 0.5) / 2**32, 1 - 2**-24))) for h in hashes])


def scores(logits: np.ndarray, request: Request, output: list[int], choice: int, eos: frozenset[int]) -> np.ndarray:
    """Score of every token after `output`: what the token with the highest one of is taken."""
    params = request.params
    x = logits.astype(np.float64)
    banned = set()
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    for word in request.bad_word_ids:
        head = list(word[:-1])
        if not head or output[-len(head) :] == head:
            banned.add(word[-1])
    if params.allowed_token_ids is not None:
        banned |= set(range(len(x))) - set(params.allowed_token_ids)
    x[list(banned)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(request.prompt_ids) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return x
    x = x / params.temperature
    if params.top_k:
        x[x < np.sort(x)[-min(params.top_k, len(x))]] = -np.inf
    return x + noise(request.seed, choice, len(request.prompt_ids) + len(output), len(x))


def check_choice(request: Request, choice: CompletionOutput, logits: Logits, eos: frozenset[int] = frozenset()) -> None:
    """Every token is the best one given those before, and the answer ends where and why it must."""
    output: list[int] = []
    params = request.params
    aborted = choice.finish_reason == "abort"
    for index, token in enumerate(choice.token_ids):
        assert not _ends(output, request, eos), "the answer goes on after its end"
        row = logits([*request.prompt_ids, *output])
        score = scores(row, request, output, choice.index, eos)
        assert score[token] >= score.max() - ROUNDING, f"token {index} of choice {choice.index} is not the best one"
        if params.logprobs is not None:
            assert choice.logprobs is not None
            check_logprobs(choice.logprobs[index], token, row, params.logprobs)
        output.append(token)
    if not aborted:
        assert choice.finish_reason == _ends(output, request, eos), (choice.finish_reason, output)


def check_logprobs(found: TokenLogprobs, token: int, logits: np.ndarray, top: int) -> None:
    """The token's own logprob and rank, then the most likely ones, of the raw distribution."""
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
    assert next(iter(found)) == token
    assert found[token].rank == 1 + int((logits > logits[token]).sum())
    best = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:top]
    assert set(found) == {token, *best}
    for other, entry in found.items():
        assert abs(entry.logprob - exact[other]) < 1e-4


def _ends(output: list[int], request: Request, eos: frozenset[int]) -> str | None:
    params: SamplingParams = request.params
    if output and len(output) >= params.min_tokens:
        if output[-1] in params.stop_token_ids:
            return "stop"
        if output[-1] in eos and not params.ignore_eos:
            return "stop"
    return "length" if len(output) >= request.max_tokens else None
