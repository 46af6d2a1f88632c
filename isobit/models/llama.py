"""Llama (Touvron et al. 2023; Llama 3 model card), also SmolLM2: RMSNorm, rotary positions, GQA, SwiGLU.

Reads weights by their Hugging Face names, declares every tensor it needs with its shape, and calls ops in order. It
does not know requests, pages or batching, and adds no numbers itself.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

from isobit.kernels.interface import AttentionShape, HeadNorms, RopeTables
from isobit.kv_cache import KVCache
from isobit.layers import Attention, GatedMLP, RMSNorm
from isobit.model_config import ModelConfig
from isobit.ops import AttentionInputs, Linear, Ops
from isobit.weights import WeightSource


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the residual stream is float32."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp

    def __call__(self, x_MD: torch.Tensor, inputs: AttentionInputs, kv_layer: torch.Tensor) -> torch.Tensor:
        x_MD = self.attention(self.input_norm(x_MD), inputs, kv_layer, x_MD)
        return self.mlp(self.post_norm(x_MD), x_MD)


class LlamaForCausalLM:
    """A decoder-only model on the ops; variants override the capability flags or `expected_weights`."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource, rope: RopeTables) -> None:
        weights.check_complete(self.expected_weights(config))
        self.config = config
        self.ops = ops
        self.rope = rope
        self.shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.embedding = ops.make_linear("linear.lm_head", [weights.get("model.embed_tokens.weight")])
        self.lm_head = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = ops.make_linear("linear.lm_head", [weights.get("lm_head.weight")])
        layers = tqdm(range(config.num_layers), desc="loading layers", leave=False, disable=None)
        self.layers = [self._build_layer(weights, f"model.layers.{index}.") for index in layers]
        self.norm = RMSNorm(ops, weights.get("model.norm.weight"), config.rms_norm_eps)

    @staticmethod
    def expected_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by Hugging Face name, with its shape."""
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
        projections = {
            "self_attn.q_proj": (heads, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv_heads, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv_heads, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, heads, config.o_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            for name, (n, k, has_bias) in projections.items():
                shapes[f"{prefix}{name}.weight"] = (n, k)
                if has_bias:
                    shapes[f"{prefix}{name}.bias"] = (n,)
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            if config.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
        return shapes

    def _build_layer(self, weights: WeightSource, prefix: str) -> DecoderLayer:
        config, ops = self.config, self.ops
        attention = prefix + "self_attn."
        qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
        gate_up = [prefix + "mlp." + name for name in ("gate_proj", "up_proj")]
        head_norms = None
        if config.qk_norm:
            q_norm, k_norm = (ops.parameter(weights.get(f"{attention}{name}_norm.weight")) for name in "qk")
            head_norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)
        return DecoderLayer(
            RMSNorm(ops, weights.get(prefix + "input_layernorm.weight"), config.rms_norm_eps),
            Attention(
                ops,
                self.shape,
                self._stack(weights, "linear.qkv", qkv, config.qkv_bias),
                self._stack(weights, "linear.o", [attention + "o_proj"], config.o_bias),
                self.rope,
                head_norms,
            ),
            RMSNorm(ops, weights.get(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps),
            GatedMLP(
                ops,
                self._stack(weights, "linear.gate_up", gate_up, config.mlp_bias),
                self._stack(weights, "linear.down", [prefix + "mlp.down_proj"], config.mlp_bias),
            ),
        )

    def _stack(self, weights: WeightSource, order_name: str, names: list[str], has_bias: bool) -> Linear:
        """One packed linear of several projections laid one after the other along N."""
        biases = [weights.get(name + ".bias") for name in names] if has_bias else None
        return self.ops.make_linear(order_name, [weights.get(name + ".weight") for name in names], biases)

    def forward(self, token_ids: torch.Tensor, inputs: AttentionInputs, kv_cache: KVCache) -> torch.Tensor:
        """token_ids int32 [M] -> residual stream after the last layer, float32 [M, D]; writes the KV cache."""
        x_MD = self.ops.embedding(self.embedding, token_ids)
        for layer, kv_layer in zip(self.layers, kv_cache.layers, strict=True):
            x_MD = layer(x_MD, inputs, kv_layer)
        return x_MD

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Residual rows float32 [R, D] -> logits float32 [R, V]."""
        return self.ops.linear(self.norm(x_RD), self.lm_head)
