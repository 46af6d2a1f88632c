"""Rope tables against transformers at short and long positions (bug cases 146, 147), and their bits as golden digests.

A wrong frequency shows nothing at position 0 and everything at 16000, so every comparison reaches 16000; each has a
control: the table of unscaled rope must be far away.
"""

from __future__ import annotations

import hashlib
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from isobit.model_config import load_model_config
from isobit.rope import attention_factor, cos_sin, inverse_frequencies, rope_tables
from isobit.rope_config import RopeConfig, parse_rope
from tests.tiny import tiny_checkpoint

POSITIONS = [0, 1, 100, 1000, 8000, 16000]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
}  # fmt: skip
GOLDEN = {
    "default": "c2483e1417356d6a1558fa9678a3e96391812bd94b2140453e3690feb386574c",
    "llama3": "5cf6707bbc7ee3ac90299de24fbaf2b82eed6986a6374b76480093523f541c04",
    "yarn": "5b914d27a68f2d26bafe0845adc77a372e0e32663dd2d76154a8a3d131641899",
}


def make_rope(scaling: dict[str, Any], head_dim: int, theta: float) -> RopeConfig:
    return parse_rope({"rope_parameters": {**scaling, "rope_theta": theta}}, head_dim)


def transformers_rope(scaling: dict[str, Any], head_dim: int, theta: float) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int32).long() - b.view(torch.int32).long()).abs().max())


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (96, 500000.0), (128, 1000000.0)])
@pytest.mark.parametrize("name", SCALINGS)
def test_case_146_tables_are_those_of_transformers(name: str, head_dim: int, theta: float) -> None:
    rope, theirs = make_rope(SCALINGS[name], head_dim, theta), transformers_rope(SCALINGS[name], head_dim, theta)
    frequencies = torch.from_numpy(inverse_frequencies(rope))
    assert ulps(frequencies, theirs.inv_freq) <= 2  # pow of torch's vector library is not correctly rounded
    assert attention_factor(rope) == pytest.approx(theirs.attention_scaling, rel=1e-15)

    # With equal frequencies the tables may differ by the rounding of two cos implementations alone.
    theirs.inv_freq = frequencies
    cos, sin = theirs(torch.zeros(1, 1), torch.tensor([POSITIONS]))
    our_cos, our_sin = rope_tables(rope, 16384)
    assert our_cos.shape == (16384, head_dim // 2) and our_cos.dtype == our_sin.dtype == torch.float32
    for ours, other in ((our_cos, cos), (our_sin, sin)):
        half = other[0, :, : head_dim // 2]
        assert torch.allclose(ours[POSITIONS], half, rtol=0, atol=2.0**-22)
    if name not in ("default", "yarn-attention-factor"):
        plain, _ = rope_tables(make_rope({"rope_type": "default"}, head_dim, theta), 16384)
        assert (plain[POSITIONS] - our_cos[POSITIONS]).abs().max() > 0.5, "control: scaling changes far positions"


def test_tiny_checkpoints_reach_the_tables_with_their_own_scaling() -> None:
    kinds = {"llama": "default", "llama3": "llama3", "llama_yarn": "yarn", "llama_linear": "linear"}
    for kind, rope_type in kinds.items():
        config = load_model_config(tiny_checkpoint(kind))
        assert config.rope.rope_type == rope_type
        cos, _ = rope_tables(config.rope, 8)
        assert cos.shape == (8, config.head_dim // 2)


def test_cos_and_sin_are_correctly_rounded_over_the_whole_range() -> None:
    # float64 cos of the C library is within 1 ulp of float64, 2^-29 of a float32 ulp: it rounds to the same float32
    # unless the true value lies that close to a tie; 200000 draws meet such a tie with probability 4e-4, never moving.
    angles = np.random.default_rng(0).uniform(0, 2**20, 200_000).astype(np.float32)
    angles[:4] = (0.0, 2**20, np.float32(np.pi / 2), np.float32(np.pi))
    cos, sin = cos_sin(angles)
    exact = angles.astype(np.float64)
    assert np.array_equal(cos, np.cos(exact).astype(np.float32))
    assert np.array_equal(sin, np.sin(exact).astype(np.float32))
    turns = np.rint(exact / (2 * np.pi))  # control: pi in one float64 instead of four parts is seen
    assert not np.array_equal(cos, np.cos(exact - turns * (2 * np.pi)).astype(np.float32))


def test_a_row_does_not_depend_on_the_length_of_the_table() -> None:
    rope = make_rope(SCALINGS["yarn"], 64, 10000.0)
    long_cos, long_sin = rope_tables(rope, 9000)
    for length in (1, 4095, 4096, 4097):
        cos, sin = rope_tables(rope, length)
        assert torch.equal(cos, long_cos[:length]) and torch.equal(sin, long_sin[:length])


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bits(name: str) -> None:
    cos, sin = rope_tables(make_rope(SCALINGS[name], 64, 500000.0), 5000)
    digest = hashlib.sha256(cos.numpy().tobytes() + sin.numpy().tobytes()).hexdigest()
    assert digest == GOLDEN[name], f"rope bits of {name} changed: {digest}"


def test_powers_are_correctly_rounded() -> None:
    frequencies = inverse_frequencies(make_rope({"rope_type": "default"}, 128, 1000000.0))
    with localcontext(Context(prec=60)):
        for index, value in enumerate(frequencies):
            power = Decimal(1000000) ** (Decimal(2 * index) / 128)
            assert abs(Decimal(float(value)) * power - 1) < Decimal(2) ** -23  # two roundings of 2^-24 each


def test_too_many_positions_are_refused() -> None:
    rope = make_rope({"rope_type": "default"}, 64, 10000.0)
    for count in (0, 2**24 + 1, 2**20 + 1):
        with pytest.raises(ValueError, match="positions"):
            rope_tables(rope, count)


def test_case_147_dynamic_equals_transformers_below_the_trained_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    theirs = transformers_rope(scaling, 64, 10000.0)
    cos, sin = theirs(torch.zeros(1, 1), torch.arange(16384)[None])  # exactly the trained length: not rescaled
    our_cos, our_sin = rope_tables(make_rope(scaling, 64, 10000.0), 16384)
    assert torch.allclose(our_cos, cos[0, :, :32], rtol=0, atol=2.0**-10)  # 1 ulp of a frequency times 16384
    assert torch.allclose(our_sin, sin[0, :, :32], rtol=0, atol=2.0**-10)
    beyond, _ = theirs(torch.zeros(1, 1), torch.arange(20000)[None])
    assert (beyond[0, 100, :32] - cos[0, 100, :32]).abs().max() > 1e-2, "control: a longer text moves earlier rows"
