"""Costs are measured again when anything changes that they depend on, and only then."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.v1.engine.fakes import make_config
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.cost_profile import CostProfile, parse_cost_profile
from vllm.v1.worker.gpu import cost_cache
from vllm.v1.worker.gpu.cost_cache import CostCache

CPU = torch.device("cpu")
PROFILE = CostProfile(((1, 2.5), (8, 4.0)), ((1, 20.0), (64, 90.0)))


@pytest.fixture
def config(tmp_path, monkeypatch) -> VllmConfig:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    for folder in (model, drafter):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    speculative_config = SpeculativeConfig("draft_model", 4, model=str(drafter))
    config = make_config(model)
    return replace(
        config,
        model_config=replace(config.model_config, model=str(model)),
        speculative_config=speculative_config,
    )


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(
        cost_cache.logger,
        "warning",
        lambda message, *values: messages.append(message % values),
    )
    return messages


def test_what_was_measured_is_found_by_the_next_start(config):
    assert CostCache(config, CPU).load() is None
    CostCache(config, CPU).save(PROFILE)
    assert CostCache(config, CPU).load() == PROFILE


def test_who_starts_meanwhile_waits_and_reads_what_was_measured(config, monkeypatch):
    waits, told = threading.Event(), []
    monkeypatch.setattr(cost_cache.logger, "info", lambda message: waits.set())

    def start() -> None:
        cache = CostCache(config, CPU)
        with cache.alone() as has_waited:
            told.append((has_waited, cache.load()))

    second = threading.Thread(target=start)
    with CostCache(config, CPU).alone() as has_waited:
        second.start()
        assert waits.wait(timeout=30)
        CostCache(config, CPU).save(PROFILE)
    second.join(timeout=30)
    assert (has_waited, told) == (False, [(True, PROFILE)])


def test_a_folder_that_cannot_be_made_keeps_nobody_out(config, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.devnull)
    with CostCache(config, CPU).alone() as first, CostCache(config, CPU).alone() as two:
        assert (first, two) == (False, False)


def change_model(config: VllmConfig) -> VllmConfig:
    path = os.path.join(config.model_config.model, "model.safetensors")
    os.utime(path, ns=(1, 1))
    return config


def change_drafter(config: VllmConfig) -> VllmConfig:
    assert config.speculative_config is not None
    with open(f"{config.speculative_config.model}/more.safetensors", "wb") as file:
        file.write(b"more")
    return config


def change_drafts(config: VllmConfig) -> VllmConfig:
    assert config.speculative_config is not None
    speculative_config = replace(config.speculative_config, num_speculative_tokens=5)
    return replace(config, speculative_config=speculative_config)


def change_rows(config: VllmConfig) -> VllmConfig:
    scheduler_config = replace(config.scheduler_config, max_num_seqs=3)
    return replace(config, scheduler_config=scheduler_config)


def change_dtype(config: VllmConfig) -> VllmConfig:
    return replace(config, model_config=replace(config.model_config, dtype="bfloat16"))


def change_quantization(config: VllmConfig) -> VllmConfig:
    assert config.model_config.quantization != "none"
    model_config = replace(config.model_config, quantization="none")
    return replace(config, model_config=model_config)


def change_cache_dtype(config: VllmConfig) -> VllmConfig:
    return replace(
        config, cache_config=replace(config.cache_config, cache_dtype="float16")
    )


@pytest.mark.parametrize(
    "change",
    [
        change_model,
        change_drafter,
        change_drafts,
        change_rows,
        change_dtype,
        change_quantization,
        change_cache_dtype,
    ],
)
def test_another_set_up_is_measured_anew(config, change):
    CostCache(config, CPU).save(PROFILE)
    assert CostCache(change(config), CPU).load() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", "100"),
        ("VLLM_CPU_ISA", "base"),
    ],
)
def test_another_environment_is_measured_anew(config, monkeypatch, name, value):
    CostCache(config, CPU).save(PROFILE)
    monkeypatch.setenv(name, value)
    assert CostCache(config, CPU).load() is None


def test_another_number_of_threads_is_measured_anew(config, monkeypatch):
    CostCache(config, CPU).save(PROFILE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert CostCache(config, CPU).load() is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"setup": {}}', "\xff", "[" * 100_000],
    ids=["empty", "cut", "list", "bare", "no curves", "binary", "deep"],
)
def test_a_damaged_file_is_a_warning_and_measured_again(config, warnings, text):
    cache = CostCache(config, CPU)
    cache.path.parent.mkdir(parents=True)
    cache.path.write_bytes(text.encode("latin-1"))
    assert cache.load() is None
    assert ["measured again" in warning for warning in warnings] == [True]
    cache.save(PROFILE)
    assert CostCache(config, CPU).load() == PROFILE


def test_a_file_of_another_set_up_under_this_name_is_not_believed(config):
    cache = CostCache(config, CPU)
    cache.save(PROFILE)
    document = json.loads(cache.path.read_text())
    document["setup"]["version"] = "0"
    cache.path.write_text(json.dumps(document))
    assert cache.load() is None


def test_the_file_is_a_cost_table_once_its_setup_is_left_out(config):
    cache = CostCache(config, CPU)
    cache.save(PROFILE)
    document = json.loads(cache.path.read_text())
    assert document.pop("setup")["method"] == "draft_model"
    assert parse_cost_profile(document, "file") == PROFILE
    assert list(cache.path.parent.iterdir()) == [cache.path]


def test_a_folder_that_cannot_be_written_is_a_warning(config, monkeypatch, warnings):
    monkeypatch.setenv(
        "VLLM_CACHE_ROOT", config.model_config.model + "/model.safetensors"
    )
    CostCache(config, CPU).save(PROFILE)
    assert ["cannot be kept" in warning for warning in warnings] == [True]
    assert CostCache(config, CPU).load() is None


def test_a_failed_save_leaves_nothing_behind(config, warnings):
    cache = CostCache(config, CPU)
    cache.path.mkdir(parents=True)
    cache.save(PROFILE)
    assert ["cannot be kept" in warning for warning in warnings] == [True]
    assert list(cache.path.parent.iterdir()) == [cache.path]


def test_two_starts_at_once_never_write_one_file(config, monkeypatch):
    names = []
    monkeypatch.setattr(Path, "replace", lambda path, target: names.append(path.name))
    for _ in range(2):
        CostCache(config, CPU).save(PROFILE)
    assert len(set(names)) == 2


def test_a_link_to_nothing_beside_a_models_files_is_no_obstacle(config):
    link = Path(config.model_config.model) / "old.safetensors"
    link.symlink_to("nowhere")
    CostCache(config, CPU).save(PROFILE)
    assert CostCache(config, CPU).load() == PROFILE
    link.unlink()
    assert CostCache(config, CPU).load() is None


def test_other_operators_are_measured_anew(config, monkeypatch, tmp_path):
    CostCache(config, CPU).save(PROFILE)
    (tmp_path / "_C_cpu_new.so").write_bytes(b"operators")
    monkeypatch.setattr(cost_cache.envs, "__file__", str(tmp_path / "envs.py"))
    assert CostCache(config, CPU).load() is None
