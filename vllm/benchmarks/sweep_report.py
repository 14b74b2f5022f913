"""A sweep's figures: medians, ratios, a table and a picture."""

import math
import statistics
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllm.benchmarks.table import format_table

ADAPTIVE, OFF = "adaptive", "off"


@dataclass
class SweepReport:
    """Figures of every engine at every concurrency.

    Args:
        settings: names of the engines, in the order of the table.
        concurrencies: requests that ran at once.
        results: (concurrency, setting) -> figures of each round.
    """

    settings: list[str]
    concurrencies: list[int]
    results: dict[tuple[int, str], list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, concurrency: int, setting: str, figures: dict[str, Any]) -> None:
        """Take the figures of one round."""
        self.results.setdefault((concurrency, setting), []).append(figures)

    def tokens_per_s(self, concurrency: int, setting: str) -> float:
        """Return the median over the rounds."""
        rounds = self.results[concurrency, setting]
        return statistics.median(figures["tokens_per_s"] for figures in rounds)

    def compare(self, concurrency: int) -> dict[str, Any]:
        """Return how the adaptive engine does beside the others; {} without one."""
        others = [setting for setting in self.settings if setting != ADAPTIVE]
        if ADAPTIVE not in self.settings or not others:
            return {}
        best = max(others, key=lambda setting: self.tokens_per_s(concurrency, setting))
        comparison = {
            "best_other": best,
            "adaptive_to_best": self._adaptive_ratio(concurrency, best),
        }
        if OFF in others:
            comparison["adaptive_to_off"] = self._adaptive_ratio(concurrency, OFF)
        return comparison

    def _adaptive_ratio(self, concurrency: int, other: str) -> float:
        """Return the median of the rounds' ratios: a machine drifts between rounds."""
        rounds = zip(
            self.results[concurrency, ADAPTIVE],
            self.results[concurrency, other],
            strict=True,
        )
        return statistics.median(
            mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in rounds
        )

    def verified_drafts(self, concurrency: int, setting: str) -> float | None:
        """Return the verified drafts a request and step; None if nobody counted."""
        totals = [0, 0]
        for figures in self.results[concurrency, setting]:
            drafts = figures["drafts"]
            count = drafts.get("admitted_tokens", drafts.get("draft_tokens"))
            if count is None:
                return None
            totals[0] += count
            totals[1] += figures["num_steps"] * concurrency
        return totals[0] / max(totals[1], 1)

    def to_json(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {
            "results": [
                {
                    "concurrency": concurrency,
                    "setting": setting,
                    "tokens_per_s": self.tokens_per_s(concurrency, setting),
                    "verified_drafts": self.verified_drafts(concurrency, setting),
                    "rounds": rounds,
                }
                for (concurrency, setting), rounds in self.results.items()
            ],
            "comparisons": [
                {"concurrency": concurrency} | self.compare(concurrency)
                for concurrency in self.concurrencies
            ],
        }

    def format(self) -> str:
        """Return a Markdown table of tokens per second and ratios."""
        names = [setting_title(setting) for setting in self.settings]
        head = ["requests", *names, "best other", "adaptive / best", "adaptive / off"]
        lines = []
        for concurrency in self.concurrencies:
            comparison = self.compare(concurrency)
            best = comparison.get("best_other")
            lines.append(
                [
                    str(concurrency),
                    *(
                        f"{self.tokens_per_s(concurrency, s):.1f}"
                        for s in self.settings
                    ),
                    setting_title(best) if best else "",
                    _ratio(comparison.get("adaptive_to_best")),
                    _ratio(comparison.get("adaptive_to_off")),
                ]
            )
        return format_table(head, lines)

    def draw(self, path: str) -> None:
        """Write a picture: speed by load, and drafts that were verified by load."""
        figure = import_module("matplotlib.figure").Figure(
            figsize=(10, 4.5), layout="constrained"
        )
        speed, budget = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
        for setting in self.settings:
            style: dict[str, Any] = {"marker": ".", "label": setting_title(setting)}
            if setting == ADAPTIVE:
                style |= {"linewidth": 2.5, "color": "black", "zorder": 3}
            rates = [self.tokens_per_s(c, setting) for c in self.concurrencies]
            speed.plot(self.concurrencies, rates, **style)
            drafts = [self.verified_drafts(c, setting) for c in self.concurrencies]
            counts = [math.nan if count is None else count for count in drafts]
            budget.plot(self.concurrencies, counts, **style)
        speed.set_ylabel("output tokens per second")
        budget.set_ylabel("verified drafts, a request and step")
        for axes in speed, budget:
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.concurrencies, labels=map(str, self.concurrencies))
            axes.set_xlabel("requests at once")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        speed.legend()
        figure.savefig(path, dpi=120)


def setting_title(setting: str) -> str:
    """Return what a setting is called in tables."""
    return f"fixed {setting}" if setting.isdigit() else setting


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
