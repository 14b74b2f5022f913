"""Checks chat messages and brings their content to what a template takes."""

from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError

from vllm.entrypoints.openai.limits import MAX_CONTENT_PARTS
from vllm.exceptions import VLLMValidationError

ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_TOOL_FIELDS = ("tool_calls", "tool_call_id", "function_call")
_TEXT_PARTS = ("text", "input_text", "output_text")


def parse_messages(
    messages: list[dict[str, Any]], content_format: str
) -> list[dict[str, Any]]:
    """Return messages that a template can render.

    `developer` becomes `system`: templates know only that. Nothing that a part refers
    to is ever fetched.

    Args:
        messages: as the client sent them.
        content_format: "string" joins text parts by a newline, "openai" keeps the list.

    Raises:
        VLLMValidationError: a role or a content is unknown or not supported.
    """
    return [
        _parse_message(message, f"messages.{number}", content_format)
        for number, message in enumerate(messages)
    ]


def detect_content_format(template: str) -> str:
    """Return "openai" if `template` walks through the parts of a content."""
    try:
        tree = Environment(
            extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
        ).parse(template)
    except TemplateError:
        # With the extensions of its own; the renderer says if it is wrong.
        return "string"
    # Loops over a variable that was set to a content count as well.
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    for loop in tree.find_all(nodes.For):
        is_name = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_name or _is_content(loop.iter):
            return "openai"
    return "string"


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )


def _parse_message(
    message: dict[str, Any], where: str, content_format: str
) -> dict[str, Any]:
    role = message.get("role")
    if role in _TOOL_ROLES:
        raise _invalid(f"{where}.role", f"{role}: tool calls are not supported yet")
    if role not in ROLES:
        shown = repr(role)[:40]
        raise _invalid(
            f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown}"
        )
    for name in _TOOL_FIELDS:
        if message.get(name):
            raise _invalid(f"{where}.{name}", "tool calls are not supported yet")
    content = _parse_content(message.get("content"), f"{where}.content", content_format)
    kept = {name: value for name, value in message.items() if value is not None}
    for name in _TOOL_FIELDS:
        kept.pop(name, None)
    return kept | {
        "role": "system" if role == "developer" else role,
        "content": content,
    }


def _parse_content(
    content: Any, where: str, content_format: str
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        if content_format == "openai":
            return [{"type": "text", "text": content}]
        return content
    if not isinstance(content, list):
        raise _invalid(where, "must be a string or a list of text parts")
    if len(content) > MAX_CONTENT_PARTS:
        raise _invalid(where, f"takes at most {MAX_CONTENT_PARTS} parts")
    texts = [
        _parse_part(part, f"{where}.{number}") for number, part in enumerate(content)
    ]
    if content_format == "openai":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _parse_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _invalid(where, "must be a text part")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        shown = repr(kind)[:40]
        raise _invalid(
            f"{where}.type",
            f"must be text, got {shown}: only text is understood, and nothing is "
            "fetched for a request",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"{where}.text", "must be a string")
    return text


def _invalid(where: str, problem: str) -> VLLMValidationError:
    return VLLMValidationError(f"{where} {problem}", parameter=where)
