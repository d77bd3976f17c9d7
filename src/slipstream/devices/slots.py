"""Which buffers of a program may share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lifetime:
    """A buffer is written first by instruction `first` and read last by `last`; `size` is bytes of a row."""

    first: int
    last: int
    size: int


def share_slots(lifetimes: Sequence[Lifetime]) -> list[int]:
    """A slot for each buffer, numbered from 0. Buffers whose lifetimes have an instruction in common never share one.

    Slots are handed out in the order of `first`; of the free ones that which fits best is taken, else the largest one
    (which grows), so that memory stays small and what was just used is used again.
    """
    slots = [0] * len(lifetimes)
    free_from: list[int] = []
    sizes: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].first, -lifetimes[i].size)):
        life = lifetimes[index]
        free = [slot for slot, begin in enumerate(free_from) if begin <= life.first]
        fitting = [slot for slot in free if sizes[slot] >= life.size]
        if fitting:
            slot = min(fitting, key=lambda each: sizes[each])
        elif free:
            slot = max(free, key=lambda each: sizes[each])
            sizes[slot] = life.size
        else:
            slot = len(free_from)
            free_from.append(0)
            sizes.append(life.size)
        free_from[slot] = life.last + 1
        slots[index] = slot
    return slots
