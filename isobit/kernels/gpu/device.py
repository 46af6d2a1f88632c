"""What the driver says about the GPU: its device class, memory, and everything a proven bit could depend on.

Asks, never changes a setting. Knows no kernels.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from isobit.kernels.admission import host_facts

__all__ = ["gpu_facts", "proof_facts"]

_CLASSES = {(9, 0): "sm90"}  # by compute capability


def gpu_facts() -> tuple[str, int]:
    """(device class, bytes of memory) of the current GPU. Raises ValueError where isobit cannot run on it."""
    if not torch.cuda.is_available():
        raise ValueError("device=cuda: no NVIDIA GPU is visible to torch; use device=cpu, or a CUDA build of torch")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("device=cuda needs Triton: pip install 'isobit[gpu]'")
    properties = torch.cuda.get_device_properties()
    capability = (properties.major, properties.minor)
    if capability not in _CLASSES:
        known = ", ".join(f"{major}.{minor}" for major, minor in _CLASSES)
        raise ValueError(
            f"device=cuda: {properties.name} has compute capability {capability[0]}.{capability[1]}, for which there "
            f"are no Orders yet; supported: {known}"
        )
    return _CLASSES[capability], int(properties.total_memory)


def proof_facts(device_class: str) -> dict[str, str]:
    """What verdicts and timings depend on besides kernel and Order: the GPU, versions of driver and compilers."""
    properties = torch.cuda.get_device_properties()
    return {
        **host_facts(device_class),
        "gpu": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "cuda": f"{torch.version.cuda}, driver {_driver_version()}",
        "triton": importlib.metadata.version("triton"),
    }


def _driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's own words, where the system tells them."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
