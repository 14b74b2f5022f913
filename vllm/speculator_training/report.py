"""What a drafter is worth, as numbers, as text and as a picture."""

import json
import os
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from vllm.speculator_training.calibration import (
    compute_survival,
    judge_temperatures,
    reliability,
)
from vllm.speculator_training.rollout import Rollouts

_PLOT = "reliability.png"


def pool(rollouts: list[Rollouts]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the confidence logits [n, K], if any, and acceptances of rollouts.

    Of those that are drafted as the text is sampled, where there are any: one
    confidence cannot be true of a best guess and of a draw.
    """
    usual = [r for r in rollouts if r.is_greedy == (r.temperature == 0)]
    rollouts = usual or rollouts
    logits = [r.confidence_logits for r in rollouts if r.confidence_logits is not None]
    stacked = torch.cat(logits) if logits else None
    return stacked, torch.cat([r.is_accepted for r in rollouts])


def measure(
    rollouts: list[Rollouts], temperatures: tuple[float, ...]
) -> dict[str, Any]:
    """Return the part of a report that any drafter has.

    Args:
        temperatures: of its confidences; none for 1.
    """
    regimes = [
        {
            "temperature": r.temperature,
            "drafts": "greedy" if r.is_greedy else "probabilistic",
            "num_blocks": len(r.is_accepted),
            "accepted_length": r.accepted_length,
            "acceptance": r.acceptance,
            "survival": r.survival,
        }
        for r in rollouts
    ]
    logits, is_accepted = pool(rollouts)
    calibration = None
    if logits is not None:
        fits = judge_temperatures(logits, is_accepted, temperatures)
        calibration = {
            "is_calibrated": bool(temperatures),
            "positions": [asdict(fit) for fit in fits],
        }
    return {"regimes": regimes, "calibration": calibration}


def write_report(
    folder: str,
    report: dict[str, Any],
    rollouts: list[Rollouts],
    temperatures: tuple[float, ...],
) -> None:
    """Write report.json, report.md and, with matplotlib, a reliability plot."""
    os.makedirs(folder, exist_ok=True)
    plot = _draw_reliability(folder, rollouts, temperatures)
    _write(folder, "report.json", json.dumps(report, indent=2) + "\n")
    _write(folder, "report.md", f"{format_report(report)}\n{plot}\n")


def format_report(report: dict[str, Any]) -> str:
    """Return a report in Markdown."""
    lines = [f"# Drafter for {report['model']}", ""]
    lines += _table(
        ["temperature", "drafts", "blocks", "tokens a round", "acceptance by position"],
        [
            [
                f"{regime['temperature']:g}",
                regime["drafts"],
                str(regime["num_blocks"]),
                f"{regime['accepted_length']:.3f}",
                " ".join(f"{a:.3f}" for a in regime["acceptance"]),
            ]
            for regime in report["regimes"]
        ],
    )
    lines += [
        "Tokens a round count the bonus token; acceptance is of drafts whose "
        "predecessors were accepted.",
        "",
    ]
    if report["calibration"]:
        lines += _format_calibration(report["calibration"])
    if report.get("history"):
        lines += ["## Training", ""]
        names = list(report["history"][-1])
        lines += _table(
            [name.replace("_", " ") for name in names],
            [
                [f"{row[name]:.4g}" if name in row else "" for name in names]
                for row in report["history"]
            ],
        )
    if report.get("cost"):
        lines += ["## Cost", ""]
        rows = [[n.replace("_", " "), f"{v:,.0f}"] for n, v in report["cost"].items()]
        lines += _table(["what", "how much"], rows)
    return "\n".join(lines)


def _format_calibration(calibration: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(k),
            f"{fit['temperature']:.3f}",
            *(f"{100 * fit[f'ece_{when}']:.2f} %" for when in ("before", "after")),
            *(f"{fit[f'brier_{when}']:.4f}" for when in ("before", "after")),
        ]
        for k, fit in enumerate(calibration["positions"], 1)
    ]
    head = ["draft", "temperature", "ECE before", "after", "Brier before", "after"]
    title = "## Survival, predicted against true"
    note = [] if calibration["is_calibrated"] else ["Not calibrated.", ""]
    return [title, "", *note, *_table(head, rows)]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _draw_reliability(
    folder: str, rollouts: list[Rollouts], temperatures: tuple[float, ...]
) -> str:
    """Write the plot, and return the line of the report that shows it."""
    logits, is_accepted = pool(rollouts)
    if logits is None:
        return "The drafter predicts no confidence: there is no reliability plot."
    if find_spec("matplotlib") is None:
        return (
            "There is no reliability plot: `pip install 'vllm[plot]'`, then "
            "`vllm speculator evaluate`."
        )
    figure = import_module("matplotlib.figure").Figure(
        figsize=(9, 4.5), layout="constrained"
    )
    columns = (("before", ()), ("after", temperatures))
    for number, (title, used) in enumerate(columns, 1):
        axes = figure.add_subplot(1, len(columns), number)
        axes.plot([0, 1], [0, 1], "--", color="grey")
        survival = compute_survival(logits, used)
        for k in range(survival.shape[1]):
            bins = reliability(survival[:, k], is_accepted[:, k])
            means, rates, _ = zip(*bins, strict=True)
            axes.plot(means, rates, marker=".", label=f"draft {k + 1}")
        axes.set_title(f"{title} calibration")
        axes.set_xlabel("predicted survival")
        axes.set_ylabel("true survival")
        axes.legend()
    partial = os.path.join(folder, f"{_PLOT}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, os.path.join(folder, _PLOT))
    return f"![Reliability]({_PLOT})"


def _write(folder: str, name: str, text: str) -> None:
    path = os.path.join(folder, name)
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.partial", path)
