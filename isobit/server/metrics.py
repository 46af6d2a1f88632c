"""Prometheus metrics of one server, fed with the engine's own counters after every step.

Knows EngineStats and prometheus_client; uses a registry of its own, so that two servers in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from isobit.engine import EngineStats

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_GAUGES = {
    "num_running": ("isobit_num_requests_running", "Requests in the running batch."),
    "num_waiting": ("isobit_num_requests_waiting", "Requests waiting for a place or preempted."),
    "num_pages": ("isobit_kv_cache_pages", "Pages of the KV cache."),
    "num_free_pages": ("isobit_kv_cache_free_pages", "Pages held by no request and no cached prefix."),
    "num_cached_pages": ("isobit_kv_cache_cached_pages", "Pages that hold cached prefixes."),
    "max_step_rows": ("isobit_max_rows_per_step", "Most rows computed in one step so far."),
    "max_step_requests": ("isobit_max_requests_per_step", "Most requests in one step so far."),
}
_COUNTERS = {
    "num_steps": ("isobit_steps", "Steps computed."),
    "num_preemptions": ("isobit_preemptions", "Requests put back to waiting for want of pages."),
    "num_evicted_pages": ("isobit_evicted_pages", "Cached pages given up for want of room."),
    "num_cached_tokens": ("isobit_cached_tokens", "Prompt tokens served from the prefix cache."),
    "num_prompt_tokens": ("isobit_prompt_tokens", "Prompt tokens of requests that gave output."),
    "num_generation_tokens": ("isobit_generation_tokens", "Tokens generated."),
}


class _StatsCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        used = 1.0 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        yield GaugeMetricFamily("isobit_kv_cache_usage", "Share of pages in use, cached prefixes included.", value=used)


class Metrics:
    """Holds the last stats and a histogram of rows per step. `observe_step` is called by the engine thread."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self.registry = CollectorRegistry()
        self._rows = Histogram(
            "isobit_rows_per_step", "Rows (tokens) computed in one step.", registry=self.registry, buckets=_ROW_BUCKETS
        )
        self._requests = Histogram(
            "isobit_requests_per_step", "Requests in one step.", registry=self.registry, buckets=_ROW_BUCKETS[:9]
        )
        self.errors = Counter(
            "isobit_error_responses", "Errors answered, by status.", ["status"], registry=self.registry
        )
        self.registry.register(_StatsCollector(self))

    def observe_step(self, stats: EngineStats) -> None:
        """Take the stats of a finished step."""
        if stats.num_steps > self.stats.num_steps:
            self._rows.observe(stats.last_step_rows)
            self._requests.observe(stats.last_step_requests)
        self.stats = stats

    def render(self, stats: EngineStats) -> bytes:
        """The text of /metrics, with the gauges as of `stats`."""
        self.stats = stats
        return generate_latest(self.registry)
