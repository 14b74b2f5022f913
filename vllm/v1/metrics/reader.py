"""The metrics of this process as plain values, for callers without a scraper."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.samples import Sample

from vllm.v1.metrics.metric_factory import PREFIX
from vllm.v1.metrics.prometheus import get_prometheus_registry

# Counters whose series differ only in a position become one Vector.
_POSITION_LABEL = "position"


@dataclass(frozen=True)
class Metric:
    """A metric's name and the labels of one series."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A count, or a sum of seconds, that only grows."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counts by position, from 0."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """A distribution.

    Args:
        buckets: upper bound, as text -> number of values at or below it.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry | None = None) -> list[Metric]:
    """Return every metric of the engine, one entry a series.

    Args:
        registry: the process's own if None.
    """
    metrics: list[Metric] = []
    for family in (registry or get_prometheus_registry()).collect():
        if not family.name.startswith(PREFIX):
            continue
        if family.type == "gauge":
            metrics += [
                Gauge(family.name, dict(sample.labels), sample.value)
                for sample in family.samples
            ]
        elif family.type == "counter":
            metrics += _read_counters(family)
        elif family.type == "histogram":
            metrics += _read_histograms(family)
    return metrics


def _read_counters(family: PrometheusMetric) -> list[Metric]:
    samples = [s for s in family.samples if s.name.endswith("_total")]
    if not any(_POSITION_LABEL in sample.labels for sample in samples):
        return [
            Counter(family.name, dict(sample.labels), sample.value)
            for sample in samples
        ]
    vectors: list[Metric] = []
    for labels, group in _group_samples(samples, _POSITION_LABEL):
        group.sort(key=lambda sample: int(sample.labels[_POSITION_LABEL]))
        values = [int(sample.value) for sample in group]
        vectors.append(Vector(family.name, labels, values))
    return vectors


def _read_histograms(family: PrometheusMetric) -> list[Metric]:
    histograms: list[Metric] = []
    for labels, group in _group_samples(family.samples, "le"):
        values = {s.name.removeprefix(family.name): s.value for s in group}
        buckets = {
            sample.labels["le"]: int(sample.value)
            for sample in group
            if sample.name.endswith("_bucket")
        }
        count = int(values["_count"])
        histograms.append(
            Histogram(family.name, labels, count, values["_sum"], buckets)
        )
    return histograms


def _group_samples(
    samples: list[Sample], without: str
) -> list[tuple[dict[str, str], list[Sample]]]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = {k: v for k, v in sample.labels.items() if k != without}
        groups.setdefault(tuple(sorted(labels.items())), []).append(sample)
    return [(dict(key), group) for key, group in groups.items()]
