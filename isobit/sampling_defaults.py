"""Sampling defaults: request > server flag > checkpoint's generation_config > built in. No torch.

Knows names and numbers only. Invariant: what applies, and where it comes from, can be shown; an explicit value in a
request always wins, so temperature 0 is always greedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isobit.request import SamplingParams

DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WHOLE = frozenset(("top_k",))


@dataclass(frozen=True)
class SamplingDefaults:
    """`values` for what a request leaves out; `sources` says where each came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """JSON-ready: {name: {"value", "source"}} for every field that can have a default."""
        built_in = SamplingParams()
        return {
            name: {
                "value": self.values.get(name, getattr(built_in, name)),
                "source": self.sources.get(name, "built in"),
            }
            for name in DEFAULTABLE
        }


def resolve_defaults(
    checkpoint: Iterable[tuple[str, Any]], generation_config: str = "auto", server_flag: str | None = None
) -> SamplingDefaults:
    """`generation_config` "auto" takes the checkpoint's values, "none" does not; `server_flag` is a JSON object.

    Raises ValueError for unknown names and values outside their range, naming them.
    """
    if generation_config not in ("auto", "none"):
        raise ValueError(f"generation_config={generation_config!r}: supported are auto, none")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if generation_config == "auto":
        for name, value in checkpoint:
            if name in DEFAULTABLE and value is not None:
                values[name] = int(value) if name in _WHOLE else value
                sources[name] = "checkpoint"
    for name, value in _parse_flag(server_flag).items():
        values[name] = value
        sources[name] = "server flag"
    SamplingParams(**values)
    return SamplingDefaults(values, sources)


def _parse_flag(server_flag: str | None) -> dict[str, Any]:
    if server_flag is None:
        return {}
    try:
        given = json.loads(server_flag)
    except ValueError as error:
        raise ValueError(f"sampling_defaults is not JSON: {error}") from error
    if not isinstance(given, dict) or set(given) - set(DEFAULTABLE):
        raise ValueError(f"sampling_defaults must be a JSON object with names from {', '.join(DEFAULTABLE)}")
    return given
