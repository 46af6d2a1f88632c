"""From options to a model ready to run: config, plan, kernels, admission, weights, in that order, once.

Everything that can be refused is refused here, before a request is taken. Keeps the invariant that a model only ever
sees ops whose kernels were admitted on this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from isobit.config import EngineConfig
from isobit.kernels.admission import AdmissionTable, admit
from isobit.kernels.cpu.claims import library_kernels
from isobit.kernels.cpu.features import available_cores, supported_libraries
from isobit.kernels.cpu.library import MAX_THREADS, CpuLibrary
from isobit.kernels.interface import KernelLibrary
from isobit.kv_cache import KVCache
from isobit.model_config import ModelConfig, load_model_config
from isobit.models import CausalLM, build_model
from isobit.ops import Ops
from isobit.plan import DeviceFacts, Plan, resolve_plan
from isobit.rope import rope_tables
from isobit.weights import open_weights


@dataclass(frozen=True)
class LoadedModel:
    """A model with its plan. Engines with other pool sizes, budgets or threads may share one (`reconfigured`)."""

    model_config: ModelConfig
    plan: Plan
    ops: Ops
    model: CausalLM
    weights_digest: str

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints promise equal bits."""
        return self.plan.fingerprint(self.weights_digest)

    def new_kv_cache(self) -> KVCache:
        """A KV cache of the plan's size."""
        return KVCache(self.ops, self.model_config, self.plan.num_pages, self.plan.page_size, self.plan.kv_cache_dtype)

    def reconfigured(self, config: EngineConfig) -> LoadedModel:
        """The same weights under other sizes. Raises ValueError when the Orders or the library would change.

        The kernels are shared, and with them the number of threads: the one asked for last holds for all engines.
        """
        plan = resolve_plan(config, self.model_config, device_facts(config.device))
        if plan.orders != self.plan.orders or plan.kernel_library != self.plan.kernel_library:
            raise ValueError("these options change the Orders or the kernel library: load the model anew")
        self.ops.library.num_threads = plan.num_threads
        return replace(self, plan=plan)


def device_facts(device: str) -> DeviceFacts:
    """What this machine offers to the plan on "cpu" or "cuda". Raises ValueError where there is no such GPU."""
    cores = min(available_cores(), MAX_THREADS)
    if device == "cuda":
        from isobit.kernels.gpu.device import gpu_facts  # asks the driver; needs Triton

        device_class, memory = gpu_facts()
        return DeviceFacts(device_class, (device_class,), cores, memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceFacts("cpu", supported_libraries(), cores, memory)


def open_kernels(plan: Plan) -> tuple[KernelLibrary, AdmissionTable]:
    """The plan's kernel library, and what of it was admitted on this machine."""
    if plan.device_class != "cpu":
        from isobit.kernels.gpu.claims import admit_library
        from isobit.kernels.gpu.library import GpuLibrary

        gpu = GpuLibrary(plan.kernel_library, plan.dtype)
        return gpu, admit_library(gpu, plan.orders, progress=True)
    cpu = CpuLibrary(plan.kernel_library, plan.num_threads)
    return cpu, admit(library_kernels(cpu), plan.orders, progress=True)


def load_model(config: EngineConfig) -> LoadedModel:
    """Resolve, admit and load. Raises ValueError with the reason for anything that cannot be served as asked."""
    model_config = load_model_config(config.model, config.parsed_overrides())
    plan = resolve_plan(config, model_config, device_facts(config.device))
    library, admitted = open_kernels(plan)
    ops = Ops(library, plan.orders, admitted)
    weights = open_weights(config.model, model_config, config.load_format, library.device)
    rope = ops.rope_tables(*rope_tables(model_config.rope, plan.context_length))
    model = build_model(model_config, ops, weights, rope)
    return LoadedModel(model_config, plan, ops, model, weights.digest())
