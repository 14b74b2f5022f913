"""Prompts for the benchmarks: random ones of a given length, or a file."""

import json
import random
from dataclasses import dataclass

from vllm.exceptions import VLLMValidationError

# Ordinary words: their tokens are drawn from, so that prompts look like text.
WORDS = (
    "the river carries small boats past green fields while people on the old bridge "
    "watch children throw bread to hungry birds and a train far away sounds its horn "
    "before the long tunnel under white mountains where snow stays until late summer"
)

# What a chat asks, and about what: each with each, so that no two prompts are alike.
_TASKS = (
    "Explain {} to a child of ten.",
    "Write a short story about {}.",
    "List five facts about {}, one a line.",
    "What are the advantages and disadvantages of {}?",
    "Write a polite e-mail to a friend about {}.",
    "Give step-by-step instructions for someone who has never heard of {}.",
    "Write a small Python program about {}, with comments.",
    "Summarise the history of {} in one paragraph.",
    "Write a poem of eight lines about {}.",
    "Make a table with three rows and two columns about {}.",
    "Invent a dialogue between a teacher and a pupil about {}.",
    "Which questions would you ask an expert on {}?",
)
_TOPICS = (
    "bicycles",
    "the moon",
    "baking bread",
    "chess",
    "volcanoes",
    "public libraries",
    "honey bees",
    "sailing ships",
    "prime numbers",
    "electric cars",
    "winter sports",
    "coffee",
    "ancient Egypt",
    "recycling",
    "jazz music",
    "the human heart",
    "gardening",
    "railways",
    "photography",
    "coral reefs",
    "clocks",
    "maps",
    "glass",
    "rain",
)


@dataclass(frozen=True)
class SampleRequest:
    """One request to send.

    Args:
        prompt: a text, or token ids.
        num_prompt_tokens: its length; 0 if unknown.
        num_output_tokens: tokens to ask for.
    """

    prompt: str | list[int]
    num_prompt_tokens: int
    num_output_tokens: int


def random_requests(
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    token_pool: list[int],
    seed: int,
) -> list[SampleRequest]:
    """Draw prompts of random tokens.

    Args:
        input_len: tokens a prompt; drawn from input_len x (1 +- range_ratio).
        output_len: tokens to ask for, drawn likewise.
        token_pool: token ids to draw from; empty draws words instead.
    """
    rng = random.Random(seed)

    def draw(length: int) -> int:
        low, high = length * (1 - range_ratio), length * (1 + range_ratio)
        return max(1, rng.randint(round(low), round(high)))

    requests = []
    for _ in range(num_prompts):
        num_input, num_output = draw(input_len), draw(output_len)
        prompt: str | list[int] = " ".join(rng.choices(WORDS.split(), k=num_input))
        if token_pool:
            prompt = rng.choices(token_pool, k=num_input)
        requests.append(SampleRequest(prompt, num_input, num_output))
    return requests


def chat_prompts(num_prompts: int, seed: int) -> list[str]:
    """Return what users could ask, in an order drawn by the seed; again if too few."""
    prompts = [task.format(topic) for task in _TASKS for topic in _TOPICS]
    random.Random(seed).shuffle(prompts)
    return [prompts[i % len(prompts)] for i in range(num_prompts)]


def file_requests(
    path: str, num_prompts: int, default_output_len: int
) -> list[SampleRequest]:
    """Read prompts from a file, from its start again if it has too few.

    Args:
        path: JSON lines, each {"prompt": text, "output_len": tokens (optional)}.

    Raises:
        VLLMValidationError: the file is empty or a line is not of this form.
    """
    requests = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                prompt = record["prompt"]
                output_len = int(record.get("output_len", default_output_len))
            except (ValueError, KeyError, TypeError, AttributeError):
                prompt = None
            if not isinstance(prompt, str):
                raise VLLMValidationError(
                    f'{path}, line {number}: must be {{"prompt": text, '
                    '"output_len": tokens}',
                    parameter="dataset_path",
                )
            requests.append(SampleRequest(prompt, 0, output_len))
    if not requests:
        raise VLLMValidationError(f"{path} holds no prompt", parameter="dataset_path")
    return [requests[i % len(requests)] for i in range(num_prompts)]
