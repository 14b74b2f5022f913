"""Where a drafter's training prompts come from: a file, or the model itself."""

import json
import re
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.speculator_training.settings import TrainingError
from vllm.transformers_utils.chat_template import render_chat_template
from vllm.transformers_utils.tokenizer import Tokenizer

Message = dict[str, Any]
Conversation = list[Message]

# Stands for the user's text while the template is rendered.
_MARK = "user-turn-0e4f"
# Prompts that begin with the same words are one prompt.
_NUM_KEY_WORDS = 12


@dataclass(frozen=True)
class UserTurn:
    """What the model is given, and stopped at, to write what a user would.

    Args:
        prefix_ids: the template up to the user's text.
        stop_token_ids: special tokens that end the turn.
        stop: text that ends the turn, where no special token does.
    """

    prefix_ids: list[int]
    stop_token_ids: list[int]
    stop: list[str]


class ChatFormat:
    """Turns conversations into token ids.

    Args:
        template: of the model; None completes the bare text of the last message.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def encode(self, conversation: Conversation) -> list[int]:
        """Return the prompt that asks for the next message."""
        if self.template is None:
            return self.tokenizer.encode(str(conversation[-1].get("content", "")))
        text = self._render(conversation, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def user_turn(self) -> UserTurn:
        """Return how to let the model write a user's text.

        Raises:
            TrainingError: there is no template, or none that shows the text.
        """
        if self.template is None:
            raise TrainingError(
                "the model has no chat template to write prompts with: give --prompts "
                "FILE, or --chat-template"
            )
        conversation = [{"role": "user", "content": _MARK}]
        text = self._render(conversation, add_generation_prompt=False)
        prefix, mark, suffix = text.partition(_MARK)
        if not mark:
            raise TrainingError(
                "the chat template does not show the user's text: give --prompts FILE"
            )
        prefix_ids = self.tokenizer.encode(prefix, add_special_tokens=False)
        suffix_ids = self.tokenizer.encode(suffix, add_special_tokens=False)
        special = [i for i in suffix_ids if i in self.tokenizer.all_special_ids]
        # A suffix of white space only would end every user's first line.
        stop = [suffix.strip()] if suffix.strip() and not special else []
        if not prefix_ids:
            start = self.tokenizer.bos_token_id
            if start is None:
                raise TrainingError(
                    "the chat template has nothing before the user's text to write "
                    "prompts from: give --prompts FILE"
                )
            prefix_ids = [start]
        return UserTurn(prefix_ids, special[:1], stop)

    def _render(
        self, conversation: Conversation, *, add_generation_prompt: bool
    ) -> str:
        assert self.template is not None, "checked by the caller"
        return render_chat_template(
            self.template,
            conversation,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.tokenizer.bos_token or "",
            eos_token=self.tokenizer.eos_token or "",
        )


class UniquePrompts:
    """Remembers prompts, so that none is answered twice."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def add(self, conversation: Conversation) -> bool:
        """Return whether a conversation is new and holds a text; remember it."""
        text = " ".join(str(message.get("content") or "") for message in conversation)
        key = prompt_key(text)
        if not key or key in self._keys:
            return False
        self._keys.add(key)
        return True


def prompt_key(text: str) -> str:
    """Return what prompts that differ in form or in their end only have in common."""
    words = re.findall(r"\w+", text.casefold())
    return " ".join(words[:_NUM_KEY_WORDS]) or text.strip()


def read_prompts(path: str) -> list[Conversation]:
    """Read prompts, each once, in the order of the file.

    Args:
        path: ends in .jsonl: each line is a text, {"prompt": text} or {"messages":
            conversation}; else each line is a text.

    Raises:
        VLLMValidationError: the file cannot be read, or a line is none of these.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise VLLMValidationError(
            f"--prompts {path}: {reason}", parameter="prompts", value=path
        ) from None
    is_json = path.endswith(".jsonl")
    unique = UniquePrompts()
    conversations = [
        _parse_line(line, f"--prompts {path}, line {number}")
        if is_json
        else [{"role": "user", "content": line.strip()}]
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    kept = [conversation for conversation in conversations if unique.add(conversation)]
    if not kept:
        raise VLLMValidationError(
            f"--prompts {path}: there is no prompt in it", parameter="prompts"
        )
    return kept


def _parse_line(line: str, where: str) -> Conversation:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict) and "messages" in value:
        messages = value["messages"]
        is_list = isinstance(messages, list) and messages
        if is_list and all(isinstance(message, dict) for message in messages):
            return messages
    text = value.get("prompt") if isinstance(value, dict) else value
    if isinstance(text, str):
        return [{"role": "user", "content": text}]
    raise VLLMValidationError(
        f'{where}: must be a JSON text, {{"prompt": text}} or {{"messages": [...]}}',
        parameter="prompts",
    )
