import copy
import time
from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils import template_sandbox
from vllm.transformers_utils.chat_template import render_chat_template
from vllm.transformers_utils.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Well, "}
SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"


def render(template: str, *messages: dict, **options: object) -> str:
    return render_chat_template(template, list(messages) or [USER], **options)


def refusal(template: str, *messages: dict, **options: object) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as caught:
        render(template, *messages, **options)
    assert "\n" not in caught.value.message
    return caught.value


def test_embedded_template_writes_the_models_form(embedded_model):
    template = Tokenizer.from_path(embedded_model).chat_template
    assert render(template) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_generation_prompt_is_written_when_asked():
    assert render(SIMPLE) == "<user>Hi</><assistant>"
    assert render(SIMPLE, add_generation_prompt=False) == "<user>Hi</>"


def test_variables_and_helpers_reach_the_template():
    template = (
        "{{ bos_token }}{{ eos_token }}{{ tools | length }}{{ documents | length }}"
        "{{ enable_thinking }}{{ strftime_now('%Y') }}"
    )
    text = render(
        template,
        bos_token="<s>",
        eos_token="</s>",
        tools=[{}, {}],
        documents=[{}],
        enable_thinking=False,
    )
    assert text == f"<s></s>21False{datetime.now().year}"


def test_json_is_not_escaped_for_html():
    text = render("{{ x | tojson }}", x={"a": "<é> & 'b'"})
    assert text == '{"a": "<é> & \'b\'"}'


def test_json_can_be_indented():
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_loop_controls_and_generation_marks_are_known():
    template = (
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}"
        "{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    )
    assert render(template) == "02"


def test_loop_variables_are_those_of_jinja():
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}"
        "{{ loop.first }}{{ loop.last }}{% else %}none{% endfor %}"
    )
    assert render(template, USER, USER) == "1/2TrueFalse2/2FalseTrue"


TRICKY = """{%- set ns = namespace(found=false, system='') %}
{%- for m in messages if m.role != 'tool' %}
    {%- if m.role == 'system' %}{% set ns.system = m.content + '!' %}{% endif %}
    {%- if loop.last and m.content is string %}{% set ns.found = true %}{% endif %}
{%- endfor %}
{{- ns.system ~ '|' ~ ns.found }}
{% macro show(x, width=3) -%}[{{ '%s' % x }}{{ '-' * width }}]{%- endmacro %}
{%- for m in messages[::-1] recursive %}
{{ show(m['role']) }}
{{- ' ' + m.content.split('</think>')[-1].lstrip('\\n') | replace('a', 'bb') }}
{%- if m.parts %}{{ loop(m.parts) }}{% endif %}
{%- endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ 7 % 4 + 2 ** 3 }}
"""


def test_template_with_everything_equals_transformers():
    messages = [
        {"role": "system", "content": "Sys"},
        {"role": "user", "content": "<think>no</think>\n\nabba {1234567890}"},
        {
            "role": "assistant",
            "content": "{:>99999999}",
            "parts": [{"role": "p", "content": "a"}, {"role": "q", "content": "%9d"}],
        },
    ]
    expected, _ = render_jinja_template(
        conversations=[copy.deepcopy(messages)], chat_template=TRICKY
    )
    assert render(TRICKY, *messages, add_generation_prompt=False) == expected[0]


def test_messages_are_not_changed():
    messages = [copy.deepcopy(USER), copy.deepcopy(ANSWER)]
    before = copy.deepcopy(messages)
    render_chat_template(
        SIMPLE, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert messages == before
    assert refusal("{{ messages.append(1) }}").parameter == "chat_template"


@pytest.mark.parametrize("template", [SIMPLE, STRIPPING], ids=["simple", "stripping"])
@pytest.mark.parametrize("content", ["Well, ", "Well,", "", "a\n\n"])
def test_continuing_the_last_message_equals_transformers(template, content):
    messages = [USER, {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template(
        conversations=[copy.deepcopy(messages)],
        chat_template=template,
        continue_final_message=True,
    )
    actual = render(
        template, *messages, add_generation_prompt=False, continue_final_message=True
    )
    assert actual == expected[0]


def test_last_text_part_can_be_continued():
    template = "{% for m in messages %}{{ m.content[-1].text }}</>{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "assistant", "content": parts}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(template, message, **options) == "two"


def test_continuing_and_a_new_answer_exclude_each_other():
    error = refusal(SIMPLE, ANSWER, continue_final_message=True)
    assert error.parameter == "continue_final_message"


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}], 5])
def test_message_without_text_cannot_be_continued(content):
    message = {"role": "assistant", "content": content}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert refusal(SIMPLE, message, **options).parameter == "messages"


def test_template_that_drops_the_last_message_cannot_continue_it():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    error = refusal("{{ messages[0].role }}", ANSWER, **options)
    assert error.parameter == "continue_final_message"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{% if false %}{{ ''.__class__ }}{% endif %}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler['__init__'] }}",
        "{{ ''.format.__self__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0.__class__}' | format(messages) }}{{ self.__init__ }}",
    ],
)
def test_template_that_reaches_for_python_is_refused(template):
    assert refusal(template).parameter == "chat_template"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{% endfor %}",
        "{{ 'a",
        "{% generation %}",
        "{{ x | no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * 1_000_001,
    ],
    ids=lambda template: template[:20],
)
def test_broken_template_is_refused(template):
    assert refusal(template).parameter == "chat_template"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% include 'other' %}",
    ],
)
def test_messages_that_a_template_does_not_accept_are_refused(template):
    assert refusal(template).parameter == "messages"


def test_reason_of_the_template_is_passed_on():
    error = refusal("{{ raise_exception('roles must\nalternate') }}")
    assert error.message == "roles must alternate"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'a' }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 10 ** 100000 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a' | indent(10 ** 9) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ (['a' * 10000] * 10000) | join }}",
        "{{ range(10 ** 9) }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
        "{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
        "{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_template_that_grows_without_bound_is_refused_at_once(template):
    start = time.process_time()
    assert refusal(template).parameter == "chat_template"
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}"
        "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "recursion"],
)
def test_template_that_runs_for_ever_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_SECONDS", 0.2)
    error = refusal(template)
    assert error.parameter == "chat_template"
    assert "0.2 seconds" in error.message


def test_contents_that_look_like_formats_are_only_text():
    content = "{:>99999999} %099999999d 1234567890123"
    message = {"role": "user", "content": content}
    template = "{{ messages[0].content.strip().split('|')[0] ~ '%s' % 1 }}"
    assert render(template, message) == content + "1"
