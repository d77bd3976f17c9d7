"""Every op, on every kind of device of this machine: against its reference, its fake, and rows alone.

Inputs come from `cases.py`; an op without cases there fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import ATTENTION, CASES, ROWS, Case, attention_arguments, cases_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.ops import OPS

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ALL = [pytest.param(op, index, id=f"{op}-{case.name}") for op in CASES for index, case in enumerate(cases_of(op))]
ROW_WISE = [pytest.param(op, i, id=f"{op}-{c.name}") for op in CASES for i, c in enumerate(cases_of(op)) if c.rows]


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(OPS)
    for op in OPS:
        assert len(cases_of(op)) >= 3, op


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small ops gain nothing from threads, and lose much where other processes hold the cores."""
    with threads(1):
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def get(op: str, index: int, seed: int = 0) -> Case:
    return cases_of(op, seed)[index]


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def on(device: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if not wanted.is_floating_point() or not wanted.numel():
        assert torch.equal(found, wanted)
        return
    assert torch.equal(found.isnan(), wanted.isnan())
    difference = (found.double() - wanted.double()).nan_to_num(0.0).abs().max()
    assert difference <= tolerance * wanted.double().nan_to_num(0.0).abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "index"), ALL)
def test_device_gives_what_the_reference_gives(op: str, index: int, device: str) -> None:
    case = get(op, index)
    wanted = OPS[op].reference(*copied(case.arguments))
    found = OPS[op].call(*on(device, copied(case.arguments)))
    for mine, right in zip(tensors(found), tensors(wanted), strict=True):
        assert_close(mine.cpu(), right, case.tolerance)


@pytest.mark.parametrize(("op", "index"), ALL)
def test_reference_runs_what_is_registered_without_a_chip_of_its_own(op: str, index: int) -> None:
    """The kernel that other devices fall back on is the reference itself."""
    case = get(op, index)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    fallback = getattr(torch.ops.slipstream, op).default.redispatch(keys, *copied(case.arguments))
    wanted = OPS[op].reference(*copied(case.arguments))
    for mine, right in zip(tensors(fallback), tensors(wanted), strict=True):
        assert torch.equal(mine.nan_to_num(0.0), right.nan_to_num(0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "index"), ALL)
def test_fake_describes_the_result(op: str, index: int, device: str) -> None:
    arguments = on(device, get(op, index).arguments)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        fakes = tensors(OPS[op].call(*faked))
    for fake, real in zip(fakes, tensors(OPS[op].call(*copied(arguments))), strict=True):
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert fake.stride() == real.stride() or not real.numel()


@pytest.mark.parametrize("op", OPS)
def test_arguments_are_left_alone_but_for_those_the_schema_names(op: str) -> None:
    for case in cases_of(op):
        torch.library.opcheck(OPS[op].call, copied(case.arguments), test_utils=("test_schema",))


def call_rows(op: str, case: Case, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The results with rows first."""
    results = tensors(OPS[op].call(*arguments))
    return [result.movedim(case.out_rows, 0).contiguous() for result in results]


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, right in zip(found, wanted, strict=True):
        if mine.dtype == torch.bfloat16:
            mine, right = mine.view(torch.int16), right.view(torch.int16)
        assert mine.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()


def pick_rows(case: Case, order: Tensor) -> tuple[Any, ...]:
    """The arguments with rows in another order (or some of them several times)."""
    return tuple(a.index_select(case.rows[i], order) if i in case.rows else a for i, a in enumerate(case.arguments))


@pytest.mark.parametrize(("op", "index"), ROW_WISE)
def test_place_of_a_row_does_not_matter(op: str, index: int) -> None:
    case = get(op, index)
    plain = call_rows(op, case, case.arguments)
    for seed in range(3):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        moved = call_rows(op, case, pick_rows(case, order))
        assert_same_bits(moved, [result[order] for result in plain])


@pytest.mark.parametrize(("op", "index"), ROW_WISE)
def test_company_of_a_row_does_not_matter(op: str, index: int) -> None:
    """Some rows stay; the others become copies of one row, or rows of entirely other values."""
    case, other = get(op, index), get(op, index, seed=1)
    plain = call_rows(op, case, case.arguments)
    for stay in ([0], [15], [3, 4, 11], [1, 6, 7, 8, 14]):
        order = torch.full((ROWS,), stay[-1])
        order[stay] = torch.tensor(stay)
        alone = call_rows(op, case, pick_rows(case, order))
        assert_same_bits([result[stay] for result in alone], [result[stay] for result in plain])
        mixed = list(case.arguments)
        for argument, dimension in case.rows.items():
            mixed[argument] = other.arguments[argument].clone().movedim(dimension, 0)
            mixed[argument][stay] = case.arguments[argument].movedim(dimension, 0)[stay]
            mixed[argument] = mixed[argument].movedim(0, dimension).contiguous()
        among = call_rows(op, case, tuple(mixed))
        assert_same_bits([result[stay] for result in among], [result[stay] for result in plain])


@pytest.mark.parametrize(("op", "index"), ROW_WISE)
def test_number_of_threads_does_not_matter(op: str, index: int) -> None:
    case = get(op, index)
    with threads(1):
        one = call_rows(op, case, case.arguments)
    with threads(2):
        two = call_rows(op, case, case.arguments)
    assert_same_bits(one, two)


def naive_attention(arguments: tuple[Any, ...]) -> Tensor:
    """Softmax attention row by row in float64, over keys and values gathered one position at a time."""
    query, cache, table, sequence, position, scale, window = arguments
    tokens, per_group = cache.shape[3], query.shape[1] // cache.shape[1]
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        last = int(position[row])
        seen = range(max(0, last - window + 1) if window else 0, last + 1)
        held = [cache[table[sequence[row], at // tokens], :, :, at % tokens] for at in seen]
        keys, values = torch.stack(held).double().repeat_interleave(per_group, dim=1).unbind(2)
        scores = torch.einsum("hd,thd->ht", query[row].double(), keys) * scale
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return out


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_softmax_in_float64(name: str) -> None:
    arguments = attention_arguments(ATTENTION[name], torch.Generator().manual_seed(3))
    wanted = naive_attention(arguments)
    tolerance = 1e-6 if arguments[0].dtype == torch.float32 else 4e-3
    for attention in (OPS["paged_attention"].call, OPS["paged_attention"].reference):
        difference = (attention(*arguments).double() - wanted).abs().max()
        assert difference <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_reads_nothing_that_a_row_may_not_see(name: str) -> None:
    """Later positions and pages of others hold any finite value: the result keeps its bits."""
    query, cache, table, sequence, position, scale, window = attention_arguments(
        ATTENTION[name], torch.Generator().manual_seed(4)
    )
    tokens, plain = cache.shape[3], OPS["paged_attention"].call(query, cache, table, sequence, position, scale, window)
    for row in (0, 3, 14):
        last = int(position[row])
        seen = range(max(0, last - window + 1) if window else 0, last + 1)
        changed = torch.full_like(cache, 3e4)
        for at in seen:
            page = table[sequence[row], at // tokens]
            changed[page, :, :, at % tokens] = cache[page, :, :, at % tokens]
        found = OPS["paged_attention"].call(query, changed, table, sequence, position, scale, window)
        assert torch.equal(found[row], plain[row])


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_not_harmed_by_what_a_failed_request_left(name: str) -> None:
    """Places that no row sees hold NaN or infinity: every row keeps its bits."""
    query, cache, table, sequence, position, scale, window = attention_arguments(
        ATTENTION[name], torch.Generator().manual_seed(5)
    )
    tokens, seen = cache.shape[3], torch.zeros(cache.shape[0], cache.shape[3], dtype=torch.bool)
    for owner, last in zip(sequence.tolist(), position.tolist(), strict=True):
        for at in range(max(0, last - window + 1) if window else 0, last + 1):
            seen[table[owner, at // tokens], at % tokens] = True
    for attention in (OPS["paged_attention"].call, OPS["paged_attention"].reference):
        plain = attention(query, cache, table, sequence, position, scale, window)
        for left in (float("nan"), float("inf"), float("-inf")):
            spoilt = torch.where(seen[:, None, None, :, None], cache, left)
            assert torch.equal(attention(query, spoilt, table, sequence, position, scale, window), plain)


def test_write_kv_writes_its_slots_and_returns_the_cache() -> None:
    for case in cases_of("write_kv"):
        cache, key, value, slot = copied(case.arguments)
        before, tokens = cache.clone(), cache.shape[3]
        assert OPS["write_kv"].call(cache, key, value, slot) is cache
        for row, at in enumerate(slot.tolist()):
            place = (at // tokens, slice(None), slice(None), at % tokens)
            assert torch.equal(cache[place], torch.stack((key[row], value[row]), dim=1).to(cache.dtype))
            before[place] = cache[place]
        assert torch.equal(cache, before)
