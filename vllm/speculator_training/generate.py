"""The training data: answers of the model, kept on disk chunk by chunk."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tqdm.auto import tqdm

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.speculator_training.prompts import (
    ChatFormat,
    Conversation,
    UniquePrompts,
    UserTurn,
)
from vllm.speculator_training.settings import DataSettings, TrainingError

# What is lost at the most when a run is killed.
CHUNK_SIZE = 256
# Chunks without a new prompt until the model has no more of them.
_MAX_EMPTY_CHUNKS = 3
# Keeps the draws of prompts and of answers apart.
_ANSWER_SEEDS = 1 << 31


class Engine(Protocol):
    """What generates text; `vllm.LLM` is one."""

    def generate(
        self,
        prompts: Any,
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts."""


@dataclass(frozen=True)
class Answer:
    """One prompt and what the model said to it.

    Args:
        answer_ids: with the token that ended it.
        temperature: that it was drawn at.
    """

    conversation: Conversation
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float


class Generator:
    """Fills a folder with answers; one that was killed goes on where it was.

    A chunk depends on the chunks before it and on the seed only.

    Args:
        max_model_len: of the engine.
        folder: of the chunks, made if missing.
        prompts: None lets the model write them.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        settings: DataSettings,
        max_model_len: int,
        folder: str,
        prompts: list[Conversation] | None,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.settings = settings
        self.max_model_len = max_model_len
        self.folder = folder
        self.prompts = prompts
        self.turn = chat.user_turn() if prompts is None else None

    def run(self) -> list[Answer]:
        """Return all answers, those of earlier runs included.

        Raises:
            TrainingError: the model writes no new prompts.
        """
        os.makedirs(self.folder, exist_ok=True)
        chunks = read_chunks(self.folder)
        unique = UniquePrompts()
        for chunk in chunks:
            for answer in chunk:
                unique.add(answer.conversation)
        total = self.settings.num_prompts
        if self.prompts is not None:
            total = min(total, len(self.prompts))
        num_done = sum(map(len, chunks))
        with tqdm(total=total, initial=num_done, desc="Answers", unit="prompt") as bar:
            while not self._is_complete(chunks, total):
                answers = self._make_chunk(len(chunks), total, chunks, unique)
                _write_chunk(self.folder, len(chunks), answers)
                chunks.append(answers)
                bar.update(len(answers))
        return [answer for chunk in chunks for answer in chunk]

    def _is_complete(self, chunks: list[list[Answer]], total: int) -> bool:
        if self.prompts is not None:
            return len(chunks) * CHUNK_SIZE >= total
        num_done = sum(map(len, chunks))
        recent = chunks[-_MAX_EMPTY_CHUNKS:]
        if num_done < total and len(recent) == _MAX_EMPTY_CHUNKS and not any(recent):
            raise TrainingError(
                f"the model writes no new prompts after {num_done} of {total}: give "
                "--prompts FILE, or ask for fewer by --num-prompts"
            )
        return num_done >= total

    def _make_chunk(
        self,
        chunk_idx: int,
        total: int,
        chunks: list[list[Answer]],
        unique: UniquePrompts,
    ) -> list[Answer]:
        # What is cached changes the shapes of a prefill, and so its rounding.
        self.engine.reset_prefix_cache()
        start = chunk_idx * CHUNK_SIZE
        if self.prompts is not None:
            conversations = self.prompts[start : min(start + CHUNK_SIZE, total)]
        else:
            assert self.turn is not None, "made with the generator"
            num_missing = total - sum(map(len, chunks))
            written = self._write_prompts(self.turn, start, CHUNK_SIZE)
            conversations = [c for c in written if unique.add(c)][:num_missing]
        return self._answer(conversations, start)

    def _write_prompts(
        self, turn: UserTurn, start: int, num_prompts: int
    ) -> list[Conversation]:
        settings = self.settings
        params = [
            SamplingParams(
                temperature=_pick(settings.prompt_temperatures, start + i),
                seed=_seed(settings.seed, start + i),
                max_tokens=settings.max_prompt_tokens,
                stop_token_ids=turn.stop_token_ids,
                stop=turn.stop,
            )
            for i in range(num_prompts)
        ]
        prompts = [{"prompt_token_ids": turn.prefix_ids}] * num_prompts
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        texts = [output.outputs[0].text.strip() for output in outputs]
        return [[{"role": "user", "content": text}] for text in texts]

    def _answer(self, conversations: list[Conversation], start: int) -> list[Answer]:
        settings = self.settings
        kept, prompts, params = [], [], []
        for i, conversation in enumerate(conversations):
            prompt_ids = self.chat.encode(conversation)
            room = self.max_model_len - len(prompt_ids)
            # Such a prompt leaves no room for an answer.
            if not prompt_ids or room < 1:
                continue
            kept.append(conversation)
            prompts.append({"prompt_token_ids": prompt_ids})
            params.append(
                SamplingParams(
                    temperature=_pick(settings.answer_temperatures, start + i),
                    seed=_seed(settings.seed, _ANSWER_SEEDS + start + i),
                    max_tokens=min(settings.max_answer_tokens, room),
                    detokenize=False,
                )
            )
        if not kept:
            return []
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        return [
            Answer(
                conversation,
                prompt["prompt_token_ids"],
                list(output.outputs[0].token_ids),
                one.temperature,
            )
            for conversation, prompt, one, output in zip(
                kept, prompts, params, outputs, strict=True
            )
        ]


def read_chunks(folder: str) -> list[list[Answer]]:
    """Return the chunks of answers that a folder holds.

    Raises:
        TrainingError: a chunk is damaged.
    """
    chunks: list[list[Answer]] = []
    while os.path.exists(path := _chunk_path(folder, len(chunks))):
        try:
            with open(path, encoding="utf-8") as file:
                chunks.append([Answer(**json.loads(line)) for line in file])
        except (ValueError, TypeError):
            raise TrainingError(f"{path}: the file is damaged: delete it") from None
    return chunks


def _write_chunk(folder: str, chunk_idx: int, answers: list[Answer]) -> None:
    path = _chunk_path(folder, chunk_idx)
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(asdict(answer)) + "\n")
    os.replace(partial, path)


def _chunk_path(folder: str, chunk_idx: int) -> str:
    return os.path.join(folder, f"{chunk_idx:05d}.jsonl")


def _pick(values: tuple[float, ...], idx: int) -> float:
    return values[idx % len(values)]


def _seed(seed: int, idx: int) -> int:
    return (seed << 33) % (1 << 62) + idx
