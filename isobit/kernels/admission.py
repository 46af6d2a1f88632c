"""The proof: a kernel under a schedule is admitted for an Order when it gives the reference's bits on this machine.

Every probe of the op is run in all its row selections, thread counts and alignments, and compared byte by byte.
Verdicts are kept on disk under everything they depended on. Keeps the invariant that no schedule leaves an
`AdmissionTable` unless it was proven: a refused kernel is an error that names the first differing coordinate, never a
silent replacement. Does not know models or batches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from isobit.kernels.bitcompare import first_difference
from isobit.kernels.calls import call, prepare
from isobit.kernels.probe_data import Probe, Run
from isobit.kernels.probes import PROBE_VERSION, probes_for
from isobit.kernels.reference.calls import Arrays, expect
from isobit.kernels.registry import OPS_OF_ORDER, Kernel
from isobit.kernels.verdict_cache import ADMITTED, NOT_OFFERED, REFUSED, Verdict, VerdictCache, default_cache_path
from isobit.order import NUMERICS_VERSION, Order

__all__ = ["AdmissionTable", "Claim", "Claims", "Prover", "admit", "host_facts"]

# (kernel, schedule) claims by (op, Order) -> for each claim, in order, its verdict, and whether it may be remembered
Claims = Mapping[tuple[str, Order], Sequence[tuple[Kernel, str]]]
Prover = Callable[[Claims], Iterator[tuple[Verdict, bool]]]


@dataclass(frozen=True)
class Claim:
    """One line of the table: a kernel under a schedule (empty when not offered) for an Order of an op."""

    op: str
    order: Order
    kernel: str
    schedule: str


class AdmissionTable:
    """Verdicts by claim. Read-only; the only source of schedules for `ops.py`."""

    def __init__(self, verdicts: Mapping[Claim, Verdict]) -> None:
        self.verdicts: Mapping[Claim, Verdict] = MappingProxyType(dict(verdicts))

    def schedules(self, op: str, order: Order, kernel: str | None = None) -> tuple[tuple[str, str], ...]:
        """Admitted (kernel, schedule) pairs of an op under an Order, of one kernel if named."""
        return tuple(
            (claim.kernel, claim.schedule)
            for claim, verdict in self._of(op, order)
            if verdict.status == ADMITTED and kernel in (None, claim.kernel)
        )

    def require(self, op: str, order: Order, kernel: str, schedule: str) -> None:
        """Raises ValueError unless the claim is admitted, naming the first differing coordinate where it is refused."""
        verdict = self.verdicts.get(Claim(op, order, kernel, schedule))
        if verdict is None or verdict.status != ADMITTED:
            raise ValueError(self._refusal(op, order, kernel, f"schedule {schedule!r}"))

    def require_any(self, op: str, order: Order, kernel: str) -> tuple[str, ...]:
        """The admitted schedules of a kernel, at least one. Raises ValueError as `require` when there is none."""
        schedules = tuple(schedule for _, schedule in self.schedules(op, order, kernel))
        if not schedules:
            raise ValueError(self._refusal(op, order, kernel, "any schedule"))
        return schedules

    def require_all(self, op: str, order: Order, kernel: str) -> tuple[str, ...]:
        """All schedules of a kernel that may choose among them itself. Raises ValueError if one is not admitted."""
        admitted = self.require_any(op, order, kernel)
        for claim, _ in self._of(op, order):
            if claim.kernel == kernel:
                self.require(op, order, kernel, claim.schedule)
        return admitted

    def _of(self, op: str, order: Order) -> Iterator[tuple[Claim, Verdict]]:
        return ((c, v) for c, v in self.verdicts.items() if c.op == op and c.order == order)

    def _refusal(self, op: str, order: Order, kernel: str, schedule: str) -> str:
        reasons = [f"{c.schedule or 'all schedules'} {v}" for c, v in self._of(op, order) if c.kernel == kernel]
        others = [f"{name}/{schedule}" for name, schedule in self.schedules(op, order)]
        return (
            f"{op}: kernel {kernel!r} is not admitted under {schedule} for {order}: "
            f"{'; '.join(reasons) or 'it was never proven for it'}. Admitted on this machine: "
            f"{', '.join(others) or 'nothing; `isobit doctor` shows every kernel'}"
        )


def host_facts(device_class: str = "cpu") -> dict[str, str]:
    """What verdicts depend on besides kernel and Order: CPU and its features, versions of the libraries."""
    try:
        version = importlib.metadata.version("isobit")
    except importlib.metadata.PackageNotFoundError:
        version = "source tree"
    return {
        "device_class": device_class,
        "machine": platform.machine(),
        "cpu": _cpu_features(),
        "isobit": version,
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def _cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name and feature flags of the first CPU where the system tells them, hashed to stay short."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return hashlib.sha256("\n".join(line for line in lines if line.startswith(wanted)).encode()).hexdigest()[:16]


def _sources_hash() -> str:
    """Hash of the Python of `kernels/` and of the Orders: reference, probes, calls and this file."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [folder.parent / "order.py", *sorted(folder.rglob("*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def admit(
    kernels: Sequence[Kernel],
    orders: Mapping[str, Order],
    cache_path: Path | None = None,
    device_facts: Mapping[str, str] | None = None,
    progress: bool = False,
    prove: Prover | None = None,
) -> AdmissionTable:
    """Prove each kernel x schedule for each Order it claims, or take the verdict from the cache.

    `cache_path` None: in the user's cache folder; `device_facts` None: `host_facts()`; `prove` None: against
    `kernels/reference`. Raises nothing for a refused kernel: the table does, when it is asked for.
    """
    cache = VerdictCache(cache_path or default_cache_path())
    facts = host_facts() if device_facts is None else device_facts
    verdicts: dict[Claim, Verdict] = {}
    pending: dict[tuple[str, Order], list[tuple[Kernel, str]]] = {}
    keys: dict[Claim, dict[str, Any]] = {}
    for kernel, order, schedule, key in _claims(kernels, orders, facts, verdicts):
        claim = Claim(kernel.op, order, kernel.name, schedule)
        assert claim not in verdicts and claim not in keys, f"two kernels make the same claim: {claim}"
        cached = cache.get(key)
        if cached is not None:
            verdicts[claim] = cached
        else:
            keys[claim] = key
            pending.setdefault((kernel.op, order), []).append((kernel, schedule))
    claims = [Claim(op, order, kernel.name, name) for (op, order), of in pending.items() for kernel, name in of]
    bar = tqdm(claims, desc="admission", disable=not (progress and pending))
    for claim, (verdict, lasting) in zip(bar, (prove or prove_by_reference)(pending), strict=True):
        if lasting:
            cache.put(keys[claim], verdict)
        verdicts[claim] = verdict
    cache.save()
    return AdmissionTable(_without_idle_reasons(verdicts))


def _claims(
    kernels: Sequence[Kernel], orders: Mapping[str, Order], facts: Mapping[str, str], verdicts: dict[Claim, Verdict]
) -> Iterator[tuple[Kernel, Order, str, dict[str, Any]]]:
    """(kernel, Order, schedule, cache key) of all that is offered; what is not goes to `verdicts` with its reason."""
    sources = _sources_hash()
    for kernel, order in _pairs(kernels, orders):
        reason = _not_offered(kernel, order, facts)
        if reason is not None:
            verdicts.setdefault(Claim(kernel.op, order, kernel.name, ""), Verdict(NOT_OFFERED, reason))
            continue
        for schedule in kernel.schedules:
            yield kernel, order, schedule, _key(kernel, order, schedule, facts, sources)


def _pairs(kernels: Sequence[Kernel], orders: Mapping[str, Order]) -> Iterator[tuple[Kernel, Order]]:
    """Every kernel with every distinct Order of its op."""
    for order in dict.fromkeys(orders.values()):
        for op in OPS_OF_ORDER[type(order)]:
            for kernel in kernels:
                if kernel.op == op:
                    yield kernel, order


def _not_offered(kernel: Kernel, order: Order, device_facts: Mapping[str, str]) -> str | None:
    device_class = device_facts["device_class"]
    if device_class not in kernel.device_classes:
        return f"runs on {', '.join(kernel.device_classes)}, not on {device_class}"
    return kernel.claims(order)


def _without_idle_reasons(verdicts: Mapping[Claim, Verdict]) -> dict[Claim, Verdict]:
    """Drop "not offered" of a declaration where another declaration of the same kernel does offer the Order."""
    offered = {(claim.op, claim.order, claim.kernel) for claim in verdicts if claim.schedule}
    return {c: v for c, v in verdicts.items() if c.schedule or (c.op, c.order, c.kernel) not in offered}


def _key(kernel: Kernel, order: Order, schedule: str, device_facts: Mapping[str, str], sources: str) -> dict[str, Any]:
    return {
        "op": kernel.op,
        "order": [type(order).__name__, asdict(order)],
        "kernel": kernel.name,
        "schedule": schedule,
        "numerics_version": NUMERICS_VERSION,
        "device_facts": dict(device_facts),
        "kernel_source": kernel.source_hash,
        "sources": sources,
        "probe_version": PROBE_VERSION,
    }


def prove_by_reference(pending: Claims) -> Iterator[tuple[Verdict, bool]]:
    """The Prover of device class "cpu": every probe of `probes.py` against the numpy reference."""
    for (op, order), claims in pending.items():
        truths = [(probe, expect(op, order, probe.inputs)) for probe in probes_for(op, order)]
        for kernel, schedule in claims:
            yield _prove(kernel, order, schedule, truths)


def _prove(kernel: Kernel, order: Order, schedule: str, truths: Sequence[tuple[Probe, Arrays]]) -> tuple[Verdict, bool]:
    """(verdict, whether it may be remembered): an exception refuses the kernel for this start only."""
    threads = kernel.library.num_threads
    try:
        for probe, truth in truths:
            kept: dict[int, Any] = {}  # by number of threads: packing is proven under each
            for run in probe.runs:
                kernel.library.num_threads = run.num_threads
                if run.num_threads not in kept:
                    kept[run.num_threads] = prepare(kernel.library, kernel.op, order, probe.inputs)
                inputs, weight = probe.select(run.rows), kept[run.num_threads]
                outputs = call(kernel.library, kernel.op, order, schedule, inputs, run.misaligned, weight)
                verdict = _compare(probe, run, truth, outputs)
                if verdict is not None:
                    return verdict, True
    except Exception as error:  # whatever a kernel raises, it is not admitted
        return Verdict(REFUSED, f"raised {type(error).__name__}: {error}"), False
    finally:
        kernel.library.num_threads = threads
    return Verdict(ADMITTED), True


def _compare(probe: Probe, run: Run, truth: Arrays, outputs: Arrays) -> Verdict | None:
    for name, expected in truth.items():
        difference = first_difference(expected[list(run.rows)], outputs[name])
        if difference is not None:
            alignment = ", misaligned" if run.misaligned else ""
            detail = f"{probe.label}, {len(run.rows)} rows, {run.num_threads} threads{alignment}, {name}"
            return Verdict(REFUSED, detail, difference)
    return None
