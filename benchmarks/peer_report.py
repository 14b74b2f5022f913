"""The figures of `peers.py`: of one load, and over rounds their medians and ratios."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from typing import Any

from vllm.benchmarks.client import RequestResult
from vllm.benchmarks.table import format_table

BASELINE = "llama.cpp"
OURS = ("off", "adaptive", "half", "float32")
PROMPT, DECODE = "prompt_tokens_per_s", "decode_tokens_per_s"
BYTES, PRODUCTS = "bytes_per_s", "products_per_s"
OUTPUT, FIRST = "output_tokens_per_s", "first_token_ms"
# The ratios to llama.cpp that this engine is to reach: (setting, requests) of a figure.
AIMS = {
    (PROMPT, "off", 1): 3.0,
    (PROMPT, "adaptive", 1): 3.0,
    (DECODE, "off", 1): 1.3,
    (DECODE, "adaptive", 1): 2.0,
    (DECODE, "off", 8): 2.5,
    (DECODE, "adaptive", 8): 2.5,
    (DECODE, "off", 32): 4.0,
    (DECODE, "adaptive", 32): 4.0,
}
MEMORY_AIM, PRODUCTS_AIM = 0.7, 0.5
# A step without drafts has one row a request, and reads the file's blocks.
WITHOUT_DRAFTS = ("off", BASELINE)


def load_figures(waves: list[list[RequestResult]]) -> dict[str, float]:
    """Return the figures of a load; NaN where there was nothing to measure.

    Args:
        waves: answers of requests that were sent at once, wave after wave.
    """
    prompts, decoding, answers = [], [], []
    for wave in waves:
        start_s = min(one.start_s for one in wave)
        all_began_s = max(one.start_s + one.ttft_s for one in wave)
        num_prompt = sum(one.num_prompt_tokens for one in wave)
        prompts.append((num_prompt, all_began_s - start_s))
        first_ended_s = min(one.start_s + one.latency_s for one in wave)
        if first_ended_s > all_began_s:
            num_decoded = sum(
                tokens_between(one, all_began_s, first_ended_s) for one in wave
            )
            decoding.append((num_decoded, first_ended_s - all_began_s))
        last_ended_s = max(one.start_s + one.latency_s for one in wave)
        num_output = sum(one.num_output_tokens for one in wave)
        answers.append((num_output, last_ended_s - start_s))
    return {
        PROMPT: rate(prompts),
        DECODE: rate(decoding),
        OUTPUT: rate(answers),
        FIRST: 1e3 * statistics.median(one.ttft_s for wave in waves for one in wave),
    }


def tokens_between(result: RequestResult, start_s: float, end_s: float) -> float:
    """Return the tokens that came after `start_s` and not after `end_s`.

    A piece of the stream counts as many tokens as the answer's pieces hold on average:
    a step with drafts brings several, and half a character waits for the next one.
    """
    if not result.itl_s:
        return 0.0
    first_s = result.start_s + result.ttft_s
    times_s = list(accumulate(result.itl_s, initial=first_s))[1:]
    num_pieces = sum(start_s < time_s <= end_s for time_s in times_s)
    return num_pieces * (result.num_output_tokens - 1) / len(times_s)


def rate(parts: Iterable[tuple[float, float]]) -> float:
    """Return the rate over all parts (number, seconds); NaN without any."""
    numbers, seconds = zip(*parts, strict=True) if parts else ((), ())
    return sum(numbers) / sum(seconds) if seconds else math.nan


@dataclass
class PeersReport:
    """Figures of every engine in every round.

    Args:
        engines: their names, in the order of the tables.
        concurrencies: requests at once.
        step_bytes: of weights that a step reads at least.
        token_products: multiply-adds of a token with the weights.
        loads: (engine, concurrency) -> `load_figures` of each round.
        processes: engine -> start-up time and memory of each round, and where they
            could be measured the machine's limits just before.
    """

    engines: list[str]
    concurrencies: list[int]
    step_bytes: int
    token_products: int
    loads: dict[tuple[str, int], list[dict[str, float]]] = field(default_factory=dict)
    processes: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def add_load(
        self, engine: str, concurrency: int, figures: dict[str, float]
    ) -> None:
        """Take the figures of one round."""
        self.loads.setdefault((engine, concurrency), []).append(figures)

    def add_process(self, engine: str, figures: dict[str, float]) -> None:
        """Take what starting and holding an engine took in one round."""
        self.processes.setdefault(engine, []).append(figures)

    def median(self, engine: str, concurrency: int, name: str) -> float:
        """Return a figure's median over the rounds that have it; NaN without any."""
        rounds = self.loads[engine, concurrency]
        return _median(figures[name] for figures in rounds)

    def ratio(self, engine: str, concurrency: int, name: str) -> float | None:
        """Return the median of the rounds' ratios to llama.cpp; None without it."""
        if BASELINE not in self.engines or engine == BASELINE:
            return None
        pairs = zip(
            self.loads[engine, concurrency],
            self.loads[BASELINE, concurrency],
            strict=True,
        )
        return _median(own[name] / peer[name] for own, peer in pairs)

    def shares(self, engine: str) -> dict[str, float]:
        """Return the shares of the machine's limits that decoding reaches.

        `memory` is at one request, `products` at the most requests; empty where a step
        does other work than the file's weights say, or nothing was measured.
        """
        if engine not in WITHOUT_DRAFTS or not self._has_limits():
            return {}
        most = max(self.concurrencies)
        shares = {"products": self._share(engine, most, self.token_products, PRODUCTS)}
        if 1 in self.concurrencies:
            shares["memory"] = self._share(engine, 1, self.step_bytes, BYTES)
        return shares

    def _share(self, engine: str, concurrency: int, work: int, limit: str) -> float:
        rounds = zip(
            self.loads[engine, concurrency], self.processes[engine], strict=True
        )
        return _median(load[DECODE] * work / process[limit] for load, process in rounds)

    def _has_limits(self) -> bool:
        return all(BYTES in one for rounds in self.processes.values() for one in rounds)

    def to_json(self) -> dict[str, Any]:
        """Return everything, for a file; null where there was nothing to measure."""
        names = (PROMPT, DECODE, OUTPUT, FIRST)
        return {
            "loads": [
                {
                    "engine": engine,
                    "requests": concurrency,
                    "medians": {
                        name: _known(self.median(engine, concurrency, name))
                        for name in names
                    },
                    "ratios": {
                        name: _known(self.ratio(engine, concurrency, name))
                        for name in names
                    },
                    "rounds": [
                        {name: _known(value) for name, value in figures.items()}
                        for figures in rounds
                    ],
                }
                for (engine, concurrency), rounds in self.loads.items()
            ],
            "processes": self.processes,
            "shares": {
                engine: {
                    name: _known(value) for name, value in self.shares(engine).items()
                }
                for engine in self.engines
            },
        }

    def format(self) -> str:
        """Return the tables."""
        tables = [self._format_loads(), self._format_processes()]
        if self._has_limits():
            tables.append(self._format_shares())
        return "\n\n".join(tables)

    def _format_loads(self) -> str:
        head = ["requests", "engine", "decode tok/s", "ratio", "aim"]
        head += ["prompt tok/s", "ratio", "aim", "whole tok/s", "ratio", "first, ms"]
        lines = []
        for concurrency in self.concurrencies:
            for engine in self.engines:
                key = engine, concurrency
                lines.append(
                    [
                        str(concurrency),
                        engine,
                        _number(self.median(*key, DECODE)),
                        _ratio(self.ratio(*key, DECODE)),
                        _aim(AIMS.get((DECODE, *key))),
                        _number(self.median(*key, PROMPT)),
                        _ratio(self.ratio(*key, PROMPT)),
                        _aim(AIMS.get((PROMPT, *key))),
                        _number(self.median(*key, OUTPUT)),
                        _ratio(self.ratio(*key, OUTPUT)),
                        _number(self.median(*key, FIRST)),
                    ]
                )
        return format_table(head, lines)

    def _format_processes(self) -> str:
        lines = []
        for engine in self.engines:
            rounds = self.processes[engine]
            startup_s, memory_mib = (
                statistics.median(figures[name] for figures in rounds)
                for name in ("startup_s", "peak_memory_mib")
            )
            lines.append([engine, f"{startup_s:.1f}", f"{memory_mib:,.0f}"])
        return format_table(["engine", "start-up, s", "peak memory, MiB"], lines)

    def _format_shares(self) -> str:
        lines = [
            [
                engine,
                _percent(shares.get("memory")),
                _percent(MEMORY_AIM),
                _percent(shares.get("products")),
                _percent(PRODUCTS_AIM),
            ]
            for engine in self.engines
            if (shares := self.shares(engine))
        ]
        most = max(self.concurrencies)
        head = ["engine", "memory's rate, 1 request", "aim"]
        head += [f"products' rate, {most} requests", "aim"]
        bytes_per_s, products_per_s = (
            statistics.median(
                one[name] for rounds in self.processes.values() for one in rounds
            )
            for name in (BYTES, PRODUCTS)
        )
        return (
            f"{format_table(head, lines)}\n\nThis machine reads "
            f"{bytes_per_s / 1e9:.1f} GB/s, and multiplies and adds "
            f"{products_per_s / 1e9:.0f} G bytes/s."
        )

    def draw(self, path: str) -> None:
        """Write a picture: tokens per second of every engine at each concurrency."""
        figure = import_module("matplotlib.figure").Figure(
            figsize=(3.5 * len(self.concurrencies), 4), layout="constrained"
        )
        for place, concurrency in enumerate(self.concurrencies, start=1):
            axes = figure.add_subplot(1, len(self.concurrencies), place)
            rates = [self.median(e, concurrency, DECODE) for e in self.engines]
            bars = axes.bar(self.engines, rates, color="#9aa5b1")
            for engine, bar in zip(self.engines, bars, strict=True):
                aim = AIMS.get((DECODE, engine, concurrency))
                if engine in OURS:
                    bar.set_color("#2b6cb0")
                if aim is None or BASELINE not in self.engines:
                    continue
                level = aim * self.median(BASELINE, concurrency, DECODE)
                ends = bar.get_x(), bar.get_x() + bar.get_width()
                axes.plot(ends, (level, level), color="black", linestyle="--")
            axes.bar_label(bars, fmt="%.0f")
            requests = "request" if concurrency == 1 else "requests"
            axes.set_title(f"{concurrency} {requests}")
            axes.tick_params(axis="x", labelrotation=30)
        figure.supylabel("decoded tokens per second (dashed: the aim)")
        figure.savefig(path, dpi=120)


def _median(values: Iterable[float]) -> float:
    # NaN has no place in an order.
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


def _aim(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.0%}"
