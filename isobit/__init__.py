"""isobit: every logit is a pure function of (weights, reduction order, token prefix).

Names are loaded when first used, so that `import isobit` is instant and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobit.config import EngineConfig
    from isobit.llm import LLM
    from isobit.output import CompletionOutput, RequestResult
    from isobit.request import SamplingParams, TokenLogprob

__version__ = "0.1.0"

_HOMES = {
    "LLM": "isobit.llm",
    "EngineConfig": "isobit.config",
    "SamplingParams": "isobit.request",
    "TokenLogprob": "isobit.request",
    "CompletionOutput": "isobit.output",
    "RequestResult": "isobit.output",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestResult",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'isobit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
