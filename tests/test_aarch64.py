"""The golden digests on aarch64, NEON and scalar: the C kernels under qemu-user, driven by the same Python face.

Optional: needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user). `_c` of a CpuLibrary
is replaced by a pipe to the emulated process; everything else is the code that serves.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.kernels.calls import call, prepare
from isobit.kernels.cpu import library as cpu_library
from isobit.kernels.cpu.claims import library_kernels
from isobit.kernels.cpu.library import CpuLibrary
from isobit.kernels.golden import digest, golden_cases

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
GOLDEN = json.loads((Path(__file__).parent / "golden" / "cpu_ops.json").read_text())["digests"]
SOURCES = Path(cpu_library.__file__).parent / "src"

pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="needs aarch64-linux-gnu-gcc and qemu-aarch64 to run aarch64 here"
)


def kv_bytes(pages: int, kv_heads: int, head_dim: int, is_bf16: int) -> int:
    return 2 * pages * kv_heads * head_dim * 64 * (2 if is_bf16 else 4)


# name -> sizes in bytes of the pointer arguments, in order, from the other arguments in order (floats included)
SIZES: dict[str, Callable[..., list[int]]] = {
    "isobit_packed_bytes": lambda n, k, bf: [],
    "isobit_linear_schedules": lambda bf, rounded: [],
    "isobit_rms_norm": lambda m, width, eps, threads: [4 * m * width, 4 * width, 4 * m * width],
    "isobit_silu_mul": lambda m, width, threads: [8 * m * width, 4 * m * width],
    "isobit_rope_and_cache": lambda m, pages, eps, heads, kv, width, rotary, interleaved, bf, threads: [
        4 * m * (heads + 2 * kv) * width, 4 * m, 4 * m, 72 * 2 * rotary, 72 * 2 * rotary, 4 * width, 4 * width,
        4 * m * heads * width, kv_bytes(pages, kv, width, bf),
    ],
    "isobit_argmax": lambda m, vocab, threads: [4 * m * vocab, 4 * m, m],
    "isobit_logprobs": lambda m, vocab, threads: [4 * m * vocab, 4 * m, 8 * m],
    "isobit_top_logits": lambda vocab, n: [4 * vocab, 4 * n],
    "isobit_sample": lambda vocab, *rest: [4 * vocab],
}  # fmt: skip


class EmulatedC:
    """Stands in for the ctypes library: the same calls, carried out by the emulated process."""

    def __init__(self, program: Path) -> None:
        assert EMULATOR is not None
        command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.num_calls = 0

    def close(self) -> None:
        self.process.communicate(timeout=20)  # closes its input, on which it ends
        assert self.process.returncode == 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.call(name, arguments)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        result_type, types = cpu_library._SIGNATURES[name]
        pairs = list(zip(arguments, types, strict=True))
        sizes = self.sizes(name, pairs)
        words, floats, buffers = [], [], []
        for value, kind in pairs:
            if kind is ctypes.c_void_p:
                size = sizes.pop(0)
                if value is None:
                    words.append(struct.pack("<qq", 0, 0))
                else:
                    buffers.append((value, size))
                    words.append(struct.pack("<qq", 1, size) + ctypes.string_at(value, size))
            elif kind is ctypes.c_float:
                floats.append(struct.pack("<f4x", value))
            elif kind is ctypes.c_double:
                floats.append(struct.pack("<d", value))
            else:
                words.append(struct.pack("<qQ", 0, int(value) & (2**64 - 1)))
        return self.exchange(name, words, floats, buffers, result_type)

    def exchange(
        self, name: str, words: list[bytes], floats: list[bytes], buffers: list[tuple[int, int]], result_type: Any
    ) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(struct.pack("<q", len(name)) + name.encode())
        stdin.write(struct.pack("<q", len(words)) + b"".join(words))
        stdin.write(struct.pack("<q", len(floats)) + b"".join(floats))
        stdin.flush()
        result = stdout.read(8)
        for address, size in buffers:
            ctypes.memmove(address, stdout.read(size), size)
        self.num_calls += 1
        return None if result_type is None else result_type.from_buffer_copy(result).value

    def sizes(self, name: str, pairs: list[tuple[Any, Any]]) -> list[int]:
        rest = [value for value, kind in pairs if kind is not ctypes.c_void_p]
        if name in SIZES:
            return SIZES[name](*rest)
        if name == "isobit_attention":
            is_bf16, requests, tables, pages, heads, kv_heads, head_dim = rest[:7]
            starts = pairs[4][0]
            rows = ctypes.cast(starts, ctypes.POINTER(ctypes.c_int32))[requests]
            queries = 4 * rows * heads * head_dim
            pages_size = kv_bytes(pages, kv_heads, head_dim, is_bf16)
            return [queries, queries, pages_size, 4 * (requests + 1), 4 * requests, 4 * requests * tables]
        if name == "isobit_embedding":
            m, n, k, is_bf16 = rest[:4]
            return [self.call("isobit_packed_bytes", (n, k, is_bf16)), 4 * m, 4 * m * k]
        if name == "isobit_pack_linear":
            n, k, is_bf16 = rest[:3]
            return [n * k * (2 if is_bf16 else 4), self.call("isobit_packed_bytes", (n, k, is_bf16))]
        assert name == "isobit_linear", f"no sizes for {name}"
        m, n, k, is_bf16 = rest[:4]
        return [4 * m * k, self.call("isobit_packed_bytes", (n, k, is_bf16)), 4 * n, 4 * m * n, 4 * m * n]


@pytest.fixture(scope="module", params=["neon", "scalar"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuLibrary]:
    program = tmp_path_factory.mktemp("aarch64") / "driver"
    driver = Path(__file__).parent / "aarch64" / "driver.c"
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-DISOBIT_{request.param.upper()}"]
    assert COMPILER is not None
    subprocess.run([COMPILER, *flags, f"-I{SOURCES}", str(driver), "-o", str(program), "-lm"], check=True)
    library = CpuLibrary("scalar", num_threads=2)
    library.name = str(request.param)
    emulated_c = EmulatedC(program)
    library._c = emulated_c  # type: ignore[assignment]
    yield library
    emulated_c.close()
    assert emulated_c.num_calls > 10, "the emulated kernels were not called"


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_golden_digests_hold_on_aarch64(emulated: CpuLibrary, case: Any) -> None:
    schedules = {
        schedule
        for kernel in library_kernels(emulated)
        if kernel.op == case.op and kernel.claims(case.order) is None
        for schedule in kernel.schedules
    }
    assert schedules, f"nothing offers {case.op}"
    kept = prepare(emulated, case.op, case.order, case.inputs)
    for schedule in sorted(schedules):
        outputs = call(emulated, case.op, case.order, schedule, case.inputs, False, kept)
        assert digest(outputs) == GOLDEN[case.name], f"{case.name} under {schedule}"
