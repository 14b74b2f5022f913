import math

import numpy as np
import pytest
import torch

from tests.v1.worker.gpu.output_layers import OutputLayer
from vllm.config.model import LOGPROBS_MODES
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum
from vllm.v1.worker.gpu.sample.output_rows import OutputRows
from vllm.v1.worker.gpu.sample.sampler import Sampler, SamplingRows
from vllm.v1.worker.gpu.sample.uses import Uses

VOCAB_SIZE = 12
GREEDY = {"temperature": 0.0}
NEG_INF = float("-inf")


class Step:
    """A sampler with requests in its rows, and the logits of one step."""

    def __init__(
        self,
        device: torch.device,
        *params: SamplingParams,
        mode: str = "raw_logprobs",
        vocab_size: int = VOCAB_SIZE,
        prompt: tuple[int, ...] = (0, 1),
        output: tuple[int, ...] = (),
    ) -> None:
        self.device = device
        self.sampler = Sampler(len(params), vocab_size, device, mode, seed=0)
        tokens = [*prompt, *output]
        for row, param in enumerate(params):
            self.sampler.add_request(row, f"req-{row}", param, list(prompt), tokens)
        self.sampler.apply_staged_writes()
        self.num_tokens = len(tokens)
        self.all_token_ids = torch.zeros(
            (len(params), 64), dtype=torch.int32, device=device
        )
        self.all_token_ids[:, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        torch.manual_seed(0)
        self.logits = torch.randn(len(params), vocab_size, device=device)
        self.output_layer = OutputLayer(finds_argmax=True)

    def rows(self, req_state_indices: list[int], num_rows: list[int]) -> SamplingRows:
        idx_mapping_np = np.array(req_state_indices, dtype=np.int32)
        cu_num_logits_np = prefix_sum(np.array(num_rows, dtype=np.int32))
        cu_num_logits = torch.from_numpy(cu_num_logits_np).to(self.device)
        layout = BatchLayout(
            cu_num_logits_np=cu_num_logits_np,
            cu_num_logits=cu_num_logits,
            query_start_loc=cu_num_logits,
            num_scheduled_tokens_np=np.ones_like(idx_mapping_np),
            num_draft_tokens_per_req=None,
            num_bonus_tokens=1,
            draft_budget=0,
        )
        local_pos = [place for count in num_rows for place in range(count)]
        local_pos = torch.tensor(local_pos, dtype=torch.int32, device=self.device)
        owners = torch.from_numpy(np.repeat(idx_mapping_np, num_rows)).to(self.device)
        return SamplingRows(
            idx_mapping_np=idx_mapping_np,
            expanded_idx_mapping=owners,
            expanded_local_pos=local_pos,
            positions=self.num_tokens + local_pos.long(),
            input_ids=torch.zeros_like(local_pos, dtype=torch.int64),
            all_token_ids=self.all_token_ids,
            layout=layout,
        )

    def run(
        self, req_state_indices=None, num_rows=None, apply_grammar=None
    ) -> SamplerOutput:
        """Sample the step of the given requests, all of them by default."""
        indices = req_state_indices
        if indices is None:
            indices = list(range(len(self.logits)))
        num_rows = num_rows or [1] * len(indices)
        owners = [i for i, n in zip(indices, num_rows, strict=True) for _ in range(n)]
        logits = self.logits[owners].clone()
        outputs = OutputRows(self.output_layer, logits)
        return self.sampler(outputs, self.rows(indices, num_rows), apply_grammar)

    def commit(self, output: SamplerOutput) -> None:
        """Make a step's tokens, one of each request, part of the past."""
        idx_mapping = torch.arange(len(self.logits), device=self.device)
        self.sampler.post_update(idx_mapping.to(torch.int32), output)
        sampled = output.sampled_token_ids[:, 0].to(torch.int32)
        self.all_token_ids[:, self.num_tokens] = sampled
        self.num_tokens += 1


def _tokens(output: SamplerOutput) -> list[int]:
    return output.sampled_token_ids.squeeze(1).tolist()


MIXED = [
    SamplingParams(**GREEDY),
    SamplingParams(seed=1, logprobs=2),
    SamplingParams(seed=2, temperature=0.7, top_k=4, top_p=0.9),
    SamplingParams(**GREEDY, repetition_penalty=1.8, logprobs=0),
    SamplingParams(seed=3, logit_bias={3: 2.0}, min_p=0.05),
    SamplingParams(**GREEDY, bad_words_token_ids=[[4], [5, 6]], logprobs=5),
    SamplingParams(seed=4, allowed_token_ids=[1, 7, 9], frequency_penalty=0.5),
    SamplingParams(**GREEDY, min_tokens=9, all_stop_token_ids=[2, 8]),
    SamplingParams(seed=5, logprobs=3, logprob_token_ids=[6, 0]),
]


def test_a_step_uses_what_one_of_its_requests_asks_for(device):
    biased = SamplingParams(**GREEDY, logit_bias={3: 1.0})
    step = Step(device, SamplingParams(**GREEDY), biased, SamplingParams(min_p=0.1))

    def uses(*rows):
        return step.sampler.find_uses(np.array(rows))

    assert uses(0) == 0
    assert uses(0, 1) == Uses.LOGIT_BIAS
    assert uses(1, 2) == Uses.LOGIT_BIAS | Uses.NOISE | Uses.MIN_P
    step.sampler.remove_request(1)
    step.sampler.add_request(1, "next", SamplingParams(**GREEDY), [0], [0])
    assert uses(0, 1) == 0


# What makes one effect run, and the logits 5, 4, -3, 2 after it, alone; the output
# so far is token 0, then token 2, twice.
ALONE = {
    "temperature": ({"temperature": 0.5}, [10, 8, -6, 4]),
    "top_k": ({"top_k": 2}, [5, 4, NEG_INF, NEG_INF]),
    "top_p": ({"top_p": 0.5}, [5, NEG_INF, NEG_INF, NEG_INF]),
    "min_p": ({"min_p": 0.2}, [5, 4, NEG_INF, NEG_INF]),
    "presence_penalty": ({"presence_penalty": 1.0}, [4, 4, -4, 2]),
    "frequency_penalty": ({"frequency_penalty": 1.0}, [4, 4, -5, 2]),
    # The prompt's token counts as well.
    "repetition_penalty": ({"repetition_penalty": 2.0}, [2.5, 4, -6, 1]),
    "logit_bias": ({"logit_bias": {1: -4.0}}, [5, 0, -3, 2]),
    "allowed_token_ids": ({"allowed_token_ids": [1, 2]}, [NEG_INF, 4, -3, NEG_INF]),
    "bad_words": ({"bad_words_token_ids": [[1]]}, [5, NEG_INF, -3, 2]),
    "long_bad_words": ({"bad_words_token_ids": [[2, 0]]}, [NEG_INF, 4, -3, 2]),
    "min_tokens": (
        {"min_tokens": 9, "all_stop_token_ids": [0]},
        [NEG_INF, 4, -3, 2],
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_effect_alone_is_run_and_leaves_the_neighbour_as_it_is(name, device):
    wish, expected = ALONE[name]
    params = [SamplingParams(seed=1), SamplingParams(seed=1, **wish)]
    step = Step(device, *params, vocab_size=4, prompt=(3,), output=(0, 2, 2))
    step.logits[:] = torch.tensor([5.0, 4.0, -3.0, 2.0])
    plain = step.logits[0].tolist()
    rows = step.rows([0, 1], [1, 1])
    processed = step.sampler.apply_sampling_params(step.logits, rows)
    assert processed.tolist() == [plain, expected]


@pytest.mark.parametrize("name", ALONE)
def test_a_token_is_drawn_from_what_one_effect_alone_leaves(name, device):
    wish, expected = ALONE[name]
    params = SamplingParams(seed=1, logprobs=-1, **wish)
    step = Step(
        device,
        params,
        mode="processed_logits",
        vocab_size=4,
        prompt=(3,),
        output=(0, 2, 2),
    )
    step.logits[:] = torch.tensor([5.0, 4.0, -3.0, 2.0])
    tensors = step.run().logprobs_tensors
    drawn_from = dict(
        zip(
            tensors.logprob_token_ids[0].tolist(),
            tensors.logprobs[0].tolist(),
            strict=True,
        )
    )
    assert [drawn_from[token_id] for token_id in range(4)] == expected


def test_noise_alone_draws_other_tokens_than_the_likeliest(device):
    params = [SamplingParams(seed=seed) for seed in range(30)]
    step = Step(device, *params)
    step.logits[:] = 0.0
    assert len(set(_tokens(step.run()))) > 3
    greedy = Step(device, *[SamplingParams(**GREEDY)] * 30)
    greedy.logits[:] = 0.0
    assert _tokens(greedy.run()) == [0] * 30


def test_every_request_of_a_mixed_batch_is_sampled_as_if_alone(device):
    step = Step(device, *MIXED, vocab_size=300, output=(5, 3, 5))
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    together = step.run(order)
    for batch_idx, row in enumerate(order):
        alone = step.run([row])
        assert _tokens(alone)[0] == _tokens(together)[batch_idx]
        if MIXED[row].num_logprobs is None:
            continue
        lists = together.logprobs_tensors.to_cpu_nonblocking().tolists()
        mine = lists.slice_request(batch_idx, 1)
        num_columns = 1 + MIXED[row].num_logprobs
        expected = alone.logprobs_tensors
        ids = expected.logprob_token_ids[:, :num_columns].tolist()
        assert mine.logprob_token_ids[:, :num_columns].tolist() == ids
        values = expected.logprobs[:, :num_columns].cpu().numpy()
        np.testing.assert_array_equal(mine.logprobs[:, :num_columns], values)


def test_rows_of_logprobs_exist_only_for_requests_that_asked(device):
    step = Step(
        device,
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, logprobs=2),
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, logprobs=0),
    )
    tensors = step.run().logprobs_tensors
    assert tensors.logprobs.shape == (2, 3)
    assert tensors.cu_num_generated_tokens == [0, 0, 1, 1, 2]
    sampled = tensors.logprob_token_ids[:, 0].tolist()
    assert sampled == step.logits[[1, 3]].argmax(dim=-1).tolist()


def test_greedy_requests_are_sampled_without_their_logits(device):
    step = Step(device, *[SamplingParams(**GREEDY)] * 3)
    assert _tokens(step.run()) == step.logits.argmax(dim=-1).tolist()
    assert step.output_layer.passes == ["argmax"]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("wishes", [[0], [1], [5, 2], [None, 3, 0], [11, None]])
def test_logprobs_of_greedy_requests_need_no_logits(mode, wishes, device):
    params = [SamplingParams(**GREEDY, logprobs=wish) for wish in wishes]
    step, written = (Step(device, *params, mode=mode) for _ in range(2))
    written.output_layer.finds_argmax = False
    output, expected = step.run(), written.run()
    assert step.output_layer.passes == ["statistics"]
    assert written.output_layer.passes == ["logits"]
    assert torch.equal(output.sampled_token_ids, expected.sampled_token_ids)
    tensors, others = output.logprobs_tensors, expected.logprobs_tensors
    for ours, theirs in zip(tensors[:3], others[:3], strict=True):
        assert torch.equal(ours, theirs)
    assert [ours.dtype for ours in tensors[:3]] == [one.dtype for one in others[:3]]
    assert tensors[3:] == others[3:]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=0),
        SamplingParams(**GREEDY, logprobs=1, logprob_token_ids=[3]),
        SamplingParams(**GREEDY, presence_penalty=0.5),
        SamplingParams(**GREEDY, logit_bias={3: 1.0}),
    ],
)
def test_one_request_that_needs_a_whole_row_gets_its_own(device, params):
    if device.type == "cuda":
        pytest.skip("all rows are written")
    step = Step(device, SamplingParams(**GREEDY), params)
    assert _tokens(step.run())[0] == step.logits[0].argmax()
    assert step.output_layer.passes == ["statistics"]
    assert step.output_layer.num_written == [1]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("widest", [None, 2, 9])
def test_a_step_in_parts_gives_what_whole_rows_give(mode, widest, device):
    greedy = [SamplingParams(**GREEDY, logprobs=wish) for wish in (None, widest, 0)]
    params = [*MIXED[:4], greedy[1], *MIXED[4:], greedy[0], greedy[2]]
    step, written = (Step(device, *params, mode=mode) for _ in range(2))
    written.output_layer.finds_argmax = False
    indices = list(range(len(params)))
    # Some in another order, and one that owns no row.
    for chosen in (indices, [8, 4, 2, 10, 0, 3], [1, 0], [4, 6], [11, 7]):
        num_rows = [1] * len(chosen)
        if len(chosen) > 2:
            num_rows[2] = 0
        output, expected = step.run(chosen, num_rows), written.run(chosen, num_rows)
        assert torch.equal(output.sampled_token_ids, expected.sampled_token_ids)
        assert torch.equal(output.num_sampled, expected.num_sampled)
        if expected.logprobs_tensors is None:
            assert output.logprobs_tensors is None
            continue
        lists, others = (
            one.logprobs_tensors.to_cpu_nonblocking().tolists()
            for one in (output, expected)
        )
        assert lists.cu_num_generated_tokens == others.cu_num_generated_tokens
        for batch_idx, row in enumerate(chosen):
            wish = params[row].num_logprobs
            if wish is None or num_rows[batch_idx] == 0:
                continue
            mine = lists.slice_request(batch_idx, 1)
            theirs = others.slice_request(batch_idx, 1)
            np.testing.assert_array_equal(mine[2], theirs[2])
            for ours, wanted in zip(mine[:2], theirs[:2], strict=True):
                ours, wanted = (x[:, : 1 + wish] for x in (ours, wanted))
                np.testing.assert_array_equal(ours, wanted)
    if device.type == "cpu":
        assert set(step.output_layer.passes) == {"statistics"}


def test_more_logprobs_than_are_listed_need_whole_rows(device):
    for wish, expected in ((64, "statistics"), (65, "logits")):
        params = SamplingParams(**GREEDY, logprobs=wish)
        step = Step(device, params, vocab_size=100)
        assert step.run().logprobs_tensors.logprobs.shape == (1, 1 + wish)
        assert step.output_layer.passes == [expected]


def test_a_grammar_needs_whole_rows(device):
    step = Step(device, SamplingParams(**GREEDY))
    step.run(apply_grammar=lambda logits: None)
    assert step.output_layer.passes == ["logits"]


def test_without_a_wish_for_logprobs_there_are_none(device):
    step = Step(device, SamplingParams(**GREEDY), SamplingParams(**GREEDY, logprobs=0))
    assert step.run([0]).logprobs_tensors is None
    assert step.run([0, 1], [1, 0]).logprobs_tensors is None


def test_a_prefill_chunk_owns_no_row_and_gets_no_token(device):
    params = SamplingParams(**GREEDY, logprobs=0)
    step = Step(device, *[params] * 4)
    output = step.run([0, 1, 2, 3], [0, 1, 1, 0])
    best = step.logits.argmax(dim=-1).tolist()
    assert _tokens(output) == [-1, best[1], best[2], -1]
    assert output.num_sampled.tolist() == [0, 1, 1, 0]
    assert output.logprobs_tensors.cu_num_generated_tokens == [0, 0, 1, 2, 2]


def test_a_step_of_prefill_chunks_alone_samples_nothing(device):
    step = Step(device, SamplingParams(logprobs=1))
    output = step.run([0], [0])
    assert _tokens(output) == [-1]
    assert output.num_sampled.tolist() == [0]
    assert output.logprobs_tensors is None


def _editing_params(**kwargs) -> SamplingParams:
    return SamplingParams(
        seed=1,
        temperature=0.5,
        top_k=3,
        logit_bias={5: 3.0},
        repetition_penalty=1.5,
        bad_words_token_ids=[[7]],
        **kwargs,
    )


@pytest.mark.parametrize("num_silent", [0, 1])
def test_raw_logprobs_are_the_models_own(num_silent, device):
    wishes = [SamplingParams(seed=1)] * num_silent + [_editing_params(logprobs=-1)]
    step = Step(device, *wishes)

    def apply_grammar(logits: torch.Tensor) -> None:
        logits[:, 9:] = NEG_INF

    tensors = step.run(apply_grammar=apply_grammar).logprobs_tensors
    expected = step.logits[-1:].log_softmax(dim=-1)
    actual = torch.full_like(expected, torch.nan)
    actual.scatter_(1, tensors.logprob_token_ids.long(), tensors.logprobs)
    torch.testing.assert_close(actual, expected)


def test_raw_logits_are_the_models_own(device):
    step = Step(device, _editing_params(logprobs=3), mode="raw_logits")
    tensors = step.run().logprobs_tensors
    expected = step.logits.gather(1, tensors.logprob_token_ids.long())
    assert torch.equal(tensors.logprobs, expected)


def test_processed_logprobs_are_what_the_token_was_drawn_from(device):
    params = SamplingParams(seed=1, temperature=0.5, top_k=2, logprobs=3)
    step = Step(device, params, mode="processed_logprobs")
    tensors = step.run().logprobs_tensors
    top = step.logits.topk(2).values[0] / 0.5
    expected = top.log_softmax(dim=-1).tolist() + [NEG_INF]
    assert tensors.logprobs[0, 1:].tolist() == pytest.approx(expected, abs=1e-6)


def test_processed_logits_are_what_the_softmax_saw(device):
    params = SamplingParams(seed=1, temperature=0.5, logprobs=1)
    step = Step(device, params, mode="processed_logits")
    value = step.run().logprobs_tensors.logprobs[0, 1].item()
    assert value == pytest.approx(step.logits.max().item() / 0.5)


def test_the_effects_work_in_the_documented_order(device):
    # The bias brings token 3 to 8, the repetition penalty halves it, the temperature
    # doubles it; the penalty would not change a bias that came later.
    params = SamplingParams(
        seed=1,
        temperature=0.5,
        repetition_penalty=2.0,
        logit_bias={3: 6.0},
        logprobs=-1,
    )
    step = Step(device, params, mode="processed_logits", output=(3,))
    step.logits[0] = 2.0
    processed = step.sampler.apply_sampling_params(step.logits, step.rows([0], [1]))
    assert processed[0, 3] == 8.0
    # 0 and 1 are in the prompt.
    assert processed[0, :3].tolist() == [2.0, 2.0, 4.0]
    assert step.logits.unique().tolist() == [2.0]


def test_top_p_looks_at_the_distribution_after_temperature_and_min_p(device):
    probabilities = [0.4, 0.3, 0.15, 0.1, 0.05]
    params = SamplingParams(seed=1, min_p=0.2, top_p=0.8)
    step = Step(device, params, vocab_size=5)
    step.logits[0] = torch.tensor(probabilities).log()
    processed = step.sampler.apply_sampling_params(step.logits, step.rows([0], [1]))
    # min_p drops 0.05; 0.7 / 0.95 < 0.8, 0.85 / 0.95 >= 0.8.
    assert processed.isneginf().tolist() == [[False, False, False, True, True]]


def test_the_grammar_mask_binds_a_biased_token(device):
    step = Step(device, SamplingParams(**GREEDY, logit_bias={4: 100.0}))

    def apply_grammar(logits: torch.Tensor) -> None:
        logits[:, 4] = NEG_INF

    assert _tokens(step.run(apply_grammar=apply_grammar)) != [4]


def test_a_row_that_nothing_is_left_of_gives_minus_one_and_leaves_its_neighbour(device):
    params = [SamplingParams(seed=1, logprobs=1), SamplingParams(seed=2)]
    step = Step(device, *params)
    neighbour = _tokens(step.run([1]))[0]
    step.logits[0] = torch.nan
    assert _tokens(step.run()) == [-1, neighbour]


def test_several_rows_of_a_request_see_the_drafts_before_them(device):
    params = SamplingParams(
        seed=1,
        frequency_penalty=1.0,
        bad_words_token_ids=[[6, 2]],
        min_tokens=2,
        all_stop_token_ids=[11],
    )
    step = Step(device, SamplingParams(seed=1), params)
    rows = step.rows([0, 1], [1, 3])
    # Drafts 6 and 4 stand before the second and the third row.
    rows.input_ids[2], rows.input_ids[3] = 6, 4
    logits = torch.zeros(4, VOCAB_SIZE, device=device)
    processed = step.sampler.apply_sampling_params(logits, rows)
    expected = torch.zeros(4, VOCAB_SIZE)
    expected[2:, 6] = -1
    expected[3, 4] = -1
    expected[2, 2] = NEG_INF
    expected[1:3, 11] = NEG_INF
    assert torch.equal(processed.cpu(), expected)


def test_committed_tokens_are_penalised_in_the_next_step(device):
    step = Step(device, SamplingParams(**GREEDY, presence_penalty=2.0))
    step.logits[0] = 0.0
    step.logits[0, 5] = 1.0
    output = step.run()
    assert _tokens(output) == [5]
    step.commit(output)
    # Of the equal others the prompt's tokens are not penalised.
    assert _tokens(step.run()) == [0]


def test_a_seeded_request_resumes_with_the_same_tokens(device):
    params = SamplingParams(seed=9, presence_penalty=0.5, bad_words_token_ids=[[3, 4]])
    step = Step(device, params, vocab_size=500)
    first = step.run()
    token = _tokens(first)[0]
    step.commit(first)
    resumed = Step(device, params, vocab_size=500, output=(token,))
    assert _tokens(step.run()) == _tokens(resumed.run())


def test_a_bad_word_may_have_begun_before_the_request_was_preempted(device):
    # Greedy on a row that likes token 4 best; the output so far ends with the prefix 3.
    params = SamplingParams(temperature=0.0, bad_words_token_ids=[[3, 4]])
    resumed = Step(device, params, output=(2, 3))
    resumed.logits[0, 4] = 50.0
    assert _tokens(resumed.run()) != [4]


def test_nans_are_counted_where_asked(device, monkeypatch):
    params = [SamplingParams(**GREEDY)] * 3
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    step = Step(device, *params)
    step.logits[1, 2:4] = torch.nan
    assert step.run([0, 1, 2], [1, 1, 0]).num_nans.tolist() == [0, 2, 0]
    assert step.output_layer.passes == ["logits"]
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "0")
    assert Step(device, *params).run().num_nans is None


def test_logprob_of_the_sampled_token_is_finite_for_a_certain_token(device):
    step = Step(device, SamplingParams(**GREEDY, logprobs=0))
    step.logits[0] = NEG_INF
    step.logits[0, 3] = 2.0
    tensors = step.run().logprobs_tensors
    assert math.isclose(tensors.logprobs.item(), 0.0, abs_tol=1e-6)
    assert tensors.selected_token_ranks.tolist() == [1]


def test_a_row_that_is_given_away_keeps_nothing_of_its_last_request(device):
    step = Step(device, *MIXED, vocab_size=300, output=(5, 3, 5))
    plain = SamplingParams(seed=11)
    tokens = [0, 1, 5, 3, 5]
    for row in range(1, len(MIXED)):
        step.sampler.remove_request(row)
        step.sampler.add_request(row, f"new-{row}", plain, tokens[:2], tokens)
    step.sampler.apply_staged_writes()
    step.logits[:] = step.logits[0]
    output = step.run()
    fresh = Step(device, plain, vocab_size=300, output=(5, 3, 5))
    fresh.logits[0] = step.logits[0]
    assert _tokens(output)[1:] == _tokens(fresh.run()) * (len(MIXED) - 1)
    assert output.logprobs_tensors is None
    rows = step.rows(list(range(1, len(MIXED))), [1] * (len(MIXED) - 1))
    processed = step.sampler.apply_sampling_params(step.logits[1:], rows)
    assert torch.equal(processed, step.logits[1:])
