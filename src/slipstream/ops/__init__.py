"""Operators `slipstream::*`: plain PyTorch references for every device, and what single chips run instead.

Shapes use R rows, S sequences, H query heads, G key/value heads, D head width, P pages, T tokens in a page.
"""

from slipstream.ops import attention_cpu, linear_cpu, moe_cpu, sample_cpu  # noqa: F401  (registers what the CPU runs)
from slipstream.ops.attention import paged_attention
from slipstream.ops.cache import write_kv
from slipstream.ops.linear import embedding, linear
from slipstream.ops.mlp import silu_mul
from slipstream.ops.moe import moe
from slipstream.ops.norm import rms_norm
from slipstream.ops.registry import OPS, Op
from slipstream.ops.rope import rope, rope_table
from slipstream.ops.sample import sample

__all__ = [
    "OPS",
    "Op",
    "embedding",
    "linear",
    "moe",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_table",
    "sample",
    "silu_mul",
    "write_kv",
]
