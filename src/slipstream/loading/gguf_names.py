"""GGUF models seen through Hugging Face names: tensors here, the config in `gguf_config`.

The table of names is llama.cpp's (gguf-py/gguf/tensor_mapping.py) for the four architectures that are read. Two things
differ between the worlds beside names:

- Files of architecture `llama` (Llama, Mistral, SmolLM2) hold the rows of the query and key projections in the order
  that interleaved rotation wants: within a head, row 2i + h is row h * head_dim/2 + i of the published checkpoint,
  which rotates the two halves. `stored_order` undoes it. It moves whole rows, so it works on quantised rows too.
- Experts are stacked, [experts, out, in]; published checkpoints name each expert, and so do we.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.core.errors import LoadError
from slipstream.loading.gguf_header import GGUFTensor

# The rotation factors of a scaled rope are config, not a parameter.
ROPE_FACTORS = "rope_freqs.weight"

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class View:
    """A Hugging Face tensor inside a stored one: all of it, its slice `expert`, or its rows regrouped by `heads`."""

    stored: GGUFTensor
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int = 0

    @property
    def nbytes(self) -> int:
        """Stored bytes of this tensor alone."""
        return self.stored.nbytes if self.expert is None else self.stored.nbytes // self.stored.shape[0]


def views(tensors: Iterable[GGUFTensor], arch: str, heads: int, kv_heads: int) -> dict[str, View]:
    """Hugging Face name to view, for every tensor of a file. Raises LoadError for a tensor that has no known place."""
    out: dict[str, View] = {}
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        if tensor.name in _TOP:
            out[_TOP[tensor.name]] = View(tensor, tensor.shape)
            continue
        match = _LAYER_NAME.fullmatch(tensor.name)
        part = match[2] if match else ""
        if match and part in _LAYER:
            permuted = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0) if arch == "llama" else 0
            _check_heads(tensor, permuted)
            out[f"model.layers.{match[1]}.{_LAYER[part]}.{match[3]}"] = View(tensor, tensor.shape, heads=permuted)
        elif match and part in _EXPERTS and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                name = f"model.layers.{match[1]}.mlp.experts.{expert}.{_EXPERTS[part]}.{match[3]}"
                out[name] = View(tensor, tensor.shape[1:], expert=expert)
        else:
            raise LoadError(f"tensor {tensor.name!r} is not one that a model of architecture {arch} is known to have")
    return out


def _check_heads(tensor: GGUFTensor, heads: int) -> None:
    if heads and tensor.shape[0] % (2 * heads):
        raise LoadError(f"tensor {tensor.name!r} has {tensor.shape[0]} rows, which do not divide into {heads} heads")


def stored_order(raw: npt.NDArray[np.uint8], view: View) -> npt.NDArray[np.uint8]:
    """The view's bytes, flat, out of the stored tensor's: a slice of them, or a copy where rows are regrouped."""
    if view.expert is not None:
        return raw[view.expert * view.nbytes : (view.expert + 1) * view.nbytes]
    if not view.heads:
        return raw
    pairs = view.shape[0] // view.heads // 2
    return raw.reshape(view.heads, pairs, 2, -1).swapaxes(1, 2).copy().reshape(-1)
