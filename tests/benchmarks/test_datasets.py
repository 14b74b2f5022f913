import pytest

from vllm.benchmarks.datasets import file_requests, random_requests
from vllm.exceptions import VLLMValidationError


def test_random_prompts_are_token_ids_of_the_pool():
    requests = random_requests(5, 8, 4, 0.0, [7, 9], seed=1)
    assert [len(request.prompt) for request in requests] == [8] * 5
    assert {token for request in requests for token in request.prompt} <= {7, 9}
    assert {request.num_output_tokens for request in requests} == {4}


def test_the_same_seed_draws_the_same_prompts():
    first, second = (random_requests(3, 8, 4, 0.5, [1, 2, 3], seed=2) for _ in "ab")
    assert first == second


def test_lengths_stay_inside_the_range():
    requests = random_requests(50, 10, 20, 0.5, [1], seed=3)
    lengths = {request.num_prompt_tokens for request in requests}
    assert min(lengths) >= 5
    assert max(lengths) <= 15
    assert len(lengths) > 1


def test_without_a_pool_prompts_are_words():
    (request,) = random_requests(1, 3, 4, 0.0, [], seed=0)
    assert len(request.prompt.split()) == 3


def test_a_file_is_read_in_order_and_again_from_its_start(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_len": 3}\n\n{"prompt": "b"}\n')
    requests = file_requests(str(path), 3, 7)
    assert [(r.prompt, r.num_output_tokens) for r in requests] == [
        ("a", 3),
        ("b", 7),
        ("a", 3),
    ]


@pytest.mark.parametrize("line", ["{", '{"text": "a"}', '{"prompt": 3}', "[]"])
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(VLLMValidationError, match="line 2"):
        file_requests(str(path), 3, 7)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(VLLMValidationError, match="no prompt"):
        file_requests(str(path), 3, 7)
