"""Filling a model's parameters from a checkpoint, with every misfit reported by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.core.errors import LoadError
from slipstream.models.base import CheckpointModel, Slot

SHOWN = 6


class TensorSource(Protocol):
    """What of a checkpoint is needed here; see `slipstream.loading.checkpoint.Checkpoint`."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def check_names(model: CheckpointModel, source: TensorSource) -> dict[str, Slot]:
    """The model's table, if the checkpoint has exactly its tensors in their shapes; else LoadError naming misfits."""
    table = model.checkpoint_table()
    present = set(source.names())
    if missing := set(table) - present:
        raise LoadError(f"the checkpoint lacks tensors that the model needs: {_list(missing)}")
    if left_over := {name for name in present - set(table) if not model.ignored(name)}:
        raise LoadError(f"the checkpoint has tensors that the model has no place for: {_list(left_over)}")
    parameters = dict(model.named_parameters())
    for name, slot in table.items():
        wanted = tuple(parameters[slot.parameter].shape[0 if slot.index is None else 1 :])
        if source.shape(name) != wanted:
            raise LoadError(f"tensor {name} has shape {list(source.shape(name))} where the model needs {list(wanted)}")
    return table


def load_weights(
    model: CheckpointModel,
    source: TensorSource,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put the checkpoint's tensors into the model, in `dtype`.

    A tensor that has that dtype already is used in place (from the file's map); others are converted once. Stacked
    parameters (experts) are filled entry by entry. `progress` gets tensors done and in all.
    """
    table = check_names(model, source)
    parameters = dict(model.named_parameters())
    stacked: dict[str, Tensor] = {}
    for done, (name, slot) in enumerate(table.items()):
        tensor = source.tensor(name)
        if slot.index is None:
            _set(model, slot.parameter, tensor.to(dtype))
        else:
            if slot.parameter not in stacked:
                stacked[slot.parameter] = torch.empty(parameters[slot.parameter].shape, dtype=dtype)
            stacked[slot.parameter][slot.index] = tensor
        if progress is not None:
            progress(done + 1, len(table))
    for parameter, tensor in stacked.items():
        _set(model, parameter, tensor)


def _set(model: nn.Module, path: str, tensor: Tensor) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
