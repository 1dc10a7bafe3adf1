"""What Prometheus is told."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

# Seconds: a small model answers within one millisecond.
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Counts of one server, in a registry of their own.

    >>> metrics = Metrics()
    >>> metrics.loaded("ctr", 3, seconds=0.5)
    >>> [line for line in metrics.text().decode().splitlines() if line.startswith("sok_serve_loaded")]
    ['sok_serve_loaded_version{model="ctr",version="3"} 1.0']
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        of_requests = ("model", "version", "method", "status")
        self._requests = Counter(
            "sok_serve_requests", "Requests that were answered or refused", of_requests, registry=self.registry
        )
        self._seconds = Histogram(
            "sok_serve_request_seconds",
            "From the first byte of a request to its answer",
            ("model", "method"),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._running = Gauge(
            "sok_serve_requests_running", "Requests that hold one of --max-requests", registry=self.registry
        )
        self._loaded = Gauge(
            "sok_serve_loaded_version", "1 for each version in memory", ("model", "version"), registry=self.registry
        )
        self._saved = Gauge(
            "sok_serve_saved_timestamp_seconds",
            "When the save was made that a version in memory follows (sok.follow_export): time() less this is its lag",
            ("model", "version"),
            registry=self.registry,
        )
        self._load_seconds = Histogram(
            "sok_serve_load_seconds", "Loading and warming a version", ("model",), registry=self.registry
        )
        self._failures = Counter(
            "sok_serve_load_failures", "Versions that could not be loaded", ("model",), registry=self.registry
        )
        self._swaps = Counter(
            "sok_serve_swaps", "Times that another version took over", ("model",), registry=self.registry
        )

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, model: str, version: int | None, method: str, status: int, seconds: float) -> None:
        of = "" if version is None else str(version)
        self._requests.labels(model, of, method, str(status)).inc()
        self._seconds.labels(model, method).observe(seconds)

    def running(self, number: int) -> None:
        self._running.set(number)

    def loaded(self, model: str, version: int, seconds: float, saved: float | None = None) -> None:
        self._loaded.labels(model, str(version)).set(1)
        if saved is not None:
            self._saved.labels(model, str(version)).set(saved)
        self._load_seconds.labels(model).observe(seconds)

    def load_failed(self, model: str) -> None:
        self._failures.labels(model).inc()

    def swapped(self, model: str) -> None:
        self._swaps.labels(model).inc()

    def freed(self, model: str, version: int) -> None:
        for gauge in self._loaded, self._saved:
            with contextlib.suppress(KeyError):
                gauge.remove(model, str(version))


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
