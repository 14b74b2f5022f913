import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobs

VOCAB_SIZE = 9
PROMPT = [3, 1, 4, 1, 5, 8, 2, 6]


def _compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
    """The hidden state of position t is t: logits are a function of it."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, VOCAB_SIZE, generator=generator)
    return table.to(hidden_states.device)[hidden_states[:, 0].long()]


def _batch(chunks: list[tuple[str, int, int, int]], device: torch.device):
    """Build a step and its hidden states from (req_id, row, start, end) chunks."""
    num_scheduled = np.array([end - start for *_, start, end in chunks], dtype=np.int32)
    cu_num_logits_np = prefix_sum(np.zeros_like(num_scheduled))
    layout = BatchLayout(
        cu_num_logits_np=cu_num_logits_np,
        cu_num_logits=torch.from_numpy(cu_num_logits_np),
        query_start_loc=torch.from_numpy(prefix_sum(num_scheduled)),
        num_scheduled_tokens_np=num_scheduled,
        num_draft_tokens_per_req=None,
        num_bonus_tokens=1,
        draft_budget=0,
    )
    idx_mapping_np = np.array([row for _, row, _, _ in chunks], dtype=np.int32)
    positions = [p for *_, start, end in chunks for p in range(start, end)]
    hidden_states = torch.tensor(positions, dtype=torch.float32, device=device)
    unused = torch.zeros(0, dtype=torch.int64)
    batch = InputBatch(
        req_ids=[req_id for req_id, *_ in chunks],
        idx_mapping_np=idx_mapping_np,
        idx_mapping=torch.from_numpy(idx_mapping_np).to(device),
        layout=layout,
        input_ids=unused,
        positions=unused,
        block_table=unused,
        slot_mapping=unused,
        seq_lens=unused,
        max_seq_len=0,
        num_computed_tokens=[s for *_, s, _ in chunks],
        logits_indices=unused,
        expanded_idx_mapping=unused,
        expanded_local_pos=unused,
        sample_positions=unused,
    )
    return batch, hidden_states.unsqueeze(1)


def _collect(state: PromptLogprobs, device: torch.device, *chunks):
    batch, hidden_states = _batch(list(chunks), device)
    return state.collect(batch, hidden_states, _compute_logits)


def _state(device: torch.device, mode: str = "raw_logprobs", **kwargs):
    state = PromptLogprobs(3, VOCAB_SIZE, device, mode)
    params = SamplingParams(**{"prompt_logprobs": 2, **kwargs})
    state.add_request(1, "a", params, PROMPT, PROMPT)
    return state


def _check(rows: LogprobsTensors, device: torch.device) -> None:
    positions = torch.arange(len(PROMPT) - 1, device=device).unsqueeze(1)
    logits = _compute_logits(positions)
    logprobs = logits.log_softmax(dim=-1)
    targets = torch.tensor(PROMPT[1:], device=device).unsqueeze(1)
    top = logprobs.topk(2, dim=-1)
    ids = torch.cat([targets, top.indices], dim=1)
    assert rows.logprob_token_ids.tolist() == ids.tolist()
    torch.testing.assert_close(rows.logprobs, logprobs.gather(1, ids))
    rank = 1 + (logits > logits.gather(1, targets)).sum(dim=-1)
    assert rows.selected_token_ranks.tolist() == rank.tolist()


@pytest.mark.parametrize(
    "ends", [[8], [4, 8], [7, 8], [1, 2, 3, 4, 5, 6, 7, 8]], ids=str
)
def test_rows_are_the_same_for_any_chunking(ends, device):
    state = _state(device)
    start, finished = 0, {}
    for end in ends:
        assert finished == {}
        finished = _collect(state, device, ("a", 1, start, end))
        start = end
    assert list(finished) == ["a"]
    _check(finished["a"], device)


def test_a_prompt_is_handed_out_once(device):
    state = _state(device)
    _collect(state, device, ("a", 1, 0, 8))
    assert _collect(state, device, ("a", 1, 8, 9)) == {}


def test_only_requests_that_asked_are_collected_among_others(device):
    state = _state(device)
    state.add_request(0, "b", SamplingParams(), PROMPT, PROMPT)
    chunks = [("b", 0, 20, 21), ("a", 1, 0, 8), ("b", 2, 3, 9)]
    finished = _collect(state, device, *chunks)
    assert list(finished) == ["a"]
    _check(finished["a"], device)


def test_a_chunk_of_rows_bounds_the_logits(device, monkeypatch):
    monkeypatch.setattr(prompt_logprob, "MAX_CHUNK_BYTES", 3 * 4 * VOCAB_SIZE)
    state = _state(device)
    sizes = []

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_states))
        return _compute_logits(hidden_states)

    batch, hidden_states = _batch([("a", 1, 0, 8)], device)
    finished = state.collect(batch, hidden_states, compute_logits)
    assert sizes == [3, 3, 1]
    _check(finished["a"], device)


def test_a_preempted_prompt_is_collected_from_the_start(device):
    state = _state(device)
    _collect(state, device, ("a", 1, 0, 5))
    state.remove_request(1)
    params = SamplingParams(prompt_logprobs=2)
    state.add_request(2, "a", params, PROMPT, PROMPT)
    finished = _collect(state, device, ("a", 2, 0, 8))
    _check(finished["a"], device)


def test_a_request_preempted_after_its_prompt_is_not_collected_again(device):
    state = PromptLogprobs(3, VOCAB_SIZE, device)
    params = SamplingParams(prompt_logprobs=2)
    state.add_request(1, "a", params, PROMPT, [*PROMPT, 7])
    assert _collect(state, device, ("a", 1, 0, 9)) == {}


def test_a_prompt_of_one_token_has_no_rows(device):
    state = PromptLogprobs(3, VOCAB_SIZE, device)
    state.add_request(1, "a", SamplingParams(prompt_logprobs=2), [4], [4])
    rows = _collect(state, device, ("a", 1, 0, 1))["a"]
    assert rows.logprobs.shape == (0, 3)


def test_logits_modes_give_the_logits(device):
    state = _state(device, "processed_logits", prompt_logprobs=0)
    rows = _collect(state, device, ("a", 1, 0, 8))["a"]
    logits = _compute_logits(torch.arange(7, device=device).unsqueeze(1))
    targets = torch.tensor(PROMPT[1:], device=device).unsqueeze(1)
    assert torch.equal(rows.logprobs, logits.gather(1, targets))


def test_all_candidates_are_the_whole_vocabulary(device):
    state = _state(device, prompt_logprobs=-1)
    rows = _collect(state, device, ("a", 1, 0, 8))["a"]
    assert rows.logprobs.shape == (7, 1 + VOCAB_SIZE)
