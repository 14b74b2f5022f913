"""The benchmark of speculation: its sums, its prompts, and a run on a tiny model."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vllm
from tests.v1.e2e.tiny_drafter import save_tiny_drafter
from tests.v1.e2e.tiny_engine import save_tiny_model
from vllm.speculator_training.prompts import read_prompts

FOLDER = Path(vllm.__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("speculative_decoding")


def answer(token_ids: list[int], elapsed_s: float, *counts: int) -> dict[str, object]:
    names = ("num_drafts", "num_admitted_tokens", "num_accepted_tokens")
    counters = dict(zip(names, counts or (0, 0, 0), strict=True))
    return {"token_ids": token_ids, "elapsed_s": elapsed_s, **counters}


def test_rates_are_medians_and_ratios_compare_the_same_prompt(benchmark):
    figures = benchmark.summarise(
        {
            "off": [answer([1] * 10, 1.0), answer([1] * 10, 2.0), answer([1], 1.0)],
            "dspark": [
                answer([1] * 10, 0.5, 4, 20, 6),
                answer([1] * 10, 0.5, 4, 20, 6),
                answer([1], 0.25, 2, 10, 3),
            ],
        }
    )
    assert figures["off"] == {
        "tokens_per_s": 5.0,
        "ratio_to_off": 1.0,
        "accepted_length": None,
        "acceptance_rate": None,
    }
    assert figures["dspark"] == {
        "tokens_per_s": 20.0,
        "ratio_to_off": 4.0,
        "accepted_length": 2.5,
        "acceptance_rate": 0.3,
    }


def test_answers_that_differ_are_named_with_their_place(benchmark):
    answers = {
        "off": [answer([1, 2, 3], 1.0), answer([1, 2], 1.0)],
        "ngram": [answer([1, 2, 3], 1.0), answer([1, 2, 3], 1.0)],
        "dspark": [answer([1, 9, 3], 1.0), answer([1, 2], 1.0)],
    }
    assert benchmark.find_differences(answers) == [
        "prompt 1: ngram differs at token 2",
        "prompt 0: dspark differs at token 1",
    ]


def test_the_prompts_are_twenty_of_many_kinds(benchmark):
    lines = benchmark.PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(read_prompts(str(benchmark.PROMPTS))) == len(lines) == 20
    assert len({json.loads(line)["topic"] for line in lines}) >= 5


def test_every_engine_gets_the_quantization_that_is_asked_for(benchmark, monkeypatch):
    started = []

    class Worker:
        def __init__(self, script: str, setting: str, *flags: str) -> None:
            self.flags = [script, "--worker", setting, *flags]

        def order(self, **order: object) -> dict[str, object]:
            return answer([1], 1.0)

        def close(self) -> None:
            # What the process of this engine does with its flags.
            monkeypatch.setattr(sys, "argv", self.flags)
            args = benchmark.parse_args()
            benchmark.make_engine(
                args.worker, args.model, args.drafter, args.quantization
            )

    monkeypatch.setattr(benchmark, "Worker", Worker)
    monkeypatch.setattr(
        vllm, "LLM", lambda model, **kwargs: started.append(kwargs["quantization"])
    )
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quantization=none"])
    assert benchmark.main() == 0
    assert started == ["none"] * 3


def test_a_run_compares_three_settings(tmp_path: Path):
    folders = [tmp_path / name for name in ("model", "drafter")]
    for folder in folders:
        folder.mkdir()
    model, drafter = folders
    save_tiny_model(model)
    template = "{% for m in messages %}{{ m.content[:9] }}{% endfor %}"
    path = model / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(tokenizer))
    save_tiny_drafter(drafter, model)
    figures_path = tmp_path / "figures.json"
    command = [sys.executable, str(FOLDER / "speculative_decoding.py")]
    command += [f"--model={model}", f"--drafter={drafter}", f"--json={figures_path}"]
    command += ["--num-prompts=2", "--max-tokens=8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "All settings gave the same tokens." in run.stdout
    figures = json.loads(figures_path.read_text())
    assert list(figures) == ["off", "ngram", "dspark"]
    assert figures["dspark"]["accepted_length"] >= 1
    assert figures["off"]["accepted_length"] is None
