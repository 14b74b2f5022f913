import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates
from vllm.v1.worker.gpu.sample.uses import Uses

VOCAB_SIZE = 100


def _states(device: torch.device, *params: SamplingParams, seed=0) -> SamplingStates:
    states = SamplingStates(len(params), VOCAB_SIZE, device, seed)
    for row, param in enumerate(params):
        states.add_request(row, f"req-{row}", param)
    states.apply_staged_writes()
    return states


def test_a_request_fills_its_row(device):
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=-3)
    states = _states(device, SamplingParams(temperature=0.0), params)
    numbers = (states.temperature, states.top_k, states.top_p, states.min_p)
    assert [number.gpu.tolist() for number in numbers] == [
        [0, 0.5],
        [0, 7],
        [1, 0.75],
        [0, 0.25],
    ]
    assert states.seeds.gpu[1] == -3


def test_top_k_of_the_whole_vocabulary_is_no_filter(device):
    states = _states(device, SamplingParams(top_k=VOCAB_SIZE), SamplingParams(top_k=-1))
    assert states.top_k.np.tolist() == [0, 0]
    assert [states.find_uses(row) for row in (0, 1)] == [Uses.NOISE] * 2


def test_a_request_is_greedy_by_its_own_temperature(device):
    states = _states(device, SamplingParams(temperature=0.0), SamplingParams())
    assert states.is_all_greedy(np.array([0]))
    assert not states.is_all_greedy(np.array([0, 1]))


@pytest.mark.parametrize(
    ("params", "uses"),
    [
        ({"temperature": 0.0}, 0),
        ({}, Uses.NOISE),
        ({"temperature": 0.7}, Uses.NOISE | Uses.TEMPERATURE),
        ({"min_p": 0.1}, Uses.NOISE | Uses.MIN_P),
        ({"top_k": 5}, Uses.NOISE | Uses.TOP_K_TOP_P),
        ({"top_p": 0.5}, Uses.NOISE | Uses.TOP_K_TOP_P),
        ({"temperature": 0.0, "logprobs": 0}, Uses.LOGPROBS),
    ],
)
def test_a_request_uses_what_its_numbers_ask_for(params, uses, device):
    assert _states(device, SamplingParams(**params)).find_uses(0) == uses


def test_requests_without_a_seed_get_different_ones_that_outlive_a_preemption(device):
    states = _states(device, SamplingParams(), SamplingParams())
    first, second = states.seeds.np.tolist()
    assert first != second
    states.add_request(1, "req-0", SamplingParams())
    assert states.seeds.np[1] == first


def test_the_engines_own_draw_decides_where_no_seed_is_configured(device):
    seeds = [_states(device, SamplingParams(), seed=None).seeds.np[0] for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_wanted_logprobs_count_the_candidates(device):
    states = _states(
        device,
        SamplingParams(),
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=5),
        SamplingParams(logprobs=-1),
        SamplingParams(logprobs=1, logprob_token_ids=[4, 5, 6]),
    )
    assert states.num_logprobs_np.tolist() == [NO_LOGPROBS, 0, 5, VOCAB_SIZE, 3]
    assert states.chosen_token_ids.lengths.np.tolist() == [0, 0, 0, 0, 3]
    states.remove_request(4)
    assert states.num_logprobs_np[4] == NO_LOGPROBS
