"""Prometheus metrics with the labels of one engine."""

from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

PREFIX = "vllm:"

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


class MetricFactory:
    """Makes metrics; those that differ in labels alone are children of one.

    Args:
        registry: where they are shown.
        labels: of every metric.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self.registry = registry
        self.labels = labels
        self._families: dict[str, MetricWrapperBase] = {}

    def gauge(self, name: str, documentation: str, **labels: str) -> Gauge:
        """Make a gauge."""
        return self._child(Gauge, name, documentation, labels)

    def counter(self, name: str, documentation: str, **labels: str) -> Counter:
        """Make a counter; it is shown with `_total` behind its name."""
        return self._child(Counter, name, documentation, labels)

    def histogram(
        self, name: str, documentation: str, buckets: tuple[float, ...]
    ) -> Histogram:
        """Make a histogram.

        Args:
            buckets: upper bounds, without the infinite one.
        """
        histogram = Histogram(
            PREFIX + name,
            documentation,
            list(self.labels),
            registry=self.registry,
            buckets=buckets,
        )
        return histogram.labels(**self.labels)

    def _child(
        self,
        kind: type[_Metric],
        name: str,
        documentation: str,
        labels: dict[str, str],
    ) -> _Metric:
        metric = self._families.get(name)
        if metric is None:
            metric = kind(
                PREFIX + name,
                documentation,
                [*self.labels, *labels],
                registry=self.registry,
            )
            self._families[name] = metric
        assert isinstance(metric, kind), f"{name} is made twice, as two kinds"
        return metric.labels(**self.labels, **labels)


def build_1_2_5_buckets(max_value: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `max_value`."""
    buckets: list[int] = []
    scale = 1
    while scale <= max_value:
        buckets += [
            factor * scale for factor in (1, 2, 5) if factor * scale <= max_value
        ]
        scale *= 10
    return tuple(buckets)
