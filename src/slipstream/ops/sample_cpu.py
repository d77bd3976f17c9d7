"""`slipstream::sample` on a CPU: row by row, and of each row only what it asked for.

The results are the reference's. Every row is worked on alone, so nothing of it depends on the others or on its place.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.ops.fixed import in_pieces, log_sum_exp, weights_of
from slipstream.ops.noise import FIRST, SECOND, gumbel_of_hash
from slipstream.ops.registry import implement
from slipstream.ops.sample import LARGEST, Real, SampleResult, Whole, border_of_share, distance_from_entropy

HEAD = 256
"""Most likely tokens among which the border of top-p is looked for before everything is sorted."""

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
    for row, (whole, real) in enumerate(zip(wholes.tolist(), reals.numpy(), strict=True)):
        x = edits.apply(row, values[row], whole, real)
        tokens[row] = _draw(values[row], x, whole, real)
        if whole[Whole.WANTS_LOGPROBS]:
            scored = whole[Whole.SCORE_TOKEN]
            token = scored if scored >= 0 else int(tokens[row])
            report = _report(values[row], token, top)
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
    with np.errstate(over="ignore"):
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
    with np.errstate(over="ignore"):
        logit = torch.from_numpy((x - best) / real[Real.TEMPERATURE])
    ids, logit = _filter(logit, whole, real)
    if ids is not None and len(ids) == 1:
        return int(ids[0])
    score = logit + gumbel_of_hash(torch.from_numpy(_hash(ids, len(x), whole)))
    place = int(score.numpy().argmax())
    return place if ids is None else int(ids[place])


def _hash(ids: np.ndarray | None, vocab: int, whole: list[int]) -> np.ndarray:
    """`slipstream.ops.noise.token_hash` in 32-bit arithmetic, as float32. `ids` None: all tokens."""
    if ids is None:
        if vocab not in _ids:
            _ids[vocab] = np.arange(vocab, dtype=np.uint32)
        x = _ids[vocab] + np.uint32(whole[Whole.KEY0])
    else:
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
    return x.astype(np.float32)


def _filter(logit: torch.Tensor, whole: list[int], real: np.ndarray) -> tuple[np.ndarray | None, torch.Tensor]:
    """The ids that the filters leave, ascending (None: all), and their logits."""
    ids: np.ndarray | None = None

    def keep(kept: torch.Tensor) -> None:
        nonlocal ids, logit
        places = np.flatnonzero(kept.numpy())
        ids = places if ids is None else ids[places]
        logit = torch.from_numpy(logit.numpy()[places])

    if 0 < whole[Whole.TOP_K] < len(logit):
        keep(logit >= logit.topk(whole[Whole.TOP_K]).values[-1])
    if real[Real.TOP_P] < 1:
        keep(logit >= _border_of_top_p(logit, torch.from_numpy(real[Real.TOP_P : Real.TOP_P + 1])))
    if real[Real.MIN_P] > 0:
        keep(in_pieces(torch.exp, logit) >= float(real[Real.MIN_P]))
    if real[Real.TYPICAL_P] < 1:
        weights = weights_of(logit)
        distance = distance_from_entropy(logit, weights)
        nearest = distance.sort()
        share = torch.from_numpy(real[Real.TYPICAL_P : Real.TYPICAL_P + 1])
        keep(distance <= border_of_share(nearest.values, weights[nearest.indices], share))
    return ids, logit


def _border_of_top_p(logit: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The value of the least likely token to keep, [1]."""
    if len(logit) > 2 * HEAD:
        total = weights_of(logit).sum()
        wanted = (total.to(torch.float32) * share).to(torch.int64)
        head = logit.topk(HEAD).values
        running = weights_of(head).cumsum(0)
        if running[-1] >= wanted:
            return head[(running < wanted).sum()]
    ordered = logit.sort(descending=True).values
    return border_of_share(ordered, weights_of(ordered), share)


def _report(raw: np.ndarray, token: int, top: int) -> tuple[np.float32, np.ndarray, np.ndarray, int] | None:
    """(logprob, top ids, top logprobs, rank) of a row; None if it has no distribution or no token."""
    highest = raw.max()
    if token < 0 or not np.isfinite(highest):
        return None
    shifted = torch.from_numpy(raw - highest)
    log_total = log_sum_exp(weights_of(shifted).sum(-1, keepdim=True)).numpy()[0]
    value = raw[token]
    rank = 1 + int(np.count_nonzero(raw > value))
    ids = np.empty(0, np.int64)
    if top:
        border = torch.from_numpy(raw).topk(top).values[-1].numpy()
        ids = np.flatnonzero(raw >= border)
        ids = ids[np.argsort(-raw[ids], kind="stable")][:top]
    return (value - highest) - log_total, ids, (raw[ids] - highest) - log_total, rank
