import math

import numpy as np
import pytest

from tests.v1.engine.test_detokenizer import byte_ids
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.token_texts import TokenTable, TokenTexts
from vllm.v1.outputs import LogprobsLists


def rows(ids, values, ranks):
    return LogprobsLists(
        np.array(ids), np.array(values, dtype=np.float32), np.array(ranks)
    )


def process(tokenizer, lists, num_tokens, prompt=(1, 2), **params):
    processor = LogprobsProcessor(
        TokenTable(tokenizer), SamplingParams(**params), list(prompt)
    )
    processor.update(lists, num_tokens)
    return processor


def test_the_sampled_token_comes_first_with_its_own_rank(tokenizer):
    a, b, c = byte_ids(tokenizer, "abc")
    lists = rows([[c, a, b]], [[-3.0, -0.5, -1.0]], [7])
    [position] = process(tokenizer, lists, 1, logprobs=2).logprobs
    assert [(i, p.rank, p.decoded_token) for i, p in position.items()] == [
        (c, 7, "c"),
        (a, 1, "a"),
        (b, 2, "b"),
    ]


def test_a_sampled_token_among_the_likeliest_is_listed_once(tokenizer):
    a, b = byte_ids(tokenizer, "ab")
    lists = rows([[b, a, b]], [[-1.0, -0.5, -1.0]], [2])
    [position] = process(tokenizer, lists, 1, logprobs=2).logprobs
    assert {i: p.rank for i, p in position.items()} == {b: 2, a: 1}


def test_columns_of_wider_neighbours_are_cut_off(tokenizer):
    lists = rows([[3, 4, 5, 6]], [[-1.0, -1.0, -2.0, -3.0]], [1])
    [position] = process(tokenizer, lists, 1, logprobs=1).logprobs
    assert list(position) == [3, 4]


def test_minus_one_keeps_every_column(tokenizer):
    lists = rows([[3, 3, 4, 5]], [[-1.0, -1.0, -2.0, -3.0]], [1])
    [position] = process(tokenizer, lists, 1, logprobs=-1).logprobs
    assert sorted(position) == [3, 4, 5]


def test_chosen_ids_have_no_rank_and_padding_is_dropped(tokenizer):
    lists = rows([[3, 9, 8, -1]], [[-1.0, -2.0, -3.0, -math.inf]], [1])
    [position] = process(tokenizer, lists, 1, logprob_token_ids=[9, 8, 7]).logprobs
    assert {i: p.rank for i, p in position.items()} == {3: 1, 9: None, 8: None}


def test_equal_candidates_share_the_best_rank(tokenizer):
    lists = rows([[3, 8, 9, 7, 6]], [[-3.0, -1.0, -2.0, -2.0, -3.0]], [4])
    [position] = process(tokenizer, lists, 1, logprobs=4).logprobs
    assert {i: p.rank for i, p in position.items()} == {3: 4, 8: 1, 9: 2, 7: 2, 6: 4}


def test_rows_behind_a_stop_are_not_counted(tokenizer):
    lists = rows([[3], [4], [5]], [[-1.0], [-2.0], [-4.0]], [1, 1, 1])
    processor = process(tokenizer, lists, 2, logprobs=0)
    assert len(processor.logprobs) == 2
    assert processor.cumulative_logprob == pytest.approx(-3.0)


def test_an_impossible_candidate_stays_minus_infinity(tokenizer):
    lists = rows([[3, 4]], [[-1.0, -math.inf]], [1])
    [position] = process(tokenizer, lists, 1, logprobs=1).logprobs
    assert position[4].logprob == -math.inf


def test_nothing_is_collected_unasked(tokenizer):
    processor = process(tokenizer, rows([[3]], [[-1.0]], [1]), 1)
    assert processor.logprobs is None
    assert processor.cumulative_logprob is None


def test_the_first_prompt_token_has_none(tokenizer):
    prompt = byte_ids(tokenizer, "ab")
    processor = process(tokenizer, None, 0, prompt, prompt_logprobs=0)
    processor.update_prompt(rows([[prompt[1]]], [[-1.0]], [1]))
    first, second = processor.prompt_logprobs
    assert first is None
    assert second[prompt[1]].decoded_token == "b"


def test_a_prompt_of_one_token_needs_no_row(tokenizer):
    processor = process(tokenizer, None, 0, [5], prompt_logprobs=1)
    assert processor.prompt_logprobs == [None]


def test_token_texts_join_to_the_text(tokenizer):
    texts = TokenTexts(TokenTable(tokenizer))
    pieces = []
    for token_id in byte_ids(tokenizer, "a☺é!"):
        pieces.append(texts.get(token_id))
        texts.advance(token_id)
    assert pieces == ["a", "", "", "☺", "", "é", "!"]


def test_a_candidate_is_read_behind_the_tokens_before_it(tokenizer):
    first, second, _ = byte_ids(tokenizer, "☺")
    [other] = byte_ids(tokenizer, "x")
    texts = TokenTexts(TokenTable(tokenizer))
    texts.advance(first)
    assert texts.get(second) == ""
    # The begun character can no longer be completed.
    assert texts.get(other) == "\ufffdx"
