"""The decoder that the Llama-like families share: what differs between them is a `DecoderConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from slipstream import ops
from slipstream.cache.spec import CacheSpec
from slipstream.core.errors import LoadError
from slipstream.layers.attention import Attention
from slipstream.layers.basic import Embedding, Linear, RMSNorm
from slipstream.layers.feed_forward import MixtureOfExperts, SwiGLU
from slipstream.layers.rope import RopeConfig, rope_frequencies
from slipstream.models.base import CheckpointModel, Slot
from slipstream.ops.rows import Rows


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture-of-experts settings of a layer."""

    experts: int
    top_k: int
    intermediate: int
    renormalise: bool


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What one layer may have of its own: its attention window (0: none) and experts in place of one SwiGLU."""

    window: int = 0
    experts: ExpertConfig | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Widths and switches of a pre-norm decoder."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise LoadError(f"config: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly")


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: DecoderConfig, own: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            head_norm_eps=config.eps if config.head_norm else None,
            window=own.window,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp: SwiGLU | MixtureOfExperts
        if own.experts is None:
            self.mlp = SwiGLU(config.hidden, config.intermediate, config.mlp_bias)
        else:
            e = own.experts
            self.mlp = MixtureOfExperts(config.hidden, e.intermediate, e.experts, e.top_k, e.renormalise)

    def forward(self, x: Tensor, table: Tensor, rows: Rows, cache: Tensor) -> tuple[Tensor, Tensor]:
        mixed, cache = self.self_attn.forward(self.input_layernorm.forward(x), table, rows, cache)
        x = x + mixed
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x)), cache


class Decoder(CheckpointModel):
    """Embedding, layers, norm and head."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab
        self.max_position = config.rope.longest
        self.embed_tokens = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, own) for own in config.layers)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = None if config.tied else Linear(config.hidden, config.vocab)
        inv_freq, self.rope_scale = rope_frequencies(config.rope)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def cache_specs(self) -> list[CacheSpec]:
        return [layer.self_attn.cache_spec() for layer in self._layers()]

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        """Token ids in `rows` -> hidden states [R, hidden] after the last norm."""
        table = ops.rope_table(rows.position, self.inv_freq, self.rope_scale)
        x = self.embed_tokens.forward(rows.token)
        for index, layer in enumerate(self.layers):
            x, caches[index] = layer.forward(x, table, rows, caches[index])
        return self.norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, vocab] in float32."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return ops.linear(hidden, weight).float()

    def checkpoint_table(self) -> dict[str, Slot]:
        table: dict[str, Slot] = {}
        for name, parameter in self.named_parameters():
            layer, _, leaf = name.rpartition(".mlp.")
            if leaf == "router":
                table[f"model.{layer}.mlp.gate.weight"] = Slot(name)
            elif leaf in ("gate", "up", "down"):
                for index in range(parameter.shape[0]):
                    table[f"model.{layer}.mlp.experts.{index}.{leaf}_proj.weight"] = Slot(name, index)
            else:
                table[name if name.startswith("lm_head") else f"model.{name}"] = Slot(name)
        return table

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or (self.lm_head is None and name == "lm_head.weight")
