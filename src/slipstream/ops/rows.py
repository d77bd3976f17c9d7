"""The rows of a step as tensors: what a model's forward pass is given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """R rows of a step. All int64; sequence 0, page 0 and state slot 0 are scratch, where padding rows live.

    token, position, sequence, slot (cache row to write), state_in, state_out (-1: keep none): [R];
    page_table [S, pages], context_len [S].
    """

    token: Tensor
    position: Tensor
    sequence: Tensor
    slot: Tensor
    state_in: Tensor
    state_out: Tensor
    page_table: Tensor
    context_len: Tensor
