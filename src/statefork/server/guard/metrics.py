"""What Prometheus reads at /metrics. No label ever names an environment, a path or a command: their number has no bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metrics", "Readings"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

Readings = float | Mapping[tuple[str, ...], float]
"""One value, or one for each tuple of label values."""


class Metrics:
    """One registry per daemon, so that two in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._operations = Counter(
            "statefork_operations",
            "Operations on environments.",
            ["backend", "verb", "outcome"],
            registry=self.registry,
        )
        self._operation_seconds = Histogram(
            "statefork_operation_seconds",
            "How long operations took, those that failed too.",
            ["backend", "verb"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._requests = Counter(
            "statefork_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._request_seconds = Histogram(
            "statefork_http_request_seconds",
            "From the request's head to the answer's last byte.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._refused = Counter(
            "statefork_http_refused",
            "Requests refused by the guard, by problem code.",
            ["reason"],
            registry=self.registry,
        )

    def operation(self, backend: str, verb: str, outcome: str, seconds: float) -> None:
        """`outcome` is `ok` or the error's code."""
        self._operations.labels(backend, verb, outcome).inc()
        self._operation_seconds.labels(backend, verb).observe(seconds)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """`route` is the template of the path, never the path."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def gauge(self, name: str, text: str, read: Callable[[], Readings], labels: Iterable[str] = ()) -> None:
        """Call `read` at each scrape, on a worker thread; `name` without the prefix `statefork_`."""
        self.registry.register(_Callback(f"statefork_{name}", text, read, tuple(labels)))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Callback(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], Readings], labels: tuple[str, ...]) -> None:
        self._name, self._text, self._read, self._labels = name, text, read, labels

    def describe(self) -> Iterable[Metric]:
        """Known without calling `read`: the registry asks when the gauge is registered."""
        return [GaugeMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        found = self._read()
        for values, value in found.items() if isinstance(found, Mapping) else [((), found)]:
            family.add_metric(list(values), float(value))
        return [family]
