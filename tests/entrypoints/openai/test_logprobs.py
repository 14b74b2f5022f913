import math

from tests.entrypoints.openai.fake_engine import make_fake_tokenizer
from vllm.entrypoints.openai.logprobs import LogprobsFormatter, prompt_logprobs_list
from vllm.outputs import Logprob

TOKENIZER = make_fake_tokenizer()
(A,) = TOKENIZER.encode("a")
(B,) = TOKENIZER.encode("b")
(C,) = TOKENIZER.encode("c")
# The sampled token comes first, as the engine has it; it is the third likeliest.
POSITION = {
    A: Logprob(-3.0, 3, "a"),
    B: Logprob(-1.0, 1, "b"),
    C: Logprob(-2.0, 2, "c"),
}


def test_top_tokens_are_the_likeliest_in_order() -> None:
    (entry,) = LogprobsFormatter(TOKENIZER, 2).chat([A], [POSITION]).content
    assert (entry.token, entry.logprob) == ("a", -3.0)
    assert [top.token for top in entry.top_logprobs] == ["b", "c"]


def test_minus_one_shows_all() -> None:
    (entry,) = LogprobsFormatter(TOKENIZER, -1).chat([A], [POSITION]).content
    assert [top.token for top in entry.top_logprobs] == ["b", "c", "a"]


def test_completion_shows_the_sampled_token_beside_the_top() -> None:
    formatter = LogprobsFormatter(TOKENIZER, 1)
    result, end = formatter.completion([A], [POSITION], 7)
    assert result.top_logprobs == [{"b": -1.0, "a": -3.0}]
    assert (result.text_offset, end) == ([7], 8)


def test_of_two_tokens_with_one_text_the_likelier_is_shown() -> None:
    position = {A: Logprob(-1.0, 1, ""), B: Logprob(-2.0, 2, "")}
    result, _ = LogprobsFormatter(TOKENIZER, 2).completion([A], [position], 0)
    assert result.top_logprobs == [{"": -1.0}]


def test_special_tokens_take_no_room_in_the_text() -> None:
    eos = TOKENIZER.eos_token_id
    positions = [{eos: Logprob(-1.0, 1, "<eos>")}, POSITION]
    result, _ = LogprobsFormatter(TOKENIZER, 1).completion([eos, A], positions, 0)
    assert result.text_offset == [0, 0]
    shown = LogprobsFormatter(TOKENIZER, 1, skip_special_tokens=False)
    result, _ = shown.completion([eos, A], positions, 0)
    assert result.text_offset == [0, 5]


def test_ids_are_shown_for_first_tokens_too() -> None:
    formatter = LogprobsFormatter(TOKENIZER, 1, as_token_ids=True)
    result, _ = formatter.completion([A, A], [None, POSITION], 0)
    assert result.tokens == [f"token_id:{A}", f"token_id:{A}"]
    assert result.top_logprobs == [
        None,
        {f"token_id:{B}": -1.0, f"token_id:{A}": -3.0},
    ]


def test_prompt_logprobs_keep_the_prompts_token_and_the_top() -> None:
    position = {A: Logprob(-math.inf, 9, "a"), B: Logprob(-1.0, 1, "b")}
    rows = prompt_logprobs_list([None, position], 0)
    assert rows is not None
    assert rows[0] is None
    assert list(rows[1]) == [A]
    assert rows[1][A].logprob == -9999.0
    assert prompt_logprobs_list(None, 1) is None
    assert prompt_logprobs_list([None], None) is None
