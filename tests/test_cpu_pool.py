"""The thread pool of the CPU kernels: more threads than cores, fork, two callers at once, rest when there is no work.

Whatever the pool does can only show as a missing, doubled or foreign item: each test compares bytes with one thread.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from isobit.kernels.cpu.library import CpuLibrary, PackedLinear
from isobit.loading import device_facts


def problem(kernels: CpuLibrary, seed: int, rows: int = 20) -> tuple[torch.Tensor, PackedLinear]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1000, 300, generator=generator)
    return torch.randn(rows, 300, generator=generator), kernels.pack_linear(weight)


def test_more_threads_than_cores_and_changing_counts() -> None:
    kernels = CpuLibrary("auto", num_threads=1)
    x, packed = problem(kernels, seed=0)
    expected = kernels.linear(x, packed, "float32", "tile")
    assert (expected != 0).all()
    for repeat in range(30):
        for num_threads in (64, 2, 33, 1, 3, 16):
            kernels.num_threads = num_threads
            out = torch.zeros_like(expected)
            kernels.linear(x, packed, "float32", "tile", out=out)
            assert torch.equal(expected, out), f"{num_threads} threads, repeat {repeat}"


def test_two_python_threads_at_once() -> None:
    kernels = CpuLibrary("auto", num_threads=3)
    problems = [problem(kernels, seed) for seed in (1, 2)]
    expected = [kernels.linear(x, packed, "float32", "stream") for x, packed in problems]
    wrong: list[int] = []
    together, deadline = threading.Barrier(2), time.monotonic() + 60
    inside, overlaps = [False, False], [0, 0]

    def call(which: int) -> None:
        x, packed = problems[which]
        together.wait()
        while min(overlaps) < 100 and time.monotonic() < deadline:
            inside[which] = True
            y = kernels.linear(x, packed, "float32", "stream")
            overlaps[which] += inside[1 - which]
            inside[which] = False
            if not torch.equal(y, expected[which]):
                wrong.append(which)

    callers = [threading.Thread(target=call, args=(which,)) for which in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
    assert min(overlaps) >= 100, "the two callers did not run at the same time"


FORK = """
import os
import pytest
import torch
from isobit.kernels.cpu.library import CpuLibrary

kernels = CpuLibrary("auto", num_threads=4)
x = torch.arange(6000, dtype=torch.float32).reshape(20, 300) / 7
packed = kernels.pack_linear(torch.arange(300000, dtype=torch.float32).reshape(1000, 300) / 11)
expected = kernels.linear(x, packed, "float32", "tile")
assert len(os.listdir("/proc/self/task")) > 1 or not os.path.exists("/proc/self/task"), "the pool started no thread"
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        equal = all(torch.equal(expected, kernels.linear(x, packed, "float32", "tile")) for _ in range(20))
        workers = len(os.listdir("/proc/self/task")) - 1
        os._exit(0 if equal and workers > 0 else 1)
    children.append(child)
assert torch.equal(expected, kernels.linear(x, packed, "float32", "tile"))
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]  # newer Pythons warn of fork in a threaded process
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "[0, 0, 0]\n", result.stderr


def test_workers_rest_when_there_is_no_work() -> None:
    kernels = CpuLibrary("auto", num_threads=8)
    x, packed = problem(kernels, seed=3)
    for _ in range(10):
        kernels.linear(x, packed, "float32", "tile")
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    assert used < 0.1, f"{used:.3f} s of processor time while idle: spinning would take at least 0.5 s"


def test_a_machine_with_more_cores_than_the_pool_takes_uses_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(200)))
    cores = device_facts("cpu").num_cores
    assert CpuLibrary("scalar", cores).num_threads == cores == 64
    with pytest.raises(ValueError, match="num_threads=200"):
        CpuLibrary("scalar", 200)  # control: what the plan would have asked for
