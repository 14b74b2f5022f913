import pytest
import tokenizers

from tests.speculator_training.tiny_target import TEMPLATE
from tests.v1.engine.fakes import EOS, make_tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.speculator_training.prompts import (
    ChatFormat,
    UniquePrompts,
    prompt_key,
    read_prompts,
)
from vllm.speculator_training.settings import TrainingError
from vllm.transformers_utils.tokenizer import Tokenizer, TokenizerSettings


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend: tokenizers.Tokenizer = make_tokenizer()
    return Tokenizer(backend, TokenizerSettings(eos_token=EOS))


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_that_differ_in_form_only_are_one():
    unique = UniquePrompts()
    assert unique.add(said("What is DNA?"))
    assert not unique.add(said("  what is dna "))
    assert unique.add(said("What is RNA?"))


def test_long_prompts_that_begin_alike_are_one():
    start = " ".join(f"w{i}" for i in range(12))
    assert prompt_key(f"{start} this") == prompt_key(f"{start} that")
    assert prompt_key("w0 w1 this") != prompt_key("w0 w1 that")


def test_a_prompt_without_words_is_its_own_key_and_an_empty_one_is_none():
    unique = UniquePrompts()
    assert unique.add(said("?!"))
    assert not unique.add(said("?!"))
    assert unique.add(said("!"))
    assert not unique.add(said(" \n"))


def test_the_model_starts_where_the_users_text_begins(tokenizer):
    turn = ChatFormat(tokenizer, TEMPLATE).user_turn()
    assert tokenizer.decode(turn.prefix_ids) == "<user>"
    assert turn.stop_token_ids == [tokenizer.eos_token_id]
    assert turn.stop == []


def test_a_turn_without_a_special_token_ends_at_the_templates_own_text(tokenizer):
    template = "{% for m in messages %}Q: {{ m.content }}\nEND\n{% endfor %}"
    turn = ChatFormat(tokenizer, template).user_turn()
    assert (turn.stop_token_ids, turn.stop) == ([], ["END"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template to write prompts with: give --prompts FILE"),
        ("nothing", "does not show the user's text"),
        ("{{ messages[0].content }}", "nothing before the user's text"),
    ],
)
def test_a_template_that_cannot_be_written_from_is_named(tokenizer, template, reason):
    with pytest.raises(TrainingError, match=reason):
        ChatFormat(tokenizer, template).user_turn()


def test_without_a_template_the_bare_text_is_completed(tokenizer):
    ids = ChatFormat(tokenizer, None).encode(said("hello"))
    assert tokenizer.decode(ids) == "hello"


def test_a_text_file_has_a_prompt_a_line_each_once(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \nONE\n")
    assert read_prompts(str(path)) == [said("one"), said("two")]


def test_a_jsonl_file_holds_texts_prompts_and_conversations(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one"\n{"prompt": "two"}\n'
        '{"messages": [{"role": "system", "content": "three"}]}\n'
    )
    system = [{"role": "system", "content": "three"}]
    assert read_prompts(str(path)) == [said("one"), said("two"), system]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", '"one"\n{"text": 1}\n', r"a.jsonl, line 2: must be"),
        ("b.jsonl", '{"messages": []}', r"line 1: must be"),
        ("c.txt", "\n", "no prompt in it"),
        ("d.txt", None, "No such file"),
    ],
)
def test_a_file_that_is_no_list_of_prompts_is_refused(tmp_path, name, text, reason):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(VLLMValidationError, match=reason):
        read_prompts(str(path))
