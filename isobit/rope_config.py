"""What a checkpoint says about rotary position embedding, checked key by key. No torch, no tables.

Reads the old keys (`rope_theta`, `rope_scaling` with `type` or `rope_type`) and transformers 5's `rope_parameters`;
both spell the same RopeConfig. Keeps the invariant that nothing is defaulted that changes a position: a missing theta,
an unknown type or an unknown key is an error with its remedy. `rope.py` turns a RopeConfig into tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# required and optional keys of each type, as in transformers' modeling_rope_utils; "factors" is GGUF's rope_freqs
_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "factors": (frozenset(), frozenset()),
}
LARGEST = 1e300  # JSON writes larger whole numbers than a float holds
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling; fields as in Hugging Face `rope_parameters`."""

    rope_type: str  # "default" | "linear" | "llama3" | "yarn" | "dynamic" | "factors"
    theta: float
    rotary_dim: int
    parameters: tuple[tuple[str, float | bool], ...] = ()  # the scaling's own keys, sorted

    def parameter(self, name: str) -> float | None:
        """Value of one of the scaling's keys, None when the checkpoint does not give it."""
        return next((float(value) for key, value in self.parameters if key == name), None)


def parse_rope(raw: Mapping[str, Any], rotary_dim: int) -> RopeConfig:
    """RopeConfig of a config.json. Raises ValueError naming the key, its value and the remedy."""
    parameters = _scaling(raw)
    theta = _theta(raw, parameters)
    rope_type = _rope_type(parameters)
    for neutral in ("rope_theta", "rope_type", "type"):
        parameters.pop(neutral, None)
    if parameters.pop("partial_rotary_factor", 1.0) not in (1, None):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    outer_length = raw.get("original_max_position_embeddings")
    if outer_length is not None and rope_type in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = outer_length
    parameters = {key: value for key, value in parameters.items() if value is not None}
    _check_keys(rope_type, parameters)
    values = tuple((key, _value(key, value)) for key, value in sorted(parameters.items()))
    rope = RopeConfig(rope_type, theta, rotary_dim, values)
    low, high = rope.parameter("low_freq_factor"), rope.parameter("high_freq_factor")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"rope type llama3 needs low_freq_factor < high_freq_factor, got {low} and {high}")
    return rope


def _scaling(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} must be an object, got {value!r}")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(f"rope_parameters and rope_scaling are both given and differ: {given}; remove one")
    return dict(next(iter(given.values()), {}))


def _theta(raw: Mapping[str, Any], parameters: Mapping[str, Any]) -> float:
    given = [source["rope_theta"] for source in (parameters, raw) if source.get("rope_theta") is not None]
    if not given:
        raise ValueError(
            "the config names no rope_theta (neither rope_theta nor rope_parameters.rope_theta) and isobit does not "
            'guess it; look it up and give it, for example hf_overrides={"rope_theta": 10000.0}'
        )
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(f"rope_parameters.rope_theta={given[0]!r} and rope_theta={given[1]!r} differ; remove one")
    theta = float(_value("rope_theta", given[0]))
    if theta <= 1.0:
        raise ValueError(f"rope_theta={theta} must be above 1")
    return theta


def _rope_type(parameters: Mapping[str, Any]) -> str:
    given = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key) is not None}
    if len(given) > 1:
        raise ValueError(f"rope_type={parameters['rope_type']!r} and type={parameters['type']!r} differ; remove one")
    rope_type = next(iter(given), None)
    if rope_type is None:
        extra = sorted(set(parameters) - {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
        if extra:
            raise ValueError(f"rope scaling has keys {', '.join(extra)} but no rope_type; add it with hf_overrides")
        return "default"
    if rope_type not in _KEYS:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    return str(rope_type)


def _check_keys(rope_type: str, parameters: Mapping[str, Any]) -> None:
    if rope_type == "factors":
        return
    required, optional = _KEYS[rope_type]
    missing = sorted(required - set(parameters))
    if missing:
        raise ValueError(f"rope type {rope_type} needs {', '.join(missing)}; add it with hf_overrides")
    unknown = sorted(set(parameters) - required - optional)
    if unknown:
        raise ValueError(f"rope type {rope_type} has unknown keys {', '.join(unknown)}; only known keys are read")


def _value(key: str, value: object) -> float | bool:
    if key == "truncate" and isinstance(value, bool):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        raise ValueError(f"{key} must be a finite number, got {value!r}")
    if value <= 0 and key not in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        raise ValueError(f"{key} must be above 0, got {value!r}")
    return float(value)
