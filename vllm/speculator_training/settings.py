"""What a training run can be told, and the error that ends one."""

from dataclasses import dataclass

from vllm.exceptions import UnsupportedError, VLLMValidationError
from vllm.speculator_training.losses import LossWeights

DTYPES = ("float16", "bfloat16", "float32")


class TrainingError(UnsupportedError):
    """A run that cannot go on; the message says what to change."""


@dataclass(frozen=True)
class DataSettings:
    """Which prompts are answered, and how.

    Args:
        num_prompts: at the most; a file may hold fewer.
        max_prompt_tokens: of a user turn that the model writes.
        max_answer_tokens: of an answer.
        prompt_temperatures: one after another, as the next.
        seed: of every draw.
    """

    num_prompts: int = 2000
    max_prompt_tokens: int = 64
    max_answer_tokens: int = 256
    prompt_temperatures: tuple[float, ...] = (0.7, 1.0, 1.2)
    answer_temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(1, self, "num_prompts", "max_prompt_tokens", "max_answer_tokens")
        for name in ("prompt_temperatures", "answer_temperatures"):
            values = getattr(self, name)
            if not values or min(values) < 0:
                raise _invalid(name, "must be numbers >= 0", values)


@dataclass(frozen=True)
class DrafterSettings:
    """The shape of the drafter.

    Args:
        num_draft_tokens: that it drafts in one pass.
        target_layer_ids: tapped layers, by their output; None for a spread over all.
        draft_vocab_size: the most frequent tokens only; None for all.
        intermediate_size: of its feed-forward; None for the target's.
        mask_token_id: what a block holds after its anchor; None for an unused token.
    """

    num_layers: int = 1
    num_draft_tokens: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, self, "num_layers", "num_draft_tokens", "markov_rank")


@dataclass(frozen=True)
class TrainSettings:
    """How the drafter is trained.

    Args:
        batch_size: sequences a step.
        num_anchors: blocks of each of them.
        warmup_ratio: of all steps, in which the learning rate rises.
        checkpoint_steps: steps from one checkpoint to the next.
        held_out_ratio: of the sequences, half to calibrate on and half to report on.
        min_answer_tokens: shorter answers are dropped.
        max_cache_bytes: of the target's states on disk; beyond, they are computed
            again in every epoch.
        feature_dtype: of those states on disk.
        compute_dtype: of matrix products, the target's included; what they add up to
            is float32, as the weights are.
        save_dtype: of the drafter's weights on disk.
        distillation: weight of that loss.
    """

    num_epochs: int = 3
    batch_size: int = 8
    num_anchors: int = 64
    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    checkpoint_steps: int = 100
    held_out_ratio: float = 0.05
    min_answer_tokens: int = 14
    max_cache_bytes: int = 8 * 1024**3
    feature_dtype: str = "float16"
    compute_dtype: str = "float32"
    save_dtype: str = "bfloat16"
    distillation: float = 0.0

    def __post_init__(self) -> None:
        _at_least(1, self, "num_epochs", "batch_size", "num_anchors")
        # Two: an anchor and a label.
        _at_least(2, self, "min_answer_tokens")
        _at_least(1, self, "checkpoint_steps")
        _at_least(0, self, "max_cache_bytes", "distillation")
        for name in ("feature_dtype", "compute_dtype", "save_dtype"):
            if getattr(self, name) not in DTYPES:
                values = ", ".join(DTYPES)
                raise _invalid(name, f"must be one of {values}", getattr(self, name))
        if not self.learning_rate > 0:
            raise _invalid("learning_rate", "must be > 0", self.learning_rate)
        for name in ("warmup_ratio", "held_out_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise _invalid(name, "must be in [0, 1)", getattr(self, name))

    @property
    def loss_weights(self) -> LossWeights:
        """How the losses are added up."""
        return LossWeights(distillation=self.distillation)


def _at_least(low: int, settings: object, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < low:
            raise _invalid(name, f"must be at least {low}", getattr(settings, name))


def _invalid(name: str, rule: str, value: object) -> VLLMValidationError:
    flag = name.replace("_", "-")
    message = f"--{flag} {rule}, got {value}"
    return VLLMValidationError(message, parameter=name, value=value)
