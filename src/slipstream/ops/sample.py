"""From logits to tokens: every sampling rule, the draw and the reported log-probabilities, for rows of any requests.

The order of the rules is vLLM's: masks (allowed, grammar, banned), bias, penalties, temperature, top-k, top-p, min-p,
typical-p; each filter sees the distribution that the one before has left. Filters are thresholds on values: what equals
the value at the border is kept with it, so no order of sorting matters. (Top-k compares logits before they are divided
by the temperature, which leaves their order as it is.) Probabilities are summed as whole numbers
(`slipstream.ops.fixed`), so no order of summing does either. The draw is argmax(logit / temperature + Gumbel noise).

This is the reference. No shape and no branch depends on data, so a compiler can lower it for any chip.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from slipstream.ops.fixed import ONE, exp, log_sum_exp, weights_of
from slipstream.ops.noise import gumbel
from slipstream.ops.registry import define

INFINITY = float("inf")
LARGEST = torch.finfo(torch.float32).max


class Real(IntEnum):
    """Columns of `reals`. The values that switch a rule off: top_p 1, min_p 0, typical_p 1, penalties 1, 0, 0."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    TYPICAL_P = 3
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6


class Whole(IntEnum):
    """Columns of `wholes`. Off: top_k 0, score_token -1, flags 0."""

    TOP_K = 0
    KEY0 = 1
    KEY1 = 2
    SCORE_TOKEN = 3
    ONLY_ALLOWED = 4
    USES_GRAMMAR = 5
    WANTS_LOGPROBS = 6


SampleResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(
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
    rows, vocab = logits.shape
    top = min(num_top, vocab)
    return (
        logits.new_empty((rows,), dtype=torch.int64),
        logits.new_empty((rows,), dtype=torch.float32),
        logits.new_empty((rows, top), dtype=torch.int64),
        logits.new_empty((rows, top), dtype=torch.float32),
        logits.new_empty((rows,), dtype=torch.int64),
    )


@define(
    "sample(Tensor logits, Tensor reals, Tensor wholes, Tensor penalised, Tensor bias_at, Tensor bias_value, "
    "Tensor banned, Tensor allowed, Tensor? grammar, int num_top) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
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
    """Choose a token for each of R rows over V tokens (V at most 2**22).

    logits [R, V] float32; -inf means impossible. reals [R, 7] float32 (`Real`), wholes [R, 7] int64 (`Whole`).
    Lists hold one entry a row, in any order; an entry whose row is -1 is padding:
    penalised [N, 4] int64: row, token, times in the output so far, 1 if in the prompt; one entry per row and token.
    bias_at [M, 2] int64: row, token, with bias_value [M] float32; one entry per row and token.
    banned [B, 2], allowed [A, 2] int64: row, token; `allowed` counts for rows with ONLY_ALLOWED.
    grammar [R, ceil(V / 32)] int32, bit t % 32 of word t // 32 set if token t may come; for rows with USES_GRAMMAR.

    Returns tokens [R] int64 (-1: the row has a NaN or +inf, or no token is possible), then for rows with
    WANTS_LOGPROBS, of log-softmax of the logits as given: logprob [R] float32 of the token (of SCORE_TOKEN if that is
    0 or more), top_ids [R, K] int64 and top_logprobs [R, K] float32 with K = min(num_top, V), the most likely first
    (equal ones by id), and ranks [R] int64: 1 plus the number of more likely tokens. Other rows, and failed ones, get
    NaN, -1, NaN, 0.
    """
    sound = ~(torch.isnan(logits) | (logits == INFINITY)).any(-1, keepdim=True)
    raw = torch.where(sound, logits, 0.0)
    x = _mask(raw, wholes, banned, allowed, grammar)
    x = _add_bias(x, bias_at, bias_value)
    x = _penalise(x, reals, penalised)
    best = x.amax(-1, keepdim=True)
    possible = best > -INFINITY
    temperature = reals[:, Real.TEMPERATURE, None]
    logit = _filter(x, torch.where(possible, best, 0.0), reals, wholes)
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(wholes[:, Whole.KEY0, None], wholes[:, Whole.KEY1, None], ids)
    drawn = torch.where(temperature > 0, logit + noise, x).argmax(-1)
    tokens = torch.where((sound & possible)[:, 0], drawn, -1)
    return (tokens, *_report(raw, sound[:, 0], tokens, wholes, num_top))


def _slots(entries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Index of each entry in `_flat(x)`; padding entries get the last place, which belongs to no row."""
    row, token = entries[:, 0], entries[:, 1]
    return torch.where(row >= 0, row * x.shape[1] + token, x.numel())


def _flat(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.reshape(-1), x.new_zeros(1)])


def _marks(entries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[R, V] bool, true where the list has an entry."""
    marks = torch.zeros(x.numel() + 1, dtype=torch.bool, device=x.device)
    return marks.scatter(0, _slots(entries, x), True)[:-1].view(x.shape)


def _mask(
    x: torch.Tensor, wholes: torch.Tensor, banned: torch.Tensor, allowed: torch.Tensor, grammar: torch.Tensor | None
) -> torch.Tensor:
    possible = _marks(allowed, x) | (wholes[:, Whole.ONLY_ALLOWED, None] == 0)
    possible = possible & ~_marks(banned, x)
    if grammar is not None:
        ids = torch.arange(x.shape[1], device=x.device)
        bits = (grammar[:, ids // 32] >> (ids % 32).to(torch.int32)) & 1
        possible = possible & ((bits == 1) | (wholes[:, Whole.USES_GRAMMAR, None] == 0))
    return torch.where(possible, x, -INFINITY)


def _add_bias(x: torch.Tensor, bias_at: torch.Tensor, bias_value: torch.Tensor) -> torch.Tensor:
    return _flat(x).scatter_add(0, _slots(bias_at, x), bias_value)[:-1].view(x.shape)


def _penalise(x: torch.Tensor, reals: torch.Tensor, penalised: torch.Tensor) -> torch.Tensor:
    flat, slots = _flat(x), _slots(penalised, x)
    of_row = reals[penalised[:, 0].clamp(min=0)]
    count, in_prompt = penalised[:, 2], penalised[:, 3]
    old = flat.gather(0, slots)
    repetition = torch.where((count > 0) | (in_prompt > 0), of_row[:, Real.REPETITION], 1.0)
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - of_row[:, Real.FREQUENCY] * count.to(torch.float32)
    new = new - torch.where(count > 0, of_row[:, Real.PRESENCE], 0.0)
    # An extreme penalty must neither make a token impossible nor give +inf.
    new = torch.where(old == -INFINITY, old, new.clamp(-LARGEST, LARGEST))
    return flat.scatter(0, slots, new)[:-1].view(x.shape)


def _filter(x: torch.Tensor, best: torch.Tensor, reals: torch.Tensor, wholes: torch.Tensor) -> torch.Tensor:
    """(x - best) / temperature [R, V], -inf where a filter drops the token. `best` [R, 1] is each row's largest."""
    vocab = x.shape[1]
    ordered = x.sort(-1, descending=True).values
    top_k = wholes[:, Whole.TOP_K, None]
    top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    border = ordered.gather(-1, top_k - 1)
    temperature = reals[:, Real.TEMPERATURE, None]
    temperature = torch.where(temperature > 0, temperature, 1.0)
    logit = (torch.where(x >= border, x, -INFINITY) - best) / temperature
    ordered = (torch.where(ordered >= border, ordered, -INFINITY) - best) / temperature

    top_p = reals[:, Real.TOP_P, None]
    border = _border_of_share(ordered, weights_of(ordered), top_p)
    logit = torch.where((logit >= border) | (top_p >= 1), logit, -INFINITY)

    likely = exp(logit) >= reals[:, Real.MIN_P, None]
    logit = torch.where(likely, logit, -INFINITY)

    typical_p = reals[:, Real.TYPICAL_P, None]
    weights = weights_of(logit)
    distance = _distance_from_entropy(logit, weights)
    nearest = distance.sort(-1)
    border = _border_of_share(nearest.values, weights.gather(-1, nearest.indices), typical_p)
    return torch.where((distance <= border) | (typical_p >= 1), logit, -INFINITY)


def _border_of_share(values: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The first of `values` [..., V] at which the running sum of `weights` reaches `share` [..., 1] of their total."""
    running = weights.cumsum(-1)
    wanted = (running[..., -1:].to(torch.float32) * share).to(torch.int64)
    index = (running < wanted).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    return values.gather(-1, index)


def _distance_from_entropy(logit: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """|-log p - entropy| of each token, p proportional to exp(logit); +inf where logit is -inf.

    Typical sampling: Meister et al., 2022. The normaliser cancels: the distance is that of -logit from its mean.
    """
    surprise = -logit
    parts = torch.where(weights > 0, exp(logit) * surprise, 0.0)
    moment = (parts * ONE).to(torch.int64).sum(-1, keepdim=True)
    mean = moment.to(torch.float32) / weights.sum(-1, keepdim=True).to(torch.float32)
    return (surprise - mean).abs()


def _report(
    raw: torch.Tensor, sound: torch.Tensor, tokens: torch.Tensor, wholes: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scored = wholes[:, Whole.SCORE_TOKEN]
    token = torch.where(scored >= 0, scored, tokens)[:, None]
    highest = raw.amax(-1, keepdim=True)
    shown = (wholes[:, Whole.WANTS_LOGPROBS, None] > 0) & sound[:, None] & (token >= 0) & (highest > -INFINITY)
    highest = torch.where(highest > -INFINITY, highest, 0.0)
    log_total = log_sum_exp(weights_of(raw - highest).sum(-1, keepdim=True))
    value = raw.gather(-1, token.clamp(min=0))
    logprob = torch.where(shown, (value - highest) - log_total, torch.nan)[:, 0]
    rank = torch.where(shown, 1 + (raw > value).sum(-1, keepdim=True), 0)[:, 0]
    top = min(num_top, raw.shape[1])
    likeliest = raw.sort(stable=True, dim=-1, descending=True)
    top_ids = torch.where(shown, likeliest.indices[:, :top], -1)
    top_logprobs = torch.where(shown, (likeliest.values[:, :top] - highest) - log_total, torch.nan)
    return logprob, top_ids, top_logprobs, rank
