"""Chat templates: Jinja from a model or a client, run in a sandbox with limits."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.template_sandbox import (
    BudgetedEnvironment,
    TemplateBudgetError,
    template_budget,
)

# Stands at the end of the message that is to be continued. Its space tells whether the
# template strips its messages.
_CONTINUE_MARK = "\ue0f1continue-final-message\ue0f1"
_MAX_TEMPLATE_CHARS = 1_000_000
_NUM_CACHED_TEMPLATES = 32
# Of a running template: faults of its own, whatever the messages are. OverflowError is
# a range beyond the sandbox's limit.
_REFUSALS = (
    SecurityError,
    TemplateBudgetError,
    RecursionError,
    OverflowError,
    MemoryError,
)


class _RaisedByTemplate(TemplateError):
    """The template called raise_exception: it does not accept these messages."""


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}`: marks for training, no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat_template(
    template: str,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    bos_token: str = "",
    eos_token: str = "",
    **chat_template_kwargs: Any,
) -> str:
    """Write a conversation in the form that the model was trained on.

    Args:
        template: Jinja source.
        messages: in OpenAI's form; not changed.
        add_generation_prompt: end with the beginning of the assistant's answer.
        continue_final_message: end inside the last message, for the model to go on.
        chat_template_kwargs: more variables for the template.

    Raises:
        VLLMValidationError: the template is broken or forbidden (parameter
            "chat_template"), or does not accept the messages (parameter "messages").
    """
    if continue_final_message:
        if add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )
        messages = _with_continue_mark(messages)
    compiled = _compile(template)
    variables = {
        **chat_template_kwargs,
        "messages": messages,
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    text = _render(compiled, variables)
    return _cut_at_continue_mark(text) if continue_final_message else text


def check_chat_template(template: str) -> None:
    """Check that a template can be compiled.

    Raises:
        VLLMValidationError: it is broken or too large.
    """
    _compile(template)


def _render(compiled: jinja2.Template, variables: dict[str, Any]) -> str:
    parameter = "messages"
    try:
        with template_budget() as budget:
            return budget.join(compiled.generate(variables))
    except _REFUSALS as error:
        parameter = "chat_template"
        reason = f"The chat template is refused: {_one_line(error)}"
    except _RaisedByTemplate as error:
        reason = _one_line(error)
    except UndefinedError as error:
        reason = f"The chat template misses a value: {_one_line(error)}"
    # A template may fail in any operation on values that the client chose.
    except Exception as error:
        reason = f"The chat template failed: {type(error).__name__}: {_one_line(error)}"
    raise VLLMValidationError(reason, parameter=parameter)


@lru_cache(maxsize=_NUM_CACHED_TEMPLATES)
def _compile(template: str) -> jinja2.Template:
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise VLLMValidationError(
            f"The chat template has {len(template)} characters, at most "
            f"{_MAX_TEMPLATE_CHARS} are allowed",
            parameter="chat_template",
        )
    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        reason = f"{_one_line(error)} (line {error.lineno})"
    except (TemplateError, SyntaxError, ValueError) as error:
        reason = _one_line(error)
    except (RecursionError, MemoryError):
        reason = "it is nested too deeply"
    raise VLLMValidationError(
        f"The chat template is refused: {reason}", parameter="chat_template"
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = BudgetedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _with_continue_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a mark after the last one's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        marked: Any = content + _CONTINUE_MARK + " "
    elif isinstance(content, list):
        marked = _mark_last_text(content)
    else:
        marked = None
    if marked is None:
        raise VLLMValidationError(
            "continue_final_message needs a last message with text to go on from",
            parameter="messages",
        )
    return [*messages[:-1], {**last, "content": marked}]


def _mark_last_text(parts: list[Any]) -> list[Any] | None:
    if not parts or not isinstance(parts[-1], dict):
        return None
    text = parts[-1].get("text")
    if not isinstance(text, str):
        return None
    return [*parts[:-1], {**parts[-1], "text": text + _CONTINUE_MARK + " "}]


def _cut_at_continue_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_MARK)
    if end < 0:
        raise VLLMValidationError(
            "continue_final_message does not work with this chat template: it leaves "
            "the last message out or rewrites it",
            parameter="continue_final_message",
        )
    keeps_spaces = text.startswith(_CONTINUE_MARK + " ", end)
    return text[:end] if keeps_spaces else text[:end].rstrip()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:500] or type(error).__name__
