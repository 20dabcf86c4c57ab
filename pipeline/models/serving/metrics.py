"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ktconvert.pipeline.models.generating import Speed

if TYPE_CHECKING:
    from ktconvert.pipeline.models.serving.scheduler import Scheduler

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
TOKENS_PER_SECOND = (0.5, 1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 200, 500)
# Values that are read when a client asks: name, description, type, and how to read it.
READ: tuple[tuple[str, str, type[Metric], Callable[[Scheduler], float]], ...] = (
    ("prompt_tokens", "Tokens of prompts that the model has read.", CounterMetricFamily, lambda s: s.counts.prompt),
    ("generated_tokens", "Tokens that the model has generated.", CounterMetricFamily, lambda s: s.counts.new),
    (
        "generations_running",
        "Answers generated in turns.",
        GaugeMetricFamily,
        lambda s: s.count_running(),
    ),
    ("generations_waiting", "Answers that wait in the queue.", GaugeMetricFamily, lambda s: s.count_waiting()),
    ("kv_cache_bytes", "Memory of all keys and values.", GaugeMetricFamily, lambda s: s.cache_bytes()),
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of creation beside each counter and histogram


class SchedulerMetrics(Collector):
    """The metrics of READ."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its current value."""
        for name, description, kind, read in READ:
            metric = kind(f"ktconvert_{name}", description)  # type: ignore[call-arg]
            metric.add_metric([], read(self.scheduler))  # type: ignore[attr-defined]
            yield metric


class Metrics:
    """All metrics: those of the scheduler, of the process, and those of answered requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SchedulerMetrics(scheduler))
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "ktconvert_requests", "Requests that were answered.", ["path", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "ktconvert_request_seconds",
            "Time of a request for generated text.",
            ["path"],
            registry=self.registry,
            buckets=SECONDS,
        )
        self._speed = Histogram(
            "ktconvert_tokens_per_second",
            "Speed of an answer after its first token.",
            registry=self.registry,
            buckets=TOKENS_PER_SECOND,
        )

    def observe(self, path: str, status: int, seconds: float, speeds: Sequence[Speed]) -> None:
        """Add a request that was answered, with the speed of each of its answers."""
        self._requests.labels(path, str(status)).inc()
        if speeds:
            self._seconds.labels(path).observe(seconds)
        for speed in speeds:
            if speed.new > 1:
                self._speed.observe((speed.new - 1) / speed.decode)

    def format(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)
