import torch

from vllm.config.speculative import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.draft_sampler import DraftSampler

VOCAB_SIZE = 5


def make_sampler(device, method, *params):
    states = SamplingStates(len(params), VOCAB_SIZE, device, seed=0)
    for row, param in enumerate(params):
        states.add_request(row, str(row), param)
    states.apply_staged_writes()
    config = SpeculativeConfig("draft_model", 2, draft_sample_method=method)
    return DraftSampler(config, len(params), VOCAB_SIZE, states, device)


def rows(num_rows, device):
    index = torch.arange(num_rows, dtype=torch.int32, device=device)
    return index, torch.full((num_rows,), 7, device=device)


def test_greedy_drafts_are_the_argmax_and_have_no_distribution(device):
    sampler = make_sampler(device, "greedy", SamplingParams(temperature=1.0))
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0, -1.0]], device=device)
    assert sampler.sample(logits, *rows(1, device), 0).tolist() == [2]
    assert sampler.draft_logits is None


def test_what_a_draft_was_drawn_from_is_kept_at_its_place(device):
    params = SamplingParams(temperature=0.5), SamplingParams(temperature=0.0)
    sampler = make_sampler(device, "probabilistic", *params)
    logits = torch.arange(10.0, device=device).view(2, VOCAB_SIZE)
    drafts = sampler.sample(logits.clone(), *rows(2, device), 1)
    torch.testing.assert_close(sampler.draft_logits[0, 1], logits[0] / 0.5)
    torch.testing.assert_close(sampler.draft_logits[1, 1], logits[1])
    assert drafts[1].item() == 4
    assert not sampler.draft_logits[:, 0].any()


def test_a_broken_row_is_certain_of_its_draft(device):
    params = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0)
    sampler = make_sampler(device, "probabilistic", *params)
    logits = torch.zeros(2, VOCAB_SIZE, device=device)
    logits[0] = float("nan")
    drafts = sampler.sample(logits, *rows(2, device), 0)
    assert drafts[0].item() == 0
    expected = torch.tensor([[1.0, 0, 0, 0, 0], [0.2] * 5], device=device)
    torch.testing.assert_close(sampler.draft_logits[:, 0].softmax(-1), expected)
