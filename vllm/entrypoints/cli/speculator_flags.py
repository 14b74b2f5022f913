"""What the `vllm speculator` commands share: flags, and answers from the engine."""

import argparse
import gc
import os
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.speculative_args import AUTO
from vllm.entrypoints.llm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.speculator_training.generate import Answer, Generator
from vllm.speculator_training.prompts import ChatFormat, Conversation, read_prompts
from vllm.speculator_training.settings import DataSettings, TrainingError
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int
from vllm.v1.engine.exceptions import EngineGenerateError

DATA_FLAGS = {
    "num_prompts": "prompts to answer, at the most",
    "max_prompt_tokens": "tokens of a prompt that the model writes",
    "max_answer_tokens": "tokens of an answer",
    "prompt_temperatures": "one after another, of prompts; as in 0.7,1.0",
    "answer_temperatures": "one after another, of answers; as in 0,1",
}


def make_parser(command: str, description: str) -> FlexibleArgumentParser:
    """Return a parser with the flags of the engine and of the data."""
    parser = FlexibleArgumentParser(
        prog=f"vllm speculator {command}", description=description
    )
    parser.add_config_argument()
    EngineArgs.add_cli_args(parser)
    group = parser.add_argument_group("Data")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts, one a line or JSONL (default: the model writes them)",
    )
    add_settings(group, DataSettings, DATA_FLAGS)
    return parser


def add_settings(
    group: argparse._ArgumentGroup, kind: type, helps: dict[str, str]
) -> None:
    """Add a flag for each named field of a dataclass, with its default."""
    for field in fields(kind):
        if field.name not in helps:
            continue
        default = field.default
        assert default is not MISSING, "a flag's default is plain"
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text = helps[field.name]
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_parser_of(str(field.type)),
            default=default,
            help=text if default is None else f"{text} (default: {shown})",
        )


def take_settings(args: argparse.Namespace, kind: type, helps: dict[str, str]) -> Any:
    """Return the dataclass that the flags describe; --seed is the engine's own."""
    values = {name: getattr(args, name) for name in helps}
    if "seed" in {field.name for field in fields(kind)}:
        values["seed"] = args.seed
    return kind(**values)


def make_config(args: argparse.Namespace) -> tuple[EngineArgs, VllmConfig]:
    """Return what the engine's flags describe, statistics and unasked drafts aside."""
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    if engine_args.speculative_config == AUTO:
        engine_args = replace(engine_args, speculative_config=None)
    return engine_args, engine_args.create_engine_config()


def make_answers(
    engine_args: EngineArgs,
    settings: DataSettings,
    folder: str,
    prompts_file: str | None,
) -> list[Answer]:
    """Answer prompts with an engine that is gone afterwards."""
    prompts = None if prompts_file is None else read_prompts(prompts_file)
    llm = LLM(**asdict(engine_args))
    try:
        return _generate(llm, settings, folder, prompts)
    except EngineGenerateError as error:
        raise TrainingError(f"the model could not answer a prompt: {error}") from None
    finally:
        llm.llm_engine.shutdown()
        del llm
        # Its cache is as large as the memory that training needs.
        gc.collect()


def _generate(
    llm: LLM,
    settings: DataSettings,
    folder: str,
    prompts: list[Conversation] | None,
) -> list[Answer]:
    model_config = llm.llm_engine.vllm_config.model_config
    tokenizer = llm.get_tokenizer()
    template = model_config.chat_template or tokenizer.chat_template
    chat = ChatFormat(tokenizer, template)
    max_model_len = model_config.max_model_len
    return Generator(llm, chat, settings, max_model_len, folder, prompts).run()


def existing_folder(path: str) -> str:
    """Return a path to a folder.

    Raises:
        VLLMValidationError: it is none.
    """
    if not os.path.isdir(path):
        raise VLLMValidationError(f"{path} is not a folder", parameter="speculator")
    return path


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser_of(annotation: str) -> Any:
    kind = annotation.removesuffix(" | None")
    if "'" in kind:
        kind = kind.split("'")[1]
    return {
        "int": human_int,
        "float": float,
        "str": str,
        "tuple[float, ...]": _numbers,
        "tuple[int, ...]": _integers,
    }[kind]
