"""The model registry: the only list of architecture names, and what each fixes that its config.json does not say.

A new model is an entry here and a class of the entry's name in `models/`. No torch. Everything else reads capabilities
(`attention_kind`, biases, norms, windows) and never asks for a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture", "gguf_architecture"]


@dataclass(frozen=True)
class Architecture:
    """Facts of one architecture. Of a bias, None means that the config's `attention_bias` decides.

    `module`: the file of `models/` that holds its class. `gguf_name`: its `general.architecture`. `window`: how the
    config speaks of sliding windows: "ignored"; "key" (the window is `sliding_window`); "switch" (only if
    `use_sliding_window` is true, and then for the layers named). `default_window` applies where the key is absent.
    `default_head_dim` None: hidden_size / num_attention_heads.
    """

    module: str
    gguf_name: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    window: str = "ignored"
    default_window: int | None = None
    attention_kind: str = "gqa"


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture("llama", "llama", reads_mlp_bias=True),
        "MistralForCausalLM": Architecture(
            "mistral", "llama", qkv_bias=False, o_bias=False, window="key", default_window=4096
        ),
        "Qwen2ForCausalLM": Architecture(
            "qwen2", "qwen2", qkv_bias=True, o_bias=False, window="switch", default_window=4096
        ),
        "Qwen3ForCausalLM": Architecture(
            "qwen3", "qwen3", qk_norm=True, default_head_dim=128, window="switch", default_window=4096
        ),
    }
)


def find_architecture(name: object) -> Architecture:
    """The entry of `name`. Raises ValueError listing what is supported."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def gguf_architecture(gguf_name: object, has_window: bool) -> str:
    """Name of the architecture a GGUF file means: of two that share a GGUF name, a window tells them apart.

    Raises ValueError listing what is supported.
    """
    named = {name: entry for name, entry in ARCHITECTURES.items() if entry.gguf_name == gguf_name}
    if not named:
        known = ", ".join(dict.fromkeys(entry.gguf_name for entry in ARCHITECTURES.values()))
        raise ValueError(f"GGUF architecture {gguf_name!r} is not supported; {known} are")
    return next((name for name, entry in named.items() if (entry.window != "ignored") == has_window), next(iter(named)))
