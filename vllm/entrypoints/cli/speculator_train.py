"""`vllm speculator train`: a drafter from nothing but the model."""

from collections.abc import Sequence

from vllm.entrypoints.cli.speculator_flags import (
    DATA_FLAGS,
    add_settings,
    make_answers,
    make_config,
    make_parser,
    take_settings,
)
from vllm.speculator_training.prompts import ChatFormat, read_prompts
from vllm.speculator_training.report import format_report
from vllm.speculator_training.settings import (
    DataSettings,
    DrafterSettings,
    TrainSettings,
)
from vllm.speculator_training.train import TrainJob, prepare, train
from vllm.transformers_utils.tokenizer import Tokenizer

DRAFTER_FLAGS = {
    "num_layers": "layers of the drafter",
    "num_draft_tokens": "tokens that it drafts at once",
    "target_layer_ids": "layers that it reads, as in 1,9,17 (default: five)",
    "draft_vocab_size": "draft the most frequent tokens only (default: all)",
    "intermediate_size": "width of its feed-forward (default: the model's)",
    "markov_rank": "rank of its table of token pairs",
    "markov_head_type": "vanilla, gated or rnn",
    "mask_token_id": "token in the places to draft (default: one that is not used)",
}
TRAINING_FLAGS = {
    "num_epochs": "passes over the answers",
    "batch_size": "answers a step",
    "num_anchors": "blocks of an answer, a pass",
    "learning_rate": "at its highest",
    "distillation": "weight of the whole distribution's cross entropy",
    "warmup_ratio": "share of the steps in which the rate rises",
    "max_grad_norm": "longer gradients are shortened",
    "checkpoint_steps": "steps between checkpoints",
    "held_out_ratio": "share of the answers to calibrate on and to report on",
    "min_answer_tokens": "shorter answers are dropped",
    "max_cache_bytes": "of the model's states on disk; 0 computes them every time",
    "feature_dtype": "of those states",
    "compute_dtype": "of matrix products; bfloat16 where the machine is fast at it",
    "save_dtype": "of the drafter's weights on disk",
}


def run(argv: Sequence[str]) -> int:
    """Train a drafter; return the exit code."""
    parser = make_parser("train", "Train a drafter from nothing but the model.")
    group = parser.add_argument_group("Drafter")
    group.add_argument("--output", metavar="DIR", help="folder for the drafter")
    group.add_argument(
        "--resume", action="store_true", help="go on with the run in that folder"
    )
    add_settings(group, DrafterSettings, DRAFTER_FLAGS)
    training_group = parser.add_argument_group("Training")
    add_settings(training_group, TrainSettings, TRAINING_FLAGS)
    args = parser.parse_args(argv)
    if args.output is None:
        parser.error("--output DIR is required")
    engine_args, vllm_config = make_config(args)
    job = TrainJob(
        vllm_config,
        args.output,
        take_settings(args, DataSettings, DATA_FLAGS),
        take_settings(args, DrafterSettings, DRAFTER_FLAGS),
        take_settings(args, TrainSettings, TRAINING_FLAGS),
        args.prompts,
        args.resume,
    )
    _check_prompts(job)
    prepare(job)
    report = train(
        job,
        lambda: make_answers(engine_args, job.data, job.data_folder, job.prompts),
    )
    print(format_report(report))
    return 0


def _check_prompts(job: TrainJob) -> None:
    """Find out that there will be no prompts before a folder is made."""
    if job.prompts is not None:
        read_prompts(job.prompts)
        return
    model_config = job.vllm_config.model_config
    tokenizer = Tokenizer.from_path(model_config.tokenizer)
    template = model_config.chat_template or tokenizer.chat_template
    ChatFormat(tokenizer, template).user_turn()
