"""Orders and fingerprints: readable without torch, refused with a reason, equal exactly when the bits promise to be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from isobit import order
from isobit.model_config import ModelConfig, RopeConfig
from isobit.order import (
    AttentionOrder,
    LinearOrder,
    LogprobsOrder,
    NormOrder,
    Order,
    PointwiseOrder,
    SamplingOrder,
    attention_order,
    fingerprint,
    linear_order,
    mma_attention_order,
    mma_linear_order,
    model_orders,
)

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig("default", 10000.0, 16),
    max_position_embeddings=512,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
ORDERS = model_orders(CONFIG, "bfloat16", "bfloat16", "bfloat16", "cpu")
BASE = fingerprint("digest", ORDERS, "cpu")

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError("this test forbids " + name)
sys.meta_path.insert(0, Refuse())
import runpy
sys.argv[:] = ["isobit.order", *sys.argv[1:]]
if sys.argv[1:] == ["control"]:
    import torch
runpy.run_module("isobit.order", run_name="__main__")
"""


def run_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)


def test_table_is_printed_without_torch() -> None:
    result = run_without_torch("smollm2")
    assert result.returncode == 0, result.stderr
    table = result.stdout
    for name in ("linear.qkv", "linear.lm_head", "attention", "norm.hidden", "pointwise", "logprobs", "sampling"):
        assert f"\n{name} " in table
    assert "k_block=512, pairing='odd-even'" in table
    for kind in (LinearOrder, AttentionOrder, NormOrder, LogprobsOrder, PointwiseOrder, SamplingOrder):
        assert f"\n{kind.__name__}: " in table  # each with its sentence of arithmetic
    other = run_without_torch("smollm2", "--weight-dtype", "float32", "--activation-dtype", "float32")
    assert "k_block=256, pairing='ascending'" in other.stdout


def test_torch_was_really_forbidden() -> None:
    control = run_without_torch("control")
    assert control.returncode != 0 and "this test forbids torch" in control.stderr


def test_table_refuses_what_it_cannot_name() -> None:
    unknown = run_without_torch("no-such-folder")
    assert unknown.returncode != 0 and "no-such-folder" in unknown.stderr and "Traceback" not in unknown.stderr
    mixed = run_without_torch("smollm2", "--weight-dtype", "float32", "--activation-dtype", "bfloat16")
    assert mixed.returncode != 0 and "float32 weights take float32 activations" in mixed.stderr


def test_table_follows_the_checkpoint_and_refuses_another_kind_of_attention() -> None:
    table = run_without_torch("smollm2", "--weight-dtype", "float32").stdout
    assert "activation_dtype='float32'" in table and "kv_dtype='float32'" in table
    assert "isobit/order.py" in table, "the table says where it comes from"
    of_gpu = run_without_torch("smollm2", "--device-class", "sm90", "--weight-dtype", "float16").stdout
    assert "kv_dtype='float16'" in of_gpu and "MmaLinearOrder" in of_gpu
    with pytest.raises(ValueError, match=r"attention_kind='mla'.*supported: gqa"):
        model_orders(replace(CONFIG, attention_kind="mla"), "bfloat16", "bfloat16", "bfloat16", "cpu")


def changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value + "-other"


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_fingerprint_changes_with_every_field_of_every_order(name: str) -> None:
    one = ORDERS[name]
    seen = {BASE}
    for field in fields(one):
        other: Order = replace(one, **{field.name: changed(getattr(one, field.name))})
        seen.add(fingerprint("digest", {**ORDERS, name: other}, "cpu"))
    assert len(seen) == 1 + len(fields(one))


def test_fingerprint_changes_with_weights_device_class_set_of_orders_and_numerics_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fewer = {name: one for name, one in ORDERS.items() if name != "linear.o"}
    seen = [BASE, fingerprint("other", ORDERS, "cpu"), fingerprint("digest", ORDERS, "sm90")]
    seen.append(fingerprint("digest", fewer, "cpu"))
    monkeypatch.setattr(order, "NUMERICS_VERSION", order.NUMERICS_VERSION + 1)
    seen.append(fingerprint("digest", ORDERS, "cpu"))
    assert len(set(seen)) == 5


def test_fingerprint_tells_kinds_with_equal_fields_apart() -> None:
    @dataclass(frozen=True)
    class OtherOrder:
        width: int
        lanes: int = 16

    assert fingerprint("d", {"a": NormOrder(8)}, "cpu") != fingerprint("d", {"a": OtherOrder(8)}, "cpu")  # type: ignore[dict-item]


def test_fingerprint_does_not_change_otherwise() -> None:
    shuffled = dict(reversed(list(ORDERS.items())))
    assert fingerprint("digest", shuffled, "cpu") == BASE
    again = model_orders(replace(CONFIG, max_position_embeddings=1024), "bfloat16", "bfloat16", "bfloat16", "cpu")
    assert fingerprint("digest", again, "cpu") == BASE
    program = (
        "from isobit.order import *\n"
        "orders = {'a': linear_order(8, 8, 'bfloat16', 'float32', 'cpu'), 'b': norm_order(8, 'cpu')}\n"
        "print(fingerprint('digest', orders, 'cpu'))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_every_dtype_choice_gives_its_own_fingerprint() -> None:
    choices = [
        ("float32", "float32", "float32"),
        ("float32", "float32", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ]
    seen = {fingerprint("digest", model_orders(CONFIG, *choice, "cpu"), "cpu") for choice in choices}
    assert len(seen) == len(choices)


def test_norm_over_heads_has_an_order_only_where_the_model_has_one() -> None:
    with_norm = model_orders(replace(CONFIG, qk_norm=True), "float32", "float32", "float32", "cpu")
    assert with_norm["norm.head"] == NormOrder(16) and "norm.head" not in ORDERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 8, "bfloat16", "bfloat16", "sm90"), "sm90 has mma_linear_order"),
        ((8, 8, "float16", "float32", "cpu"), "weight_dtype='float16'"),
        ((8, 8, "bfloat16", "float16", "cpu"), "activation_dtype='float16'"),
        ((8, 8, "float32", "bfloat16", "cpu"), "float32 weights take float32 activations"),
        ((0, 8, "float32", "float32", "cpu"), "n=0"),
        ((8, -1, "float32", "float32", "cpu"), "k=-1"),
    ],
)
def test_linear_order_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_order(*arguments)


@pytest.mark.parametrize("head_dim", [0, -2, 63, 258])
def test_attention_order_refuses_a_head_dim(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"got {head_dim}"):
        attention_order(head_dim, "float32", "cpu")


def test_attention_order_refuses_a_kv_dtype() -> None:
    with pytest.raises(ValueError, match="kv_dtype='float8'"):
        attention_order(64, "float8", "cpu")


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (72, 72), (8, 8), (128, 256), (2048, 512)])
def test_tensor_core_attention_refuses_what_no_kernel_takes(head_dim: int, value_dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiples of 16; got head_dim={head_dim}"):
        mma_attention_order(head_dim, value_dim, "bfloat16", "sm90")


def test_tensor_core_orders_are_chosen_from_sizes_and_dtypes() -> None:
    assert mma_attention_order(128, 128, "bfloat16", "sm90").row_sum == "halves"
    assert mma_attention_order(576, 512, "bfloat16", "sm90").row_sum == "mma"
    assert mma_linear_order(2048, 10240, "bfloat16", "float32", "sm90").k_slices == 2
    assert mma_linear_order(6144, 4096, "float16", "float16", "sm90").k_slices == 1
    for arguments, message in (
        ((8, 8, "bfloat16", "float16", "sm90"), "output_dtype='float16': supported are bfloat16 and float32"),
        ((8, 8, "float32", "float32", "sm90"), "no Order for dtype='float32' on sm90"),
        ((8, 8, "bfloat16", "bfloat16", "cpu"), "no tensor-core Orders on 'cpu'"),
        ((0, 8, "bfloat16", "bfloat16", "sm90"), "n=0"),
    ):
        with pytest.raises(ValueError, match=message):
            mma_linear_order(*arguments)
