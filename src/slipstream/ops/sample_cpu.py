"""`slipstream::sample` on a CPU: row by row, and of each row only what it asked for.

The results are the reference's. Every row is worked on alone, so nothing of it depends on the others or on its place.
Written in numpy, which computes the same float32 and works in one thread with little to pay per call.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from slipstream.ops.fixed import ONE
from slipstream.ops.noise import FIRST, LARGEST_UNIFORM, SECOND, UNIT
from slipstream.ops.registry import implement
from slipstream.ops.sample import LARGEST, Real, SampleResult, Whole

GROUPS = 512
"""Groups into which a row is divided to find its largest values."""
HEAD = 256
"""About how many of the most likely tokens are searched for the border of top-p before everything is sorted."""
UNLIKELY = 8.0
"""How far below the best a scaled logit must be for the token to be passed over unless its hash is exceptional."""
SLACK = 0.01
"""More than the float32 error of a noise value."""

_ids: dict[int, np.ndarray] = {}


@implement("sample", "CPU")
def sample(
    logits: torch.Tensor,
    reals: torch.Tensor,
    wholes: torch.Tensor,
    penalised: torch.Tensor,
    bias_at: torch.Tensor,
    bias_value: torch.Tensor,
    banned: torch.Tensor,
    allowed: torch.Tensor,
    grammar: torch.Tensor | None,
    num_top: int,
) -> SampleResult:
    """See `slipstream.ops.sample.sample`."""
    rows, vocab = logits.shape
    top = min(num_top, vocab)
    tokens = np.empty(rows, np.int64)
    logprob = np.full(rows, np.nan, np.float32)
    top_ids = np.full((rows, top), -1, np.int64)
    top_logprobs = np.full((rows, top), np.nan, np.float32)
    rank = np.zeros(rows, np.int64)
    edits = _Edits(penalised, bias_at, bias_value, banned, allowed, grammar)
    values = logits.detach().contiguous().numpy()
    with np.errstate(over="ignore"):  # of extreme logits: -inf is what such a token gets
        for row, (whole, real) in enumerate(zip(wholes.tolist(), reals.numpy(), strict=True)):
            x = edits.apply(row, values[row], whole, real)
            tokens[row] = _draw(values[row], x, whole, real)
            if whole[Whole.WANTS_LOGPROBS]:
                scored = whole[Whole.SCORE_TOKEN]
                report = _report(values[row], scored if scored >= 0 else int(tokens[row]), top)
                if report is not None:
                    logprob[row], top_ids[row], top_logprobs[row], rank[row] = report
    outputs = (tokens, logprob, top_ids, top_logprobs, rank)
    return tuple(torch.from_numpy(output) for output in outputs)  # type: ignore[return-value]


class _Edits:
    """The lists of one call, looked at only where a row has entries."""

    def __init__(
        self,
        penalised: torch.Tensor,
        bias_at: torch.Tensor,
        bias_value: torch.Tensor,
        banned: torch.Tensor,
        allowed: torch.Tensor,
        grammar: torch.Tensor | None,
    ) -> None:
        self.penalised = penalised.numpy()
        self.bias_at = bias_at.numpy()
        self.bias_value = bias_value.numpy()
        self.banned = banned.numpy()
        self.allowed = allowed.numpy()
        self.grammar = None if grammar is None else grammar.numpy()
        self.any = bool(len(self.penalised) or len(self.bias_at) or len(self.banned))

    def apply(self, row: int, x: np.ndarray, whole: list[int], real: np.ndarray) -> np.ndarray:
        """`x` [V] after masks, bias and penalties: a changed copy, or `x` itself where nothing was asked for."""
        masked = whole[Whole.ONLY_ALLOWED] or (whole[Whole.USES_GRAMMAR] and self.grammar is not None)
        if not (masked or self.any):
            return x
        banned = self.banned[self.banned[:, 0] == row, 1]
        biased = np.flatnonzero(self.bias_at[:, 0] == row)
        penalised = self.penalised[self.penalised[:, 0] == row]
        if not (masked or len(banned) or len(biased) or len(penalised)):
            return x
        if whole[Whole.ONLY_ALLOWED]:
            ids = self.allowed[self.allowed[:, 0] == row, 1]
            only = np.full_like(x, -np.inf)
            only[ids] = x[ids]
            x = only
        else:
            x = x.copy()
        if whole[Whole.USES_GRAMMAR] and self.grammar is not None:
            bits = np.unpackbits(self.grammar[row].view(np.uint8), bitorder="little", count=len(x))
            x[bits == 0] = -np.inf
        x[banned] = -np.inf
        x[self.bias_at[biased, 1]] += self.bias_value[biased]
        if len(penalised):
            _penalise(x, penalised, real)
        return x


def _penalise(x: np.ndarray, entries: np.ndarray, real: np.ndarray) -> None:
    token, count, in_prompt = entries[:, 1], entries[:, 2], entries[:, 3]
    old = x[token]
    repetition = np.where((count > 0) | (in_prompt > 0), real[Real.REPETITION], np.float32(1))
    new = np.where(old > 0, old / repetition, old * repetition)
    new -= real[Real.FREQUENCY] * count.astype(np.float32)
    new -= np.where(count > 0, real[Real.PRESENCE], np.float32(0))
    x[token] = np.where(np.isneginf(old), old, new.clip(-LARGEST, LARGEST))


def _draw(raw: np.ndarray, x: np.ndarray, whole: list[int], real: np.ndarray) -> int:
    """The token of a row whose logits are `raw` as given and `x` after the edits; -1 if there is none."""
    likeliest = int(x.argmax())
    best = x[likeliest]
    # argmax finds a NaN first, then +inf; an edit can have hidden one of the logits as given.
    if not np.isfinite(best) or (x is not raw and not raw.max() < np.inf):
        return -1
    if not real[Real.TEMPERATURE] > 0:
        return likeliest
    ids, logit = _filter(x, best, whole, real)
    if ids is None:
        return _draw_from_all(logit, likeliest, whole)
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[_scores(logit, _hash(ids, whole)).argmax()])


def _draw_from_all(logit: np.ndarray, likeliest: int, whole: list[int]) -> int:
    """argmax of logit plus noise over all tokens, with the logarithms only where the winner can be.

    Noise falls as the hash rises. A token `UNLIKELY` below the best can win only with noise above the best one's score
    plus `UNLIKELY`, so only with a hash below a bound that few reach.
    """
    vocab = len(logit)
    if vocab not in _ids:
        _ids[vocab] = np.arange(vocab, dtype=np.uint32)
    hashed = _hash(_ids[vocab], whole)
    score_of_likeliest = -math.log(-math.log1p(-(float(hashed[likeliest]) + 0.5) * UNIT))
    needed = score_of_likeliest + UNLIKELY - SLACK
    bound = np.uint32(-math.expm1(-math.exp(-needed)) * (2**32 - 1))
    places = np.flatnonzero((logit >= -UNLIKELY) | (hashed <= bound))
    return int(places[_scores(logit[places], hashed[places]).argmax()])


def _hash(ids: np.ndarray, whole: list[int]) -> np.ndarray:
    """`slipstream.ops.noise.token_hash` of `ids` in uint32."""
    x = ids.astype(np.uint32) + np.uint32(whole[Whole.KEY0])
    shifted = np.empty_like(x)
    for key in (0, whole[Whole.KEY1]):
        if key:
            x ^= np.uint32(key)
        x ^= np.right_shift(x, 16, out=shifted)
        x *= np.uint32(FIRST)
        x ^= np.right_shift(x, 15, out=shifted)
        x *= np.uint32(SECOND)
        x ^= np.right_shift(x, 15, out=shifted)
    return x


def _scores(logit: np.ndarray, hashed: np.ndarray) -> np.ndarray:
    """Logits plus `slipstream.ops.noise.gumbel_of_hash`, float32."""
    uniform = np.minimum((hashed.astype(np.float32) + np.float32(0.5)) * np.float32(UNIT), np.float32(LARGEST_UNIFORM))
    scores: np.ndarray = logit - np.log(-np.log1p(-uniform))
    return scores


def _filter(
    x: np.ndarray, best: np.float32, whole: list[int], real: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """The ids that the filters leave, ascending (None: all), and their (x - best) / temperature."""
    ids = _most_likely(x, whole[Whole.TOP_K]) if 0 < whole[Whole.TOP_K] < len(x) else None
    logit = ((x if ids is None else x[ids]) - best) / real[Real.TEMPERATURE]

    def keep(kept: np.ndarray) -> None:
        nonlocal ids, logit
        places = np.flatnonzero(kept)
        ids = places if ids is None else ids[places]
        logit = logit[places]

    if real[Real.TOP_P] < 1:
        keep(logit >= _border_of_top_p(logit, real[Real.TOP_P]))
    if real[Real.MIN_P] > 0:
        keep(np.exp(logit) >= real[Real.MIN_P])
    if real[Real.TYPICAL_P] < 1:
        weights = _weights(logit)
        distance = _distance_from_entropy(logit, weights)
        order = distance.argsort()
        running = weights[order].cumsum()
        keep(distance <= distance[order[_reaches(running, running[-1], real[Real.TYPICAL_P])]])
    return ids, logit


def _weights(logit: np.ndarray) -> np.ndarray:
    """`slipstream.ops.fixed.weights_of`, int64."""
    weights: np.ndarray = (np.exp(logit) * np.float32(ONE)).astype(np.int64)
    return weights


def _distance_from_entropy(logit: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """As in `slipstream.ops.sample`."""
    surprise = -logit
    heavy = weights > 0
    parts = np.exp(logit[heavy]) * surprise[heavy]
    moment = (parts * np.float32(ONE)).astype(np.int64).sum()
    distance: np.ndarray = np.abs(surprise - moment.astype(np.float32) / weights.sum().astype(np.float32))
    return distance


def _reaches(running: np.ndarray, total: np.int64, share: np.float32) -> int:
    """The first place at which the running sum reaches `share` of `total`; the length if it never does."""
    wanted = (total.astype(np.float32) * share).astype(np.int64)
    return min(int(np.searchsorted(running, wanted)), len(running) - int(running[-1] >= total))


def _reached_by(x: np.ndarray, count: int) -> np.float32:
    """A value that at least `count` of `x` reach, and not many more if they are spread evenly.

    That of `count` groups' maxima; a quicker look at `x` than to select from all of it.
    """
    deep = len(x) // GROUPS
    maxima = x[: deep * GROUPS].reshape(deep, GROUPS).max(axis=0)
    reached: np.float32 = np.partition(maxima, GROUPS - count)[GROUPS - count]
    return reached


def _most_likely(x: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest of `x` and of those equal to the last of them, ascending."""
    ids: np.ndarray
    if len(x) < 4 * GROUPS or count > HEAD:
        ids = np.flatnonzero(x >= np.partition(x, len(x) - count)[len(x) - count])
        return ids
    ids = np.flatnonzero(x >= _reached_by(x, count))
    some = x[ids]
    ids = ids[some >= np.partition(some, len(some) - count)[len(some) - count]]
    return ids


def _border_of_top_p(logit: np.ndarray, share: np.float32) -> np.float32:
    """The logit of the least likely token to keep."""
    total: np.int64 | None = None
    head = logit
    if len(logit) >= 4 * GROUPS:
        total = _weights(logit).sum()
        head = logit[logit >= _reached_by(logit, HEAD)]
    for likeliest in (head, logit):
        ordered = np.sort(likeliest)[::-1].copy()
        running = _weights(ordered).cumsum()
        place = _reaches(running, running[-1] if total is None else total, share)
        if place < len(ordered):
            border: np.float32 = ordered[place]
            return border
    raise AssertionError("the running sum over all tokens reaches its total")


def _report(raw: np.ndarray, token: int, top: int) -> tuple[np.float32, np.ndarray, np.ndarray, int] | None:
    """(logprob, top ids, top logprobs, rank) of a row; None if it has no distribution or no token."""
    highest = raw.max()
    if token < 0 or not np.isfinite(highest):
        return None
    log_total = np.float32(math.log(_weights(raw - highest).sum().astype(np.float32) / ONE))
    value = raw[token]
    rank = 1 + int(np.count_nonzero(raw > value))
    ids = np.empty(0, np.int64)
    if top:
        ids = _most_likely(raw, top)
        ids = ids[np.argsort(-raw[ids], kind="stable")][:top]
    return (value - highest) - log_total, ids, (raw[ids] - highest) - log_total, rank
