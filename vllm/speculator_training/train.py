"""From a model to a drafter for it: prompts, answers, states, training, report."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.speculator_training.batches import Drafting
from vllm.speculator_training.checkpoint import Verifier, save_speculator
from vllm.speculator_training.dataset import (
    Sequence,
    Split,
    choose_draft_vocab,
    choose_mask_token,
    make_sequences,
    split_sequences,
)
from vllm.speculator_training.drafter import make_drafter, make_drafter_config
from vllm.speculator_training.evaluate import fit
from vllm.speculator_training.features import FeatureStore, TargetRunner
from vllm.speculator_training.generate import Answer
from vllm.speculator_training.initial import start_from_target
from vllm.speculator_training.report import measure, write_report
from vllm.speculator_training.rollout import roll_out
from vllm.speculator_training.settings import (
    DataSettings,
    DrafterSettings,
    TrainingError,
    TrainSettings,
)
from vllm.speculator_training.trainer import Trainer, training_threads
from vllm.transformers_utils.configs.dspark import DSparkConfig
from vllm.transformers_utils.tokenizer import Tokenizer

# What a run keeps to go on from; the drafter beside it does not need it.
WORK_FOLDER = "training"
DATA_FOLDER = "data"
_SETTINGS = "settings.json"
_FEATURES = "states.bin"
# Sequences that a drafter's first weights are fitted to.
_NUM_FITTED = 256
# Of text and checkpoints, roughly: weights, two moments and a copy, in float32.
_BYTES_PER_TOKEN = 12
_CHECKPOINT_BYTES_PER_WEIGHT = 4 * (3 + 3 + 1)


@dataclass(frozen=True)
class TrainJob:
    """One run of `vllm speculator train`.

    Args:
        output: folder of the drafter.
        resume: go on in a folder that is not empty.
        prompts: file of prompts; None lets the model write them.
    """

    vllm_config: VllmConfig
    output: str
    data: DataSettings = field(default_factory=DataSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    prompts: str | None = None
    resume: bool = False

    @property
    def work_folder(self) -> str:
        """Where the run's own files are."""
        return os.path.join(self.output, WORK_FOLDER)

    @property
    def data_folder(self) -> str:
        """Where the answers are."""
        return os.path.join(self.work_folder, DATA_FOLDER)


class _Cost:
    """Seconds of each stage, over all runs of a folder."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "cost.json")
        self.seconds: dict[str, float] = {}
        if os.path.exists(self._path):
            with open(self._path, encoding="utf-8") as file:
                self.seconds = json.load(file)

    @contextmanager
    def stage(self, name: str) -> Any:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent = self.seconds.get(name, 0.0) + time.perf_counter() - start_s
            self.seconds[name] = spent
            _write_json(self._path, self.seconds)


def prepare(job: TrainJob) -> None:
    """Check what can be checked before hours are spent, and claim the folder.

    Raises:
        VLLMValidationError: the folder holds something else.
        TrainingError: the disk is too small.
        UnsupportedError: the drafter cannot be made.
    """
    target = job.vllm_config.model_config.hf_config
    config = make_drafter_config(job.drafter, target, job.drafter.mask_token_id or 0)
    _check_folder(job)
    needed = _needed_bytes(job, config)
    parent = os.path.abspath(job.output)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    states = os.path.join(job.work_folder, _FEATURES)
    held = os.path.getsize(states) if os.path.exists(states) else 0
    free = shutil.disk_usage(parent).free + held
    if needed > free:
        raise TrainingError(
            f"{job.output} needs {needed / 1e9:.2f} GB of disk and has "
            f"{free / 1e9:.2f} GB: lower --max-cache-bytes or --num-prompts"
        )
    os.makedirs(job.data_folder, exist_ok=True)
    _write_json(os.path.join(job.work_folder, _SETTINGS), _settings(job))


def train(job: TrainJob, make_answers: Callable[[], list[Answer]]) -> dict[str, Any]:
    """Train a drafter, write it and its report, and return the report.

    Args:
        job: after `prepare`.
        make_answers: generates into the job's data folder; its engine is gone when it
            returns.
    """
    cost = _Cost(job.work_folder)
    with cost.stage("answers"):
        answers = make_answers()
    sequences = make_sequences(answers, job.training.min_answer_tokens)
    split = split_sequences(len(sequences), job.training.held_out_ratio, job.data.seed)
    config, draft_token_ids = _choose_config(job, sequences, split)
    with training_threads(config.backbone.hidden_size):
        with cost.stage("states"):
            store = _make_store(job, config, sequences)
            store.fill()
        drafting = _make_drafting(job, config, store, draft_token_ids, split)
        with cost.stage("training"):
            trainer = Trainer(
                drafting,
                job.training,
                split.train,
                split.test,
                job.work_folder,
                job.data.seed,
            )
            trainer.run()
        drafting.model.eval()
        save_dtype = getattr(torch, job.training.save_dtype)
        drafting.model.round_to(save_dtype)
        exact = _make_exact(drafting)
        with cost.stage("calibration"):
            fitted, judged = (
                roll_out(exact, part, job.training.batch_size, job.data.seed)
                for part in (split.calibration, split.test)
            )
            temperatures = fit(fitted)
    if not judged:
        raise TrainingError(
            "the held-out answers are too short: none holds a whole block of drafts"
        )
    drafting.model.config = replace(config, confidence_temperatures=temperatures)
    model_config = job.vllm_config.model_config
    save_speculator(
        job.output,
        drafting.model,
        Verifier(
            model_config.served_model_name[0], model_config.hf_config.architecture
        ),
        draft_token_ids,
        save_dtype,
    )
    report = {
        "model": model_config.served_model_name[0],
        "settings": _settings(job),
        **measure(judged, temperatures),
        "history": trainer.history,
        "cost": {
            **{f"seconds_{name}": value for name, value in cost.seconds.items()},
            "sequences": len(sequences),
            "held_out_sequences": len(split.test) + len(split.calibration),
            "answer_tokens": sum(len(s.answer_ids) for s in sequences),
            "steps": trainer.num_steps,
            "weights": sum(p.numel() for p in drafting.model.parameters()),
        },
    }
    write_report(job.output, report, judged, temperatures)
    return report


def _check_folder(job: TrainJob) -> None:
    output = job.output
    if os.path.exists(output) and not os.path.isdir(output):
        raise VLLMValidationError(
            f"--output {output} is a file, not a folder", parameter="output"
        )
    if not os.path.isdir(output) or not os.listdir(output):
        return
    if not job.resume:
        raise VLLMValidationError(
            f"--output {output} is not empty: give another folder, or --resume to go "
            "on with the run in it",
            parameter="output",
        )
    path = os.path.join(job.work_folder, _SETTINGS)
    try:
        with open(path, encoding="utf-8") as file:
            before = json.load(file)
    except (OSError, ValueError):
        raise VLLMValidationError(
            f"--resume: {output} holds no run to go on with", parameter="resume"
        ) from None
    # As they would be read back: tuples are lists in JSON.
    now = json.loads(json.dumps(_settings(job)))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise VLLMValidationError(
                f"--resume: {name} was {before.get(name)!r} when the run began and is "
                f"{now.get(name)!r} now",
                parameter="resume",
            )


def _settings(job: TrainJob) -> dict[str, Any]:
    """Return everything that the result depends on, by name."""
    model_config = job.vllm_config.model_config
    return {
        "model": model_config.model,
        "dtype": model_config.dtype,
        "max_model_len": model_config.max_model_len,
        "prompts": job.prompts,
        "prompts_digest": None if job.prompts is None else _digest(job.prompts),
        **asdict(job.data),
        **asdict(job.drafter),
        **asdict(job.training),
    }


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()


def _needed_bytes(job: TrainJob, config: DSparkConfig) -> int:
    data = job.data
    longest = min(
        2 * data.max_prompt_tokens + data.max_answer_tokens,
        job.vllm_config.model_config.max_model_len,
    )
    num_tokens = data.num_prompts * longest
    num_values = num_tokens * (len(config.target_layer_ids) + 1)
    cache = num_values * config.target_hidden_size * _dtype(job).itemsize
    weights = _count_weights(config)
    return (
        min(cache, job.training.max_cache_bytes)
        + num_tokens * _BYTES_PER_TOKEN
        + weights * _CHECKPOINT_BYTES_PER_WEIGHT
    )


def _count_weights(config: DSparkConfig) -> int:
    backbone, size = config.backbone, config.backbone.hidden_size
    heads = 2 * (backbone.num_attention_heads + backbone.num_key_value_heads)
    layer = size * (heads * backbone.head_dim + 3 * backbone.intermediate_size)
    fused = len(config.target_layer_ids) * config.target_hidden_size * size
    markov = config.markov_rank * (backbone.vocab_size + config.draft_vocab_size)
    return backbone.num_hidden_layers * layer + fused + markov


def _dtype(job: TrainJob) -> torch.dtype:
    return getattr(torch, job.training.feature_dtype)


def _choose_config(
    job: TrainJob, sequences: list[Sequence], split: Split
) -> tuple[DSparkConfig, torch.Tensor | None]:
    """Return the drafter's configuration, and the tokens that it can draft."""
    model_config = job.vllm_config.model_config
    target = model_config.hf_config
    tokenizer = Tokenizer.from_path(model_config.tokenizer)
    mask_token_id = job.drafter.mask_token_id
    if mask_token_id is None:
        mask_token_id = choose_mask_token(
            sequences,
            target.vocab_size,
            tokenizer.max_token_id,
            set(tokenizer.all_special_ids),
        )
    config = make_drafter_config(job.drafter, target, mask_token_id)
    ends = {*target.eos_token_ids, *model_config.generation_eos_token_ids}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    ids = choose_draft_vocab(
        [sequences[idx] for idx in split.train],
        config.draft_vocab_size,
        target.vocab_size,
        sorted(ends),
    )
    return config, ids


def _make_store(
    job: TrainJob, config: DSparkConfig, sequences: list[Sequence]
) -> FeatureStore:
    num_features = len(config.target_layer_ids) + 1
    lengths = [len(sequence.token_ids) for sequence in sequences]
    dtype = _dtype(job)
    num_bytes = sum(lengths) * num_features * config.target_hidden_size * dtype.itemsize
    fits = num_bytes <= job.training.max_cache_bytes
    path = os.path.join(job.work_folder, _FEATURES) if fits else None
    runner = TargetRunner(
        job.vllm_config,
        config.aux_hidden_state_layer_ids,
        max(lengths),
        getattr(torch, job.training.compute_dtype),
    )
    return FeatureStore(runner, sequences, num_features, path, dtype)


def _make_drafting(
    job: TrainJob,
    config: DSparkConfig,
    store: FeatureStore,
    draft_token_ids: torch.Tensor | None,
    split: Split,
) -> Drafting:
    longest = max(len(sequence.token_ids) for sequence in store.sequences)
    model = make_drafter(
        config,
        store.runner,
        draft_token_ids,
        longest + config.block_size,
        job.data.seed,
    )
    start_from_target(model, store, split.train[:_NUM_FITTED])
    return Drafting(
        model,
        store,
        draft_token_ids,
        job.training.num_anchors,
        getattr(torch, job.training.compute_dtype),
    )


def _make_exact(drafting: Drafting) -> Drafting:
    """Return the drafter as it will be served: with products in float32."""
    return Drafting(
        drafting.model,
        drafting.store,
        drafting.draft_token_ids,
        drafting.num_anchors,
    )


def _write_json(path: str, value: dict[str, Any]) -> None:
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
    os.replace(f"{path}.partial", path)
