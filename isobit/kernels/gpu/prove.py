"""The Prover of a GPU: runs the checks of `probes.py` for each claim, and says what differed first.

What must be compiled is compiled first, on several threads: most of a cold start is the compiler's. Knows no op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime import driver

from isobit.kernels.admission import Claims
from isobit.kernels.gpu.checks import Check, difference
from isobit.kernels.gpu.probes import checks_for
from isobit.kernels.gpu.warm import warm_up
from isobit.kernels.registry import Kernel
from isobit.kernels.verdict_cache import ADMITTED, REFUSED, Verdict
from isobit.order import Order

__all__ = ["prove_checks", "prove_on_device"]

_COMPILERS = 16  # threads; Triton's compiler leaves Python's lock for most of its work


def prove_on_device(pending: Claims) -> Iterator[tuple[Verdict, bool]]:
    """The Prover of a GPU; an exception refuses a kernel for this start only."""
    _compile_ahead(pending)
    for (op, order), claims in pending.items():
        shared: dict[Any, Any] = {}  # inputs and the reference's outputs, made once for all schedules of an Order
        for kernel, schedule in claims:
            yield prove_checks(checks_for(kernel.library, op, order, schedule, shared))


@torch.inference_mode()
def prove_checks(checks: Iterator[Check]) -> tuple[Verdict, bool]:
    """(verdict, whether it may be remembered) of one claim."""
    try:
        for check in checks:
            actual = check.run()
            for name, expected in check.expected.items():
                found = difference(expected, actual[name])
                if found is not None:
                    return Verdict(REFUSED, f"{check.label}, {name}", found), True
    except Exception as error:  # whatever a kernel raises, it is not admitted
        return Verdict(REFUSED, f"raised {type(error).__name__}: {error}"), False
    return Verdict(ADMITTED), True


def _compile_ahead(pending: Claims) -> None:
    """Run each claim once on a little data, several at a time, to fill the compiler's cache; errors show later.

    Claims that share compiled kernels stay on one thread, or several threads would compile the same. Attention goes
    first: it takes longest.
    """
    groups: dict[tuple[str, str, str], list[tuple[Kernel, str, Order]]] = {}
    for (op, order), of in pending.items():
        for kernel, schedule in of:
            shared = (op, schedule, getattr(order, "output_dtype", ""))
            groups.setdefault(shared, []).append((kernel, schedule, order))

    def run_once(claims: Sequence[tuple[Kernel, str, Order]]) -> None:
        for kernel, schedule, order in claims:
            # Nothing is lost where one cannot run: its check says why.
            with contextlib.suppress(Exception), torch.inference_mode():
                warm_up(kernel.library, kernel.op, order, schedule)

    if pending and torch.cuda.is_available():
        driver.active.get_current_device()  # Triton makes its driver when first asked: not in all threads at once
    with ThreadPoolExecutor(_COMPILERS) as pool:
        for _ in pool.map(run_once, sorted(groups.values(), key=lambda of: of[0][0].op != "attention")):
            pass
