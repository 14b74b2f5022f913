"""The training loop: every step follows from the seed and its number alone."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm

from vllm.speculator_training.batches import Drafting
from vllm.speculator_training.losses import compute_expected_length
from vllm.speculator_training.settings import TrainingError, TrainSettings

_CHECKPOINT = "checkpoint.pt"
# Below this width, handing work to threads costs more than it saves.
_MIN_THREADED_WIDTH = 256
# Sequences that the held-out loss is taken of while training.
_NUM_WATCHED = 32


class Trainer:
    """Trains a drafter on some sequences.

    Args:
        train: indices of the sequences.
        held_out: those that the progress is judged by.
        folder: of the checkpoint, which a new run goes on from.
        seed: of the order of the sequences and of the anchors.
    """

    def __init__(
        self,
        drafting: Drafting,
        settings: TrainSettings,
        train: list[int],
        held_out: list[int],
        folder: str,
        seed: int,
    ) -> None:
        self.drafting = drafting
        self.settings = settings
        self.train = train
        self.held_out = held_out[:_NUM_WATCHED]
        self.path = os.path.join(folder, _CHECKPOINT)
        self.seed = seed
        self.steps_per_epoch = math.ceil(len(train) / settings.batch_size)
        self.num_steps = settings.num_epochs * self.steps_per_epoch
        self.step = 0
        self.seconds = 0.0
        # Figures at each checkpoint.
        self.history: list[dict[str, float]] = []
        self.optimizer = torch.optim.AdamW(
            drafting.model.parameters(),
            lr=settings.learning_rate,
            weight_decay=0.0,
            fused=True,
        )

    def run(self) -> None:
        """Train to the end, from the last checkpoint if there is one.

        Raises:
            TrainingError: the loss is no number, or the checkpoint is damaged.
        """
        self._load()
        self.drafting.model.train()
        with tqdm(
            total=self.num_steps, initial=self.step, desc="Training", unit="step"
        ) as bar:
            while self.step < self.num_steps:
                start_s = time.perf_counter()
                figures = self._run_step()
                self.step += 1
                is_last = self.step == self.num_steps
                if is_last or self.step % self.settings.checkpoint_steps == 0:
                    self.history.append(figures | self._judge())
                self.seconds += time.perf_counter() - start_s
                if is_last or self.step % self.settings.checkpoint_steps == 0:
                    self._save()
                bar.set_postfix(loss=f"{figures['loss']:.3f}", refresh=False)
                bar.update(1)

    def _run_step(self) -> dict[str, float]:
        settings, model = self.settings, self.drafting.model
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.num_steps, settings)
        generator = torch.Generator().manual_seed(_seed(self.seed, self.step, 1))
        batch = self.drafting.run(self._indices(self.step), generator)
        self.optimizer.zero_grad()
        losses = self.drafting.backward(batch, settings.loss_weights)
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), settings.max_grad_norm
        )
        if not (losses.total.isfinite() and norm.isfinite()):
            raise TrainingError(
                f"the loss is not a number at step {self.step + 1} of "
                f"{self.num_steps}: start again with a lower --learning-rate than "
                f"{settings.learning_rate:g}"
            )
        self.optimizer.step()
        return {
            "step": self.step + 1,
            "loss": float(losses.total.detach()),
            "cross_entropy": float(losses.cross_entropy.detach()),
            "total_variation": float(losses.total_variation.detach()),
            "distillation": float(losses.distillation.detach()),
            "confidence": float(losses.confidence.detach()),
        }

    @torch.no_grad()
    def _judge(self) -> dict[str, float]:
        """Return the held-out loss and expected length at temperature 1."""
        # The same anchors every time.
        generator = torch.Generator().manual_seed(self.seed)
        totals, acceptances, sizes = [], [], []
        for start in range(0, len(self.held_out), self.settings.batch_size):
            indices = self.held_out[start : start + self.settings.batch_size]
            batch = self.drafting.run(indices, generator)
            losses = self.drafting.compute_losses(batch, self.settings.loss_weights)
            totals.append(float(losses.total) * len(indices))
            sizes.append(len(indices))
            acceptances.append(losses.acceptance[batch.is_valid.all(dim=-1)])
        figures = {"held_out_loss": sum(totals) / sum(sizes)}
        acceptance = torch.cat(acceptances)
        if len(acceptance):
            length = float(compute_expected_length(acceptance))
            figures["held_out_expected_length"] = length
        return figures

    def _indices(self, step: int) -> list[int]:
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(_seed(self.seed, epoch, 2))
        order = torch.randperm(len(self.train), generator=generator).tolist()
        start = in_epoch * self.settings.batch_size
        return [self.train[i] for i in order[start : start + self.settings.batch_size]]

    def _save(self) -> None:
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "model": self.drafting.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = f"{self.path}.partial"
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def _load(self) -> None:
        if not os.path.exists(self.path):
            return
        device = self.drafting.store.runner.device
        try:
            state: dict[str, Any] = torch.load(
                self.path, map_location=device, weights_only=True
            )
            self.drafting.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except Exception as error:
            # torch.load has no error of its own.
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            raise TrainingError(f"{self.path} cannot be read: {reason}") from None
        self.step, self.seconds = state["step"], state["seconds"]
        self.history = state["history"]


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Return the rate of a step: up in a line, then down by a cosine to 0."""
    num_warmup = max(1, round(settings.warmup_ratio * num_steps))
    if step < num_warmup:
        return settings.learning_rate * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@contextmanager
def training_threads(hidden_size: int) -> Iterator[None]:
    """Use as many threads as pay for a net of this width, then those of before."""
    before = torch.get_num_threads()
    is_wide = hidden_size >= _MIN_THREADED_WIDTH
    torch.set_num_threads(len(os.sched_getaffinity(0)) if is_wide else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seed(seed: int, index: int, stream: int) -> int:
    """Return a seed of its own for each index of each stream."""
    return (seed * 1_000_003 + index) * 4 + stream
