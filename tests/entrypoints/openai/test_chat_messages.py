import pytest

from vllm.entrypoints.openai.chat_messages import (
    detect_content_format,
    parse_messages,
)
from vllm.exceptions import VLLMValidationError

PARTS = [{"type": "text", "text": "a"}, "b"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "string"),
        (
            "{% for m in messages %}{% for part in m.content %}"
            "{{ part.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for part in m['content'] %}"
            "{{ part.text }}{% break %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}"
            "{{ p.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for broken", "string"),
        ("", "string"),
    ],
)
def test_format_is_read_from_the_template(template: str, expected: str) -> None:
    assert detect_content_format(template) == expected


def test_parts_are_joined_or_kept() -> None:
    messages = [{"role": "user", "content": PARTS}]
    assert parse_messages(messages, "string")[0]["content"] == "a\nb"
    assert parse_messages(messages, "openai")[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


def test_text_becomes_a_part_where_the_template_walks_through_parts() -> None:
    messages = [{"role": "user", "content": "a"}]
    content = parse_messages(messages, "openai")[0]["content"]
    assert content == [{"type": "text", "text": "a"}]


def test_developer_becomes_system_and_other_fields_stay() -> None:
    (message,) = parse_messages(
        [{"role": "developer", "content": "a", "name": "me", "tool_calls": []}],
        "string",
    )
    assert message == {"role": "system", "content": "a", "name": "me"}


def test_error_names_the_place() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
    ]
    with pytest.raises(VLLMValidationError) as error:
        parse_messages(messages, "string")
    assert error.value.parameter == "messages.1.content.0.text"


def test_messages_of_the_client_are_not_changed() -> None:
    messages = [{"role": "developer", "content": PARTS}]
    parse_messages(messages, "string")
    assert messages == [{"role": "developer", "content": PARTS}]
