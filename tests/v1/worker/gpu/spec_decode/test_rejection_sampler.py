import numpy as np
import pytest
import torch

from tests.v1.worker.gpu.output_layers import OutputLayer, rows_of
from tests.v1.worker.gpu.spec_decode.spec_rows import make_spec_rows
from vllm import envs
from vllm.config import SpeculativeConfig
from vllm.config.model import LOGPROBS_MODES
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, SamplerOutput
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.sample.output_rows import OutputRows
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

VOCAB_SIZE = 24
NUM_DRAFTS = 4
PROMPT = [0, 1, 2]
OUTPUT = [5, 3, 5]
GREEDY = {"temperature": 0.0}

# Each is sampled by its seed or greedily: plain decoding gives the same tokens.
MIXED = [
    SamplingParams(**GREEDY),
    SamplingParams(seed=1, logprobs=2),
    SamplingParams(seed=2, temperature=0.7, top_k=4, top_p=0.9),
    SamplingParams(**GREEDY, repetition_penalty=1.8, logprobs=0),
    SamplingParams(seed=3, logit_bias={3: 2.0}, min_p=0.05, logprobs=1),
    SamplingParams(
        **GREEDY,
        logprobs=5,
        bad_words_token_ids=[[a, b] for a in range(0, 24, 2) for b in range(12)],
    ),
    SamplingParams(seed=4, allowed_token_ids=[1, 7, 9], frequency_penalty=2.0),
    SamplingParams(
        **GREEDY, min_tokens=len(OUTPUT) + 2, all_stop_token_ids=list(range(18))
    ),
    SamplingParams(seed=5, logprobs=3, logprob_token_ids=[6, 0]),
    SamplingParams(
        seed=6, temperature=0.2, presence_penalty=2.0, bad_words_token_ids=[[4], [5, 6]]
    ),
]


class Steps:
    """Requests at the same place of a text, with a model of one table.

    The logits after a token depend on it and on its place alone; few tokens are likely.
    """

    def __init__(self, device, params, mode="raw_logprobs") -> None:
        self.device = device
        self.params = params
        self.mode = mode
        generator = torch.Generator().manual_seed(0)
        shape = (64, VOCAB_SIZE, VOCAB_SIZE)
        table = torch.randn(shape, generator=generator)
        table[:, :, [2, 3, 5, 8]] += 2.5
        self.table = table.to(device)
        self.output_layer = OutputLayer(finds_argmax=True)
        self.restart()

    def restart(self) -> None:
        """Forget what was sampled."""
        num_reqs = len(self.params)
        self.sampler = Sampler(
            num_reqs, VOCAB_SIZE, self.device, logprobs_mode=self.mode, seed=0
        )
        tokens = PROMPT + OUTPUT
        for row, params in enumerate(self.params):
            self.sampler.add_request(row, f"req-{row}", params, PROMPT, tokens)
        self.sampler.apply_staged_writes()
        self.all_token_ids = torch.zeros(
            (num_reqs, 64), dtype=torch.int32, device=self.device
        )
        self.all_token_ids[:, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.num_tokens = len(tokens)

    def rows(self, drafts, num_scheduled=None):
        last = self.all_token_ids[:, self.num_tokens - 1].tolist()
        return make_spec_rows(
            self.device,
            drafts,
            [self.num_tokens] * len(drafts),
            num_scheduled=num_scheduled,
            last_token_ids=last,
            all_token_ids=self.all_token_ids,
        )

    def logits(self, rows):
        return self.table[rows.positions, rows.input_ids.clamp(min=0)].clone()

    def decode(self, num_steps, apply_grammar=None) -> list[SamplerOutput]:
        """Sample token after token of every request."""
        outputs = []
        for _ in range(num_steps):
            rows = self.rows([[]] * len(self.params))
            output = self.sampler(rows_of(self.logits(rows)), rows, apply_grammar)
            outputs.append(output)
            self.sampler.post_update(rows.expanded_idx_mapping, output)
            tokens = output.sampled_token_ids[:, 0].to(torch.int32)
            self.all_token_ids[:, self.num_tokens] = tokens
            self.num_tokens += 1
        return outputs

    def verify(self, drafts, num_scheduled=None, apply_grammar=None, **config):
        """Verify the drafts in one step, which is not committed."""
        rows = self.rows(drafts, num_scheduled)
        verifier = RejectionSampler(
            self.sampler, SpeculativeConfig("ngram", NUM_DRAFTS, **config)
        )
        outputs = OutputRows(self.output_layer, self.logits(rows))
        return verifier(outputs, rows, None, apply_grammar)


def _lists(output: SamplerOutput) -> LogprobsLists:
    return output.logprobs_tensors.to_cpu_nonblocking().tolists()


def _draft(plain: list[list[int]], num_right: int) -> list[list[int]]:
    """Draft `num_right` of the coming tokens and then others."""
    return [
        [*tokens[:num_right], *((t + 1) % VOCAB_SIZE for t in tokens[num_right:-1])]
        for tokens in plain
    ]


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("max_chunk_rows", [1000, 3])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_one_step_gives_the_tokens_and_logprobs_of_plain_decoding(
    mode, max_chunk_rows, num_right, monkeypatch, device
):
    steps = Steps(device, MIXED, mode)
    outputs = steps.decode(NUM_DRAFTS + 1)
    plain = torch.cat([out.sampled_token_ids for out in outputs], dim=1).tolist()
    scores = [_lists(output) for output in outputs]
    steps.restart()
    chunk_bytes = max_chunk_rows * VOCAB_SIZE * 4
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", chunk_bytes)
    output = steps.verify(_draft(plain, num_right))

    num_emitted = num_right + 1
    padding = [-1] * (NUM_DRAFTS - num_right)
    expected = [tokens[:num_emitted] + padding for tokens in plain]
    assert output.sampled_token_ids.tolist() == expected
    assert output.num_sampled.tolist() == [num_emitted] * len(MIXED)
    lists = _lists(output)
    for row, params in enumerate(MIXED):
        mine = lists.slice_request(row, num_emitted)
        if params.num_logprobs is None:
            assert (
                len(mine.logprobs) == 0
                or lists.cu_num_generated_tokens[row]
                == (lists.cu_num_generated_tokens[row + 1])
            )
            continue
        for place in range(num_emitted):
            alone = scores[place].slice_request(row, 1)
            for actual, wanted in zip(mine[:3], alone[:3], strict=True):
                np.testing.assert_array_equal(actual[place], wanted[0])


@pytest.mark.parametrize("row", [3, 5, 6, 9])
def test_a_sampler_that_forgets_the_drafts_before_a_row_is_seen(
    row, monkeypatch, device
):
    steps = Steps(device, [MIXED[row]])
    outputs = steps.decode(NUM_DRAFTS + 1)
    plain = torch.cat([out.sampled_token_ids for out in outputs], dim=1).tolist()
    steps.restart()
    drafts = _draft(plain, NUM_DRAFTS)
    assert steps.verify(drafts).num_sampled.tolist() == [NUM_DRAFTS + 1]
    for effect in ("apply_penalties", "apply_bad_words"):
        right = getattr(sampler, effect)

        def wrong(logits, *, expanded_local_pos, right=right, **rows):
            right(
                logits, expanded_local_pos=torch.zeros_like(expanded_local_pos), **rows
            )

        monkeypatch.setattr(sampler, effect, wrong)
    assert steps.verify(drafts).sampled_token_ids.tolist() != plain


def test_rows_of_requests_that_did_not_ask_have_no_logprobs(device):
    params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, logprobs=1)] * 2
    output = Steps(device, params).verify([[1], [2, 3], [], [4]])
    assert output.logprobs_tensors.cu_num_generated_tokens == [0, 0, 3, 3, 5]
    assert output.logprobs_tensors.cu_num_generated_tokens_tensor is None
    assert output.logprobs_tensors.logprobs.shape == (5, 2)


def test_a_split_that_only_the_device_knows_has_device_boundaries(device):
    params = [SamplingParams(**GREEDY, logprobs=1), SamplingParams(**GREEDY)]
    steps = Steps(device, params)
    drafts = [[7, 8, 9], [6]]
    exact = steps.verify(drafts).logprobs_tensors
    rows = steps.rows(drafts, num_scheduled=[3, 3])
    assert not rows.layout.is_exact_on_host
    verifier = RejectionSampler(steps.sampler, SpeculativeConfig("ngram", NUM_DRAFTS))
    outputs = OutputRows(steps.output_layer, steps.logits(rows))
    tensors = verifier(outputs, rows, None).logprobs_tensors
    assert tensors.cu_num_generated_tokens is None
    # The next step rewrites the buffer.
    rows.layout.cu_num_logits.zero_()
    assert tensors.cu_num_generated_tokens_tensor.tolist() == [0, 4, 6]
    assert torch.equal(tensors.logprobs[:4], exact.logprobs)
    assert torch.equal(tensors.logprob_token_ids[:4], exact.logprob_token_ids)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("max_chunk_rows", [1000, 2])
def test_the_grammar_masks_every_row_and_raw_logprobs_do_not_see_it(
    max_chunk_rows, mode, monkeypatch, device
):
    chunk_bytes = max_chunk_rows * VOCAB_SIZE * 4
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", chunk_bytes)
    # Row i of the step may be token i alone.
    calls = []

    def mask(logits, *, first_logit_idx):
        calls.append(first_logit_idx)
        for row, token in enumerate(logits):
            kept = token[first_logit_idx + row].clone()
            token.fill_(float("-inf"))
            token[first_logit_idx + row] = kept

    params = [SamplingParams(logprobs=0), SamplingParams(seed=1, logprobs=0)]
    steps = Steps(device, params, mode)
    output = steps.verify([[0, 1, 9], [4]], apply_grammar=mask)
    assert calls == list(range(0, 6, 2 if max_chunk_rows == 2 else 6))
    assert output.sampled_token_ids.tolist() == [
        [0, 1, 2, -1, -1],
        [4, 5, -1, -1, -1],
    ]
    logits = steps.logits(steps.rows([[0, 1, 9], [4]]))
    raw = logits.log_softmax(dim=-1)[torch.arange(6), torch.arange(6)]
    wanted = raw if mode == "raw_logprobs" else torch.zeros(6, device=device)
    scores = output.logprobs_tensors.logprobs[:, 0]
    torch.testing.assert_close(scores[[0, 1, 2, 4, 5]], wanted[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_a_rejected_draft_does_not_show_in_the_logits(mode, device):
    # The rows of an unseeded request are overwritten by the residual while they are
    # judged.
    steps = Steps(device, [SamplingParams(logprobs=VOCAB_SIZE)], mode)
    output = steps.verify([[1, 2, 3, 4]])
    rows = steps.rows([[1, 2, 3, 4]])
    shown = output.logprobs_tensors
    expected = steps.logits(rows).gather(1, shown.logprob_token_ids.long())
    assert torch.equal(shown.logprobs, expected)


def test_an_unknown_draft_is_no_index_and_is_not_accepted(device):
    params = [SamplingParams(**GREEDY, repetition_penalty=1.5, logprobs=0)] * 2
    steps = Steps(device, params)
    output = steps.verify([[-1, -1], []])
    assert output.num_sampled.tolist() == [1, 1]
    tokens = output.sampled_token_ids
    assert tokens[0].tolist() == tokens[1].tolist()


def test_nans_are_counted_over_the_rows_that_a_request_has_emitted(monkeypatch, device):
    monkeypatch.setattr(envs, "VLLM_COMPUTE_NANS_IN_LOGITS", True, raising=False)
    steps = Steps(device, [SamplingParams(**GREEDY)] * 4)
    likely = int(steps.logits(steps.rows([[], None, None, None])).argmax())
    rows = steps.rows([[likely, 2], None, [3], [likely]])
    logits = steps.logits(rows)
    # Rows 0 to 2, none, 3 and 4, 5 and 6.
    logits[[1, 1, 2, 3, 6], [2, 3, 1, 4, 1]] = float("nan")
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 2 * VOCAB_SIZE * 4)
    verifier = RejectionSampler(steps.sampler, SpeculativeConfig("ngram", NUM_DRAFTS))
    output = verifier(rows_of(logits), rows, None)
    # Row 1 has no token to accept 2 by: row 2 is never reached.
    assert output.num_sampled.tolist() == [2, 0, 1, 2]
    assert output.num_nans.tolist() == [2, 0, 1, 1]


def test_a_nan_behind_a_rejected_draft_is_nobodys(monkeypatch, device):
    monkeypatch.setattr(envs, "VLLM_COMPUTE_NANS_IN_LOGITS", True, raising=False)
    steps = Steps(device, [SamplingParams(**GREEDY)])
    likely = int(steps.logits(steps.rows([[]])).argmax())
    rows = steps.rows([[likely - 1, 1]])
    logits = steps.logits(rows)
    logits[1:] = float("nan")
    verifier = RejectionSampler(steps.sampler, SpeculativeConfig("ngram", NUM_DRAFTS))
    output = verifier(rows_of(logits), rows, None)
    assert output.sampled_token_ids[0].tolist() == [likely, -1, -1, -1, -1]
    assert output.num_nans.tolist() == [0]


def test_synthetic_rates_come_from_the_config(device):
    steps = Steps(device, [SamplingParams(**GREEDY), SamplingParams(seed=4)])
    output = steps.verify(
        [[1, 2, 3, 4]] * 2,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(1.0, 1.0, 0.0, 0.0),
    )
    assert output.num_sampled.tolist() == [3, 3]
    assert output.sampled_token_ids[:, :2].tolist() == [[1, 2]] * 2


def test_synthetic_rates_do_not_save_a_draft_that_a_grammar_forbids(
    device, monkeypatch
):
    # Chunks of one row: each finds its own masks.
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 4 * VOCAB_SIZE)
    steps = Steps(device, [SamplingParams(**GREEDY), SamplingParams(seed=4)])

    def forbid(logits, *, first_logit_idx):
        # Behind the second draft of the first request, 3 may not come.
        for row in range(len(logits)):
            if first_logit_idx + row == 2:
                logits[row, 3] = float("-inf")

    output = steps.verify(
        [[1, 2, 3, 4]] * 2,
        apply_grammar=forbid,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(1.0,) * 4,
    )
    assert output.num_sampled.tolist() == [3, 5]
    assert output.sampled_token_ids[0, :2].tolist() == [1, 2]
    assert output.sampled_token_ids[0, 2] not in (3, -1)
    assert output.sampled_token_ids[1, :4].tolist() == [1, 2, 3, 4]


def test_a_step_without_rows_samples_nothing(device):
    output = Steps(device, [SamplingParams(**GREEDY)] * 2).verify([None, None])
    assert output.num_sampled.tolist() == [0, 0]


def test_without_a_config_every_request_gets_one_token(device):
    steps = Steps(device, MIXED)
    expected = steps.decode(1)[0].sampled_token_ids
    steps.restart()
    rows = steps.rows([[]] * len(MIXED))
    verifier = RejectionSampler(steps.sampler, None)
    output = verifier(rows_of(steps.logits(rows)), rows, None)
    assert torch.equal(output.sampled_token_ids, expected)


WHOLE_ROWS = [
    {"apply_grammar": lambda logits, *, first_logit_idx: None},
    {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": (0.0,) * NUM_DRAFTS,
    },
]


def test_greedy_drafts_are_judged_without_the_logits(device):
    steps = Steps(device, [SamplingParams(**GREEDY)] * 3)
    tokens = torch.cat([out.sampled_token_ids for out in steps.decode(5)], dim=1)
    steps.restart()
    output = steps.verify(_draft(tokens.tolist(), 2))
    assert steps.output_layer.passes == ["argmax"]
    assert output.num_sampled.tolist() == [3] * 3
    assert torch.equal(output.sampled_token_ids[:, :3], tokens[:, :3])


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
# The drafts that are scheduled, of which those that are there are verified: with three
# for each, only the device knows whose rows they are.
@pytest.mark.parametrize("num_scheduled", [None, [3, 3, 3]])
def test_logprobs_of_greedy_drafts_need_no_logits(mode, num_scheduled, device):
    params = [SamplingParams(**GREEDY, logprobs=wish) for wish in (None, 3, 0)]
    steps, written = Steps(device, params, mode), Steps(device, params, mode)
    written.output_layer.finds_argmax = False
    tokens = torch.cat([out.sampled_token_ids for out in steps.decode(5)], dim=1)
    steps.restart()
    all_right, one_right, _ = tokens.tolist()
    drafts = [all_right[:3], [one_right[0], 0], []]
    output, expected = (each.verify(drafts, num_scheduled) for each in (steps, written))
    assert steps.output_layer.passes == ["statistics"]
    assert written.output_layer.passes == ["logits"]
    assert torch.equal(output.sampled_token_ids, expected.sampled_token_ids)
    assert torch.equal(output.num_sampled, expected.num_sampled)
    lists, others = _lists(output), _lists(expected)
    assert lists.cu_num_generated_tokens == others.cu_num_generated_tokens
    num_sampled = output.num_sampled.tolist()
    assert num_sampled == [4, 2, 1]
    # The first request wants none.
    for row, num_emitted in list(enumerate(num_sampled))[1:]:
        mine = lists.slice_request(row, num_emitted)
        theirs = others.slice_request(row, num_emitted)
        for actual, wanted in zip(mine[:3], theirs[:3], strict=True):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("whole", WHOLE_ROWS, ids=["grammar", "synthetic"])
def test_what_needs_whole_rows_gets_the_logits(device, whole):
    steps = Steps(device, [SamplingParams(**GREEDY)] * 2)
    steps.verify([[1, 2], [3]], **whole)
    assert steps.output_layer.passes == ["logits"]


@pytest.mark.parametrize("params", MIXED[1:])
def test_one_request_that_needs_whole_rows_gets_its_own(device, params):
    if device.type == "cuda":
        pytest.skip("all rows are written")
    steps = Steps(device, [MIXED[0], params])
    together = steps.verify([[1, 2], [3]])
    assert steps.output_layer.passes == ["statistics"]
    assert steps.output_layer.num_written == [2]
    alone = Steps(device, [MIXED[0]])
    expected = alone.verify([[1, 2]])
    assert alone.output_layer.passes == ["argmax"]
    assert torch.equal(together.sampled_token_ids[:1], expected.sampled_token_ids)


def test_a_request_without_a_row_needs_none(device):
    steps = Steps(device, MIXED[:2])
    steps.verify([[1, 2], None])
    assert steps.output_layer.passes == ["argmax"]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_a_step_in_parts_gives_what_whole_rows_give(mode, has_draft_logits, device):
    # Drafts of the request without a seed are judged by chance.
    params = [*MIXED, *(SamplingParams(**GREEDY, logprobs=n) for n in (7, 0))]
    params.append(SamplingParams(logprobs=1))
    steps, written = Steps(device, params, mode), Steps(device, params, mode)
    written.output_layer.finds_argmax = False
    tokens = torch.cat([out.sampled_token_ids for out in written.decode(5)], dim=1)
    written.restart()
    drafts: list[list[int] | None] = [
        [*one[: place % 4], *[5] * (place % 3)]
        for place, one in enumerate(tokens.tolist())
    ]
    drafts = [one[:NUM_DRAFTS] for one in drafts]
    drafts[2], drafts[11] = None, []
    draft_logits = None
    if has_draft_logits:
        draft_logits = torch.randn(len(params), NUM_DRAFTS, VOCAB_SIZE, device=device)
    outputs = []
    for each in (steps, written):
        rows = each.rows(drafts)
        verifier = RejectionSampler(
            each.sampler, SpeculativeConfig("ngram", NUM_DRAFTS)
        )
        layer = OutputRows(each.output_layer, each.logits(rows))
        outputs.append(verifier(layer, rows, draft_logits))
    output, expected = outputs
    if device.type == "cpu":
        assert steps.output_layer.passes == ["statistics"]
    assert torch.equal(output.sampled_token_ids, expected.sampled_token_ids)
    assert torch.equal(output.num_sampled, expected.num_sampled)
    lists, others = _lists(output), _lists(expected)
    assert lists.cu_num_generated_tokens == others.cu_num_generated_tokens
    for row, num_emitted in enumerate(output.num_sampled.tolist()):
        wish = params[row].num_logprobs
        if wish is None:
            continue
        mine = lists.slice_request(row, num_emitted)
        theirs = others.slice_request(row, num_emitted)
        np.testing.assert_array_equal(mine[2], theirs[2])
        for ours, wanted in zip(mine[:2], theirs[:2], strict=True):
            ours, wanted = (x[:, : 1 + wish] for x in (ours, wanted))
            np.testing.assert_array_equal(ours, wanted)
