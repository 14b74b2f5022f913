import numpy as np
import pytest
import torch

from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.layers.draft_vocab import DraftVocab
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.draft_sampler import DraftSampler

VOCAB_SIZE = 5
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


def make_sampler(device, method, *params):
    states = SamplingStates(len(params), VOCAB_SIZE, device, seed=0)
    for row, param in enumerate(params):
        states.add_request(row, str(row), param)
    states.apply_staged_writes()
    config = SpeculativeConfig("draft_model", 2, draft_sample_method=method)
    return DraftSampler(config, len(params), VOCAB_SIZE, states, device)


def make_vocab(device, *ids):
    with torch.device(device):
        vocab = DraftVocab(len(ids), VOCAB_SIZE)
    slots = vocab.weight_slots()
    slots["d2t"].copy_(torch.tensor(ids) - torch.arange(len(ids)))
    slots["t2d"].zero_()[list(ids)] = True
    vocab.process_weights_after_loading()
    return vocab


def sample(sampler, logits, step=0):
    num_rows = len(logits)
    index = torch.arange(num_rows, dtype=torch.int32, device=logits.device)
    anchor = torch.full((num_rows,), 7, device=logits.device)
    is_all_greedy = sampler.prepare(np.arange(num_rows, dtype=np.int32))
    draws = sampler.begin(index, anchor, is_all_greedy, num_drafts=2)
    return sampler.sample(logits.clone(), step, draws)


def test_greedy_drafts_are_the_argmax_and_have_no_distribution(device):
    sampler = make_sampler(device, "greedy", DRAWN)
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0, -1.0]], device=device)
    assert sample(sampler, logits).tolist() == [2]
    assert sampler.draft_logits is None


def test_nan_is_no_draft(device):
    sampler = make_sampler(device, "greedy", GREEDY, GREEDY)
    logits = torch.tensor([[0.0, 3.0, float("nan"), 1.0, -1.0]] * 2, device=device)
    logits[1] = float("nan")
    assert sample(sampler, logits).tolist() == [1, 0]


def test_what_a_draft_was_drawn_from_is_kept_at_its_place(device):
    params = SamplingParams(temperature=0.5), GREEDY
    sampler = make_sampler(device, "probabilistic", *params)
    logits = torch.arange(10.0, device=device).view(2, VOCAB_SIZE)
    drafts = sample(sampler, logits, step=1)
    torch.testing.assert_close(sampler.draft_logits[0, 1], logits[0] / 0.5)
    torch.testing.assert_close(sampler.draft_logits[1, 1], logits[1])
    assert drafts[1].item() == 4
    assert not sampler.draft_logits[:, 0].any()


def test_a_score_is_that_of_the_temperature_before_the_draw(device):
    params = SamplingParams(temperature=0.5), SamplingParams(temperature=0.0)
    sampler = make_sampler(device, "probabilistic", *params)
    logits = torch.full((2, VOCAB_SIZE), float("-inf"), device=device)
    logits[:, 2:4] = torch.tensor([1.0, 2.0])
    before = logits.clone()
    index = torch.arange(2, dtype=torch.int32, device=device)
    assert sampler.score(logits, index).tolist() == pytest.approx([2.0, 1.0])
    assert torch.equal(logits, before)


def test_drafts_of_greedy_requests_alone_need_no_distribution(device):
    sampler = make_sampler(device, "probabilistic", GREEDY)
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0, -1.0]], device=device)
    assert sample(sampler, logits).tolist() == [2]
    assert not sampler.draft_logits.any()


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafts_are_ids_of_the_target(device, method):
    sampler = make_sampler(device, method, GREEDY, DRAWN)
    sampler.restrict(make_vocab(device, 1, 4))
    logits = torch.tensor([[0.0, 1.0], [99.0, 0.0]], device=device)
    assert sample(sampler, logits).tolist() == [4, 1]


def test_trap_7_what_cannot_be_drafted_has_no_chance(device):
    sampler = make_sampler(device, "probabilistic", DRAWN, DRAWN)
    sampler.restrict(make_vocab(device, 1, 4))
    for step in range(2):
        sample(sampler, torch.tensor([[step, 1.0]], device=device), step)
    inf = float("inf")
    # Trap 8: the width is the target's.
    assert sampler.draft_logits[0].tolist() == [
        [-inf, 0.0, -inf, -inf, 1.0],
        [-inf, 1.0, -inf, -inf, 1.0],
    ]
    # Nobody has drafted there.
    assert not sampler.draft_logits[1].any()


def test_a_tokens_noise_does_not_depend_on_the_draft_vocabulary(device):
    params = SamplingParams(temperature=1.0, seed=5)
    whole = make_sampler(device, "probabilistic", *[params] * 9)
    part = make_sampler(device, "probabilistic", *[params] * 9)
    part.restrict(make_vocab(device, 0, 2, 3))
    few = torch.randn(9, 3, device=device)
    all_of_them = torch.full((9, VOCAB_SIZE), float("-inf"), device=device)
    all_of_them[:, [0, 2, 3]] = few
    drafts = sample(part, few)
    assert drafts.tolist() == sample(whole, all_of_them).tolist()
    assert len(set(drafts.tolist())) > 1


@pytest.mark.parametrize("ids", [None, (2, 4)])
def test_a_broken_row_is_certain_of_its_draft(device, ids):
    sampler = make_sampler(device, "probabilistic", DRAWN, DRAWN)
    width, first, even = VOCAB_SIZE, 0, [0.2] * 5
    if ids is not None:
        sampler.restrict(make_vocab(device, *ids))
        width, first, even = len(ids), ids[0], [0, 0, 0.5, 0, 0.5]
    logits = torch.zeros(2, width, device=device)
    logits[0] = float("nan")
    assert sample(sampler, logits)[0].item() == first
    certain = torch.nn.functional.one_hot(torch.tensor(first), VOCAB_SIZE).float()
    expected = torch.stack([certain, torch.tensor(even)]).to(device)
    torch.testing.assert_close(sampler.draft_logits[:, 0].softmax(-1), expected)
