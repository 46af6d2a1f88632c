"""Which kernel libraries this CPU and operating system can run, best first, and on how many cores. No torch.

Does not compile or load anything. The answer is a matter of speed: every library gives the same bits.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from isobit.kernels.cpu.build import machine_libraries

__all__ = ["available_cores", "choose_library", "supported_libraries"]

# CPU flags, as Linux names them, that the code of each library may use; "scalar" needs none.
REQUIRED_FLAGS = {
    "avx512bf16": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"),
    "avx512": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx2": ("avx2", "fma"),
}


def available_cores() -> int:
    """Cores this process may use, as far as the operating system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def supported_libraries() -> tuple[str, ...]:
    """Libraries this computer can run, best first; "scalar" is always among them.

    Raises ValueError for a machine type that no library is written for.
    """
    names = machine_libraries(platform.machine())
    if "neon" in names:
        return names  # every 64-bit ARM CPU has it
    flags = _cpu_flags()
    return tuple(name for name in names if flags.issuperset(REQUIRED_FLAGS.get(name, ())))


def choose_library(name: str) -> str:
    """`name`, or the best supported one for "auto". Raises ValueError listing what this CPU supports."""
    supported = supported_libraries()
    if name == "auto":
        return supported[0]
    if name not in supported:
        raise ValueError(f"cpu_library={name!r} does not run on this CPU; supported: auto, {', '.join(supported)}")
    return name


def _cpu_flags() -> frozenset[str]:
    """Flags of an x86 CPU that the operating system lets programs use, in Linux's names."""
    if platform.system() == "Darwin":
        names = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
        words = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, check=False).stdout
        return frozenset(words.lower().split())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())
