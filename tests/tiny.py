"""Tiny random checkpoints of every supported family, with a tiny tokenizer, made by transformers' own classes.

Weights are seeded and wide: spread logits, attention far from flat, values over several binades, so that a changed
order of addition changes bits. Sizes are odd where an architecture allows it. Each takes well under a second; the
tokenizer is trained once per process. `tiny_checkpoint` keeps one copy per process and set of arguments.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "llama3", "llama_yarn", "llama_linear", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if loop.index0 > 0 and message['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": 503, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
        },
        "tie_word_embeddings": True,
    },
    "llama_yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "attention_bias": True, "mlp_bias": True,
    },
    "llama_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    "mistral": {
        "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3, "sliding_window": None, "head_dim": 24,
    },
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "tie_word_embeddings": True},
    "qwen3": {
        "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip


def make_tiny(
    kind: str, folder: Path, *, dtype: str = "float32", sharded: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Write a checkpoint of `kind` (KINDS) with its tokenizer to `folder`; overrides are transformers config keys."""
    config_class, model_class = _CLASSES[kind.split("_")[0].removesuffix("3") if kind != "qwen3" else kind]
    config = config_class(**{**_COMMON, **_OWN[kind], **overrides})
    model = model_class(config)
    _randomize(model, seed)
    model.generation_config.eos_token_id = [1, 3]
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_checkpoint(kind: str, **options: Any) -> Path:
    """Folder of `make_tiny(kind, ...)`, made once per process and removed at its end; do not write into it."""
    return _cached(kind, repr(sorted(options.items())), lambda folder: make_tiny(kind, folder, **options))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template that starts with BOS, and a post-processor that adds BOS too."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=CHAT_TEMPLATE,
    )


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter: fan-in scaled normals times exp(0.5 normal), gains that spread attention and logits."""
    generator = torch.Generator().manual_seed(seed)
    gains = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 2.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            wide = normal * torch.exp(0.5 * torch.randn(parameter.shape, generator=generator))
            part = name.split(".")[-2]
            if "norm" in part:
                parameter.copy_(1.0 + 0.2 * normal)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * wide)
            elif part == "embed_tokens":
                tied = bool(model.config.tie_word_embeddings)
                parameter.copy_(wide * (2.0 / parameter.shape[1] ** 0.5 if tied else 1.0))
            else:
                parameter.copy_(wide * (gains.get(part, 1.0) / parameter.shape[1] ** 0.5))


@functools.cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = ["the", "sum", "of", "parts", "order", "addition", "rounding", "token", "prefix", "page", "batch", "row"]
    words += ["chunk", "cache", "head", "layer", "number"]
    corpus = [f"{a} {b} {c}, {b}{a}s and {c}ing." for a in words for b in words for c in words[::3]]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    return str(tokenizer.to_str())


_FOLDERS: dict[tuple[str, str], Path] = {}


def _cached(kind: str, key: str, make: Any) -> Path:
    if (kind, key) not in _FOLDERS:
        root = tempfile.mkdtemp(prefix="isobit-tiny-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        _FOLDERS[kind, key] = make(Path(root))
    return _FOLDERS[kind, key]
