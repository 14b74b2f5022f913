"""Judge and calibrate a drafter that is there, on answers that it has never seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.speculator_training.batches import Drafting
from vllm.speculator_training.calibration import fit_temperatures, write_temperatures
from vllm.speculator_training.dataset import make_sequences
from vllm.speculator_training.drafter import open_drafter
from vllm.speculator_training.features import FeatureStore, TargetRunner
from vllm.speculator_training.generate import Answer
from vllm.speculator_training.report import measure, pool, write_report
from vllm.speculator_training.rollout import Rollouts, roll_out
from vllm.speculator_training.settings import TrainingError
from vllm.speculator_training.trainer import training_threads
from vllm.transformers_utils.configs.dspark import (
    DSparkConfig,
    check_fits_target,
    load_dspark_config,
)

_BATCH_SIZE = 8
_NUM_ANCHORS = 64


def evaluate(
    folder: str,
    vllm_config: VllmConfig,
    make_answers: Callable[[], list[Answer]],
    output: str | None,
    seed: int,
) -> dict[str, Any]:
    """Return the report of a drafter.

    Args:
        folder: of the drafter.
        vllm_config: of the target.
        make_answers: generates what to judge it by.
        output: folder to write the report to as well.
    """
    config = _open(folder, vllm_config)
    rollouts = _roll_out_folder(folder, config, vllm_config, make_answers(), seed)
    temperatures = config.confidence_temperatures
    model = vllm_config.model_config.served_model_name[0]
    report = {"model": model, "speculator": folder} | measure(rollouts, temperatures)
    if output is not None:
        write_report(output, report, rollouts, temperatures)
    return report


def calibrate(
    folder: str,
    vllm_config: VllmConfig,
    make_answers: Callable[[], list[Answer]],
    seed: int,
) -> dict[str, Any]:
    """Fit the temperatures of a drafter, write them to its config.json, and report.

    Half of the answers is fitted to, the other half is reported on.

    Args:
        folder: of the drafter.
        vllm_config: of the target.
        make_answers: generates what to fit to.
    """
    config = _open(folder, vllm_config)
    if not config.enable_confidence_head:
        raise TrainingError(f"{folder}: the drafter predicts no confidence")
    answers = make_answers()
    # Neighbours differ in temperature: pairs keep the mix of both halves.
    halves = [
        [answer for i, answer in enumerate(answers) if i // 2 % 2 == half]
        for half in (0, 1)
    ]
    fitted, judged = (
        _roll_out_folder(folder, config, vllm_config, half, seed) for half in halves
    )
    temperatures = fit(fitted)
    write_temperatures(folder, temperatures)
    model = vllm_config.model_config.served_model_name[0]
    return {"model": model, "speculator": folder} | measure(judged, temperatures)


def fit(rollouts: list[Rollouts]) -> tuple[float, ...]:
    """Return the temperatures that make the confidences of all rollouts true.

    Raises:
        TrainingError: no answer is as long as a block.
    """
    if not rollouts:
        raise TrainingError(
            "the answers are too short: none holds a whole block of drafts"
        )
    logits, is_accepted = pool(rollouts)
    return () if logits is None else fit_temperatures(logits, is_accepted)


def _open(folder: str, vllm_config: VllmConfig) -> DSparkConfig:
    config = load_dspark_config(folder)
    check_fits_target(config, vllm_config.model_config.hf_config)
    return config


def _roll_out_folder(
    folder: str,
    config: DSparkConfig,
    vllm_config: VllmConfig,
    answers: list[Answer],
    seed: int,
) -> list[Rollouts]:
    sequences = make_sequences(answers, config.num_draft_tokens + 1)
    max_tokens = max(len(sequence.token_ids) for sequence in sequences)
    layer_ids = config.aux_hidden_state_layer_ids
    with training_threads(config.backbone.hidden_size):
        # The drafter adds its temperatures itself where it runs.
        plain = replace(config, confidence_temperatures=())
        runner = TargetRunner(vllm_config, layer_ids, max_tokens)
        num_positions = max_tokens + config.block_size
        model, ids = open_drafter(folder, plain, runner, num_positions)
        store = FeatureStore(runner, sequences, len(layer_ids) + 1, None, torch.float32)
        drafting = Drafting(model, store, ids, _NUM_ANCHORS)
        return roll_out(drafting, list(range(len(sequences))), _BATCH_SIZE, seed)
