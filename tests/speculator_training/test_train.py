import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from tests.model_executor.dspark_harness import load_drafter
from tests.model_executor.harness import load
from tests.speculator_training.tiny_target import QUICK, command, save_target
from vllm.entrypoints.cli.main import main
from vllm.speculator_training import trainer as trainer_module
from vllm.speculator_training.report import write_report
from vllm.speculator_training.rollout import Rollouts
from vllm.speculator_training.settings import TrainSettings
from vllm.speculator_training.trainer import learning_rate
from vllm.transformers_utils.configs.dspark import load_dspark_config

DRAFTER_FILES = {"config.json", "model.safetensors", "report.json", "report.md"}
# Dies while the second checkpoint is beside its place.
DYING = """
import os, signal, sys, torch
from vllm.entrypoints.cli.main import main
save, saved = torch.save, []
def dying_save(state, file):
    save(state, file)
    saved.append(file)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = dying_save
main(sys.argv[1:])
"""
ENGINE = {"kv-cache-memory-bytes": "16M"}


def train(target, output, **changes) -> list[str]:
    return command("train", target, output=output, **(QUICK | changes))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """Return the folder of a drafter that was trained without a break."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    assert main(train(target, output)) == 0
    return output


def copy_data(trained, output):
    """Begin a run that has its answers already."""
    shutil.copytree(trained / "training" / "data", output / "training" / "data")
    shutil.copy(trained / "training" / "settings.json", output / "training")


def test_the_result_is_a_drafter_that_the_engine_loads(target, trained):
    assert {path.name for path in trained.iterdir()} >= DRAFTER_FILES
    config = load_dspark_config(str(trained))
    assert (config.num_draft_tokens, config.draft_vocab_size) == (3, 64)
    assert len(config.confidence_temperatures) == 3
    model = load_drafter(trained, load(str(target)))
    hidden = torch.zeros(2, config.backbone.hidden_size)
    assert model.compute_base_logits(hidden).shape == (2, 64)


def test_the_report_has_every_figure(trained):
    report = json.loads((trained / "report.json").read_text())
    assert {"temperature", "accepted_length", "acceptance"} <= set(report["regimes"][0])
    assert [fit["temperature"] for fit in report["calibration"]["positions"]] == list(
        load_dspark_config(str(trained)).confidence_temperatures
    )
    history = report["history"]
    assert history[-1]["step"] == report["cost"]["steps"] > history[0]["step"]
    assert history[-1]["held_out_loss"] > 0
    assert report["cost"]["answer_tokens"] > 300
    text = (trained / "report.md").read_text()
    assert "ECE before" in text
    assert "reliability plot" in text or "reliability.png" in text


def test_a_run_killed_in_the_middle_goes_on_to_the_same_weights(
    target, trained, tmp_path
):
    output = tmp_path / "killed"
    argv = train(target, output)
    done = subprocess.run(
        [sys.executable, "-c", DYING, *argv], stderr=subprocess.DEVNULL, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert (output / "training" / "checkpoint.pt").exists()
    assert not (output / "config.json").exists()
    assert main([*argv, "--resume"]) == 0
    assert_equal_weights(output, trained)


def test_a_checkpoint_that_was_being_written_is_not_used(
    target, trained, tmp_path, monkeypatch
):
    output = tmp_path / "broken"
    copy_data(trained, output)
    save = torch.save
    num_saved = 0

    def save_twice(state, file):
        nonlocal num_saved
        num_saved += 1
        if num_saved == 3:
            file.write(b"half")
            raise OSError("the power is gone")
        save(state, file)

    monkeypatch.setattr(trainer_module.torch, "save", save_twice)
    assert main([*train(target, output), "--resume"]) == 1
    monkeypatch.undo()
    assert not (output / "config.json").exists()
    assert main([*train(target, output), "--resume"]) == 0
    assert_equal_weights(output, trained)


def test_another_seed_gives_another_drafter(target, trained, tmp_path):
    assert main(train(target, tmp_path / "other", seed=5)) == 0
    ours, theirs = (
        load_file(f / "model.safetensors") for f in (trained, tmp_path / "other")
    )
    assert not torch.equal(ours["fc.weight"], theirs["fc.weight"])


def test_states_that_are_not_kept_give_the_same_drafter(target, trained, tmp_path):
    for name, size in (("kept", "1G"), ("again", "0")):
        output = tmp_path / name
        flags = {"max-cache-bytes": size, "feature-dtype": "float32"}
        assert main(train(target, output, **flags)) == 0
        assert (output / "training" / "states.bin").exists() == (name == "kept")
    assert_equal_weights(tmp_path / "kept", tmp_path / "again")


def test_a_file_of_prompts_needs_no_template(tmp_path, capsys):
    target = save_target(tmp_path / "target", template=None)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(12)))
    output = tmp_path / "out"
    assert main(train(target, output, prompts=prompts)) == 0
    chunk = (output / "training" / "data" / "00000.jsonl").read_text().splitlines()
    assert len(chunk) == 12
    assert json.loads(chunk[3])["conversation"][0]["content"] == "prompt 3"

    prompts.write_text("another file\n")
    argv = [*train(target, output, prompts=prompts), "--resume"]
    expect_error(capsys, argv, "prompts_digest was", 2)


def test_evaluate_prints_and_writes_a_report(target, trained, tmp_path, capsys):
    flags = {"num-prompts": 8, "max-answer-tokens": 20} | ENGINE
    argv = command("evaluate", target, speculator=trained, output=tmp_path, **flags)
    assert main(argv) == 0
    assert "tokens a round" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {regime["temperature"] for regime in report["regimes"]} == {0.0, 1.0}


def test_calibrate_changes_only_the_temperatures(target, trained, tmp_path):
    folder = tmp_path / "drafter"
    shutil.copytree(trained, folder)
    raw = json.loads((folder / "config.json").read_text())
    before = raw.pop("confidence_temperatures")
    (folder / "config.json").write_text(json.dumps(raw))
    flags = {"num-prompts": 16, "max-answer-tokens": 20} | ENGINE
    assert main(command("calibrate", target, speculator=folder, **flags)) == 0
    after = json.loads((folder / "config.json").read_text())
    assert len(after.pop("confidence_temperatures")) == len(before)
    assert after == raw


def expect_error(capsys, argv, reason, code):
    assert main(argv) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert reason in lines[-1]
    assert lines[-1].startswith("error: ")


def test_a_missing_template_is_told_before_anything_is_written(tmp_path, capsys):
    target = save_target(tmp_path / "target", template=None)
    argv = train(target, tmp_path / "out")
    expect_error(capsys, argv, "no chat template", 1)
    assert not (tmp_path / "out").exists()


def test_too_small_a_disk_is_told_before_anything_is_written(
    target, tmp_path, capsys, monkeypatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 100_000))
    argv = train(target, tmp_path / "out")
    expect_error(capsys, argv, "of disk and has 0.00 GB: lower", 1)
    assert not (tmp_path / "out").exists()


def test_too_short_answers_leave_no_drafter(target, tmp_path, capsys):
    argv = train(target, tmp_path / "out", **{"max-answer-tokens": 5})
    expect_error(capsys, argv, "the answers are too short: 0 of 24", 1)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_loss_that_is_no_number_leaves_no_drafter(target, trained, tmp_path, capsys):
    output = tmp_path / "out"
    flags = {"learning-rate": 1e30, "max-grad-norm": 1e30}
    argv = train(target, output, **flags)
    expect_error(capsys, argv, "not a number at step", 1)
    assert not (output / "config.json").exists()


def test_a_folder_in_use_is_not_overwritten(target, trained, capsys):
    before = (trained / "model.safetensors").read_bytes()
    expect_error(capsys, train(target, trained), "is not empty", 2)
    changed = [*train(target, trained, seed=9), "--resume"]
    expect_error(capsys, changed, "seed was 0 when the run began and is 9", 2)
    assert (trained / "model.safetensors").read_bytes() == before


def test_a_folder_of_something_else_is_not_resumed(target, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    argv = [*train(target, tmp_path), "--resume"]
    expect_error(capsys, argv, "holds no run to go on with", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_last_layer_is_not_tapped(target, tmp_path, capsys):
    argv = train(target, tmp_path / "out", **{"target-layer-ids": "1,3"})
    expect_error(capsys, argv, "tapped layer", 1)
    assert not (tmp_path / "out").exists()


def test_the_learning_rate_rises_and_falls():
    settings = TrainSettings(learning_rate=1.0, warmup_ratio=0.2)
    rates = [learning_rate(step, 10, settings) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    # Half way down a cosine over eight steps.
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.0380602)


def test_a_plot_is_drawn_where_matplotlib_is_installed(tmp_path):
    pytest.importorskip("matplotlib")
    rollouts = [
        Rollouts(0.0, True, torch.zeros(4, 2), torch.ones(4, 2, dtype=torch.bool))
    ]
    report = {"model": "m", "regimes": [], "calibration": None}
    write_report(str(tmp_path), report, rollouts, (1.0, 2.0))
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")


def assert_equal_weights(left, right):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
