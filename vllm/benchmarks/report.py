"""The figures of a serving benchmark, and the block that shows them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.benchmarks.client import RequestResult

WIDTH = 50
# Name -> (heading, abbreviation).
_METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
METRIC_NAMES = tuple(_METRICS)


@dataclass(frozen=True)
class ServingReport:
    """A serving benchmark's figures.

    Args:
        figures: name -> value, in the names of the JSON result.
        metrics: those of METRIC_NAMES to show.
        percentiles: of each metric, 0 to 100.
    """

    figures: dict[str, Any]
    metrics: list[str]
    percentiles: list[float]

    def format(self) -> str:
        """Return the block of `WIDTH` columns."""
        figures = self.figures
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [
            _line(title, figures[name])
            for title, name in (
                ("Successful requests:", "completed"),
                ("Failed requests:", "failed"),
                ("Maximum request concurrency:", "max_concurrency"),
                ("Request rate configured (RPS):", "request_rate"),
                ("Benchmark duration (s):", "duration"),
                ("Total input tokens:", "total_input_tokens"),
                ("Total generated tokens:", "total_output_tokens"),
                ("Request throughput (req/s):", "request_throughput"),
                ("Output token throughput (tok/s):", "output_throughput"),
                ("Peak concurrent requests:", "max_concurrent_requests"),
                ("Total token throughput (tok/s):", "total_token_throughput"),
            )
            if figures[name] is not None
        ]
        for metric in self.metrics:
            heading, short = _METRICS[metric]
            lines.append(f"{heading:-^{WIDTH}}")
            for title, name in self._rows(metric):
                lines.append(_line(f"{title} {short} (ms):", figures[name]))
        lines.append("=" * WIDTH)
        return "\n".join(lines)

    def _rows(self, metric: str) -> list[tuple[str, str]]:
        rows = [("Mean", f"mean_{metric}_ms"), ("Median", f"median_{metric}_ms")]
        return rows + [
            (f"P{_name(p)}", f"p{_name(p)}_{metric}_ms") for p in self.percentiles
        ]


def make_report(
    results: list[RequestResult],
    duration_s: float,
    settings: dict[str, Any],
    metrics: list[str],
    percentiles: list[float],
) -> ServingReport:
    """Sum up.

    Args:
        settings: what was asked for; goes into the figures, with `request_rate` and
            `max_concurrency` among them.
    """
    done = [result for result in results if not result.error]
    num_input = sum(result.num_prompt_tokens for result in done)
    num_output = sum(result.num_output_tokens for result in done)
    figures: dict[str, Any] = settings | {
        "completed": len(done),
        "failed": len(results) - len(done),
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": _peak_concurrency(done),
        "errors": [result.error for result in results if result.error],
    }
    seconds = {
        "ttft": [result.ttft_s for result in done],
        "tpot": [
            (result.latency_s - result.ttft_s) / (result.num_output_tokens - 1)
            for result in done
            if result.num_output_tokens > 1
        ],
        "itl": [gap for result in done for gap in result.itl_s],
        "e2el": [result.latency_s for result in done],
    }
    for metric, values in seconds.items():
        figures |= _statistics(metric, values, percentiles)
    return ServingReport(figures, metrics, percentiles)


def _statistics(
    metric: str, seconds: list[float], percentiles: list[float]
) -> dict[str, float]:
    values_ms = np.asarray(seconds or [0.0]) * 1e3
    statistics = {
        f"mean_{metric}_ms": float(values_ms.mean()),
        f"median_{metric}_ms": float(np.median(values_ms)),
        f"std_{metric}_ms": float(values_ms.std()),
    }
    for percentile in percentiles:
        value = float(np.percentile(values_ms, percentile))
        statistics[f"p{_name(percentile)}_{metric}_ms"] = value
    return statistics


def _peak_concurrency(results: list[RequestResult]) -> int:
    # At the same instant an end comes before a start.
    events = [(result.start_s, 1) for result in results]
    events += [(result.start_s + result.latency_s, -1) for result in results]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def _name(percentile: float) -> str:
    return f"{percentile:g}"


def _line(title: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<40} {text:<{WIDTH - 41}}".rstrip()
