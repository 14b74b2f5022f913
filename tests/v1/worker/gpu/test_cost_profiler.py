"""The steps that are timed are the steps that will run, and nothing of them stays."""

import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from tests.v1.e2e.tiny_drafter import make_speculative_config
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model
from vllm.config.cost_profile import CostProfile
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import cost_profiler, dummy_requests
from vllm.v1.worker.gpu.cost_profiler import (
    list_draft_shapes,
    list_prompt_shapes,
    list_verify_shapes,
    make_profile,
    measure_steps,
    relative_noise,
    time_shapes,
)
from vllm.v1.worker.gpu.dummy_requests import (
    DummyRequests,
    StepShape,
    _choose_block_ids,
)
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.draft_budget import VerifyAll

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
ADAPTIVE = NGRAM | {"enable_adaptive_verification": True}
SMALL = {"max_num_seqs": 4, "num_gpu_blocks_override": 40}


def test_drafting_is_timed_for_all_numbers_of_requests():
    shapes = list_draft_shapes(6, num_drafts=5)
    assert [(s.num_reqs, s.num_next_drafts) for s in shapes] == [
        (num_reqs, num_drafts) for num_reqs in (1, 2, 4, 6) for num_drafts in (0, 1, 5)
    ]
    shapes = list_draft_shapes(2, num_drafts=1)
    assert [s.num_next_drafts for s in shapes] == [0, 1, 0, 1]


def test_verifications_of_all_sizes_spread_their_drafts_over_requests():
    shapes = list_verify_shapes(64, num_drafts=7, max_num_tokens=512)
    assert [(s.num_reqs, s.num_drafts) for s in shapes] == [
        *[(1, 0), (1, 1), (1, 3), (2, 3), (4, 3), (8, 3), (16, 3), (32, 3)],
        *[(64, 3), (64, 7)],
    ]
    assert [s.num_tokens for s in shapes] == [2**power for power in range(10)]


@pytest.mark.parametrize("max_num_reqs", [1, 3, 64])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("max_num_tokens", [64, 100])
def test_no_shape_is_larger_than_a_step(max_num_reqs, num_drafts, max_num_tokens):
    shapes = list_verify_shapes(max_num_reqs, num_drafts, max_num_tokens)
    assert max(s.num_reqs for s in shapes) <= max_num_reqs
    assert max(s.num_drafts for s in shapes) <= num_drafts
    assert max(s.num_tokens for s in shapes) <= max_num_tokens
    assert shapes[0].num_tokens == 1


def test_prompts_are_timed_where_verifications_end():
    assert [s.num_tokens for s in list_prompt_shapes(32, 200)] == [64, 128, 200]
    assert list_prompt_shapes(512, 512) == []
    assert list_prompt_shapes(512, 100) == []


class FakeRequests:
    """Steps that take a ms a token on a clock of their own; some take longer."""

    def __init__(self, monkeypatch, ms_per_token=1.0, delays=()):
        self._ms_per_token = ms_per_token
        self._delays = list(delays)
        self._now_s = 0.0
        self.shapes = []
        monkeypatch.setattr(
            cost_profiler, "time", SimpleNamespace(perf_counter=lambda: self._now_s)
        )

    def time_step(self, shape):
        self.shapes.append(shape)
        ms = self._ms_per_token * shape.num_tokens
        ms += self._delays.pop(0) if self._delays else 0.0
        self._now_s += ms / 1e3
        return ms


SHAPES = [StepShape(1), StepShape(1, num_next_drafts=1), StepShape(8), StepShape(64)]


def test_the_first_round_and_single_delays_do_not_count(monkeypatch):
    # Everything is slow at first, and one step later on.
    requests = FakeRequests(monkeypatch, delays=[500.0] * 4 + [0.0] * 6 + [900.0])
    times = time_shapes(requests, SHAPES, 60.0, tqdm(disable=True))
    medians = {shape: statistics.median(rounds) for shape, rounds in times.items()}
    assert medians == {shape: float(shape.num_tokens) for shape in SHAPES}


def test_a_slow_machine_leaves_large_steps_out_but_never_the_smallest(monkeypatch):
    requests = FakeRequests(monkeypatch, ms_per_token=1000.0)
    times = time_shapes(requests, SHAPES, 9.5, tqdm(disable=True))
    assert set(times) == set(SHAPES[:3])
    requests = FakeRequests(monkeypatch, ms_per_token=1000.0)
    assert set(time_shapes(requests, SHAPES, 0.1, tqdm(disable=True))) == set(
        SHAPES[:2]
    )


def test_no_step_starts_that_would_end_too_late(monkeypatch):
    requests = FakeRequests(monkeypatch, ms_per_token=10.0)
    time_shapes(requests, SHAPES, 1.005, tqdm(disable=True))
    # 10 + 10 + 80 + 640 ms, then what still fits.
    assert requests.shapes == [*SHAPES, *SHAPES[:3], *SHAPES[:3], *SHAPES[:2] * 3]


def test_what_drafting_adds_is_its_cost():
    plain, drafting = StepShape(2), StepShape(2, num_next_drafts=3)
    slower, single = replace(drafting, num_reqs=4), replace(drafting, num_next_drafts=1)
    costs = {plain: 5.0, single: 6.0, drafting: 7.5, StepShape(4): 8.0, slower: 7.0}
    costs |= {StepShape(1, num_drafts=3): 10.0, StepShape(1, num_new_tokens=9): 20.0}
    # Four tokens are timed twice; a clock's error is no gain.
    assert make_profile(costs) == CostProfile(
        ((2, 2.5), (4, 0.0)),
        ((2, 5.0), (4, 9.0), (9, 20.0)),
        single_draft_curve=((2, 1.0),),
    )


def test_a_drafter_of_one_draft_has_one_curve():
    costs = {StepShape(1): 5.0, StepShape(1, num_next_drafts=1): 7.0}
    profile = make_profile(costs)
    assert profile.draft_curve == profile.single_draft_curve == ((1, 2.0),)


@pytest.mark.parametrize(
    ("max_model_len", "asked", "device", "context_len"),
    [
        (2048, 8192, "cpu", 256),
        (2048, 100, "cpu", 100),
        (128, 8192, "cpu", 128 - 12),
        (16384, 8192, "cuda", 8192),
        (4096, 8192, "cuda", 4096 - 12),
        (8192, 0, "cuda", 0),
        (4, 8192, "cpu", 0),
        (1, 8192, "cpu", 0),
    ],
)
def test_the_context_is_what_was_asked_for_or_what_there_is_room_for(
    monkeypatch, max_model_len, asked, device, context_len
):
    monkeypatch.setenv("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", str(asked))
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        num_speculative_tokens=5,
    )
    assert cost_profiler._context_len(config, torch.device(device)) == context_len


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "cost_profiles"


def test_the_work_of_a_timed_step_is_what_its_size_says(model):
    engine = TinyEngine(
        model,
        budget_policy=VerifyAll(),
        speculative_config=NGRAM,
        max_num_batched_tokens=64,
        **SMALL,
    )
    worker = engine.executor.worker
    runner, forward = worker.model_runner, worker.model_runner._forward
    sizes = []

    def record(input_ids, positions, batch):
        drafts, layout = batch.layout.draft_budget, batch.layout
        # All drafts that are scheduled are verified.
        assert drafts == layout.num_scheduled_drafts
        assert int(batch.seq_lens.max()) <= runner.req_states.all_token_ids.gpu.shape[1]
        sizes.append((len(input_ids), layout.num_logits))
        return forward(input_ids, positions, batch)

    runner._forward = record
    times = measure_steps(runner, worker.get_kv_cache_config())
    assert {shape.num_tokens for shape in times} == {1, 2, 4, 8, 16, 24, 48, 64}
    for num_drafts in (1, 5):
        drafting = [shape for shape in times if shape.num_next_drafts == num_drafts]
        assert {shape.num_reqs for shape in drafting} == {1, 2, 4}
    assert {num_tokens for num_tokens, _ in sizes} == {1, 2, 4, 8, 16, 24, 48, 64}
    # A prompt's chunk samples nothing; all other tokens are sampled at.
    assert {rows for num_tokens, rows in sizes if num_tokens > 24} == {0}
    assert all(rows == num_tokens for num_tokens, rows in sizes[1:-20] if rows)
    assert runner.req_states.num_reqs == 0
    engine.shutdown()


def test_a_step_is_timed_until_the_device_has_nothing_left_to_do(model, monkeypatch):
    monkeypatch.setattr(
        dummy_requests, "wait_for_device", lambda device: time.sleep(0.2)
    )
    engine = TinyEngine(
        model, budget_policy=VerifyAll(), speculative_config=NGRAM, **SMALL
    )
    worker = engine.executor.worker
    with DummyRequests(
        worker.model_runner, worker.get_kv_cache_config(), 1, 8, 9
    ) as requests:
        assert requests.time_step(StepShape(1)) >= 200
    engine.shutdown()


def test_noise_is_how_far_equal_steps_lie_apart():
    times = {StepShape(1): [10.0, 11.0, 9.0], StepShape(2): [100.0, 100.0, 180.0]}
    # 0, 0, 0, 10%, 10% and 80%.
    assert relative_noise(times) == pytest.approx(0.05)
    assert relative_noise({StepShape(1): [3.0]}) == 0.0


def test_a_step_that_ran_once_does_not_make_a_busy_machine_seem_quiet():
    once = {StepShape(num_reqs): [50.0] for num_reqs in range(2, 20)}
    assert relative_noise(once | {StepShape(1): [10.0, 30.0]}) == pytest.approx(0.5)


@pytest.mark.parametrize(("noise", "num_files"), [(0.1, 1), (0.3, 0)])
def test_what_a_busy_machine_measured_is_not_kept(
    model, cache, monkeypatch, noise, num_files
):
    monkeypatch.setattr(cost_profiler, "relative_noise", lambda times: noise)
    TinyEngine(model, speculative_config=ADAPTIVE, **SMALL).shutdown()
    assert len(list(cache.parent.rglob("*.json"))) == num_files


@pytest.mark.parametrize("drafter", ["ngram", "H", "dspark probabilistic", "dflash"])
def test_requests_say_the_same_after_a_measurement(model, cache, tmp_path, drafter):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    prompts = [("abcabcabc", params), ("hello", params), ("a", params)]
    plain = TinyEngine(model, **SMALL)
    config = make_speculative_config(
        drafter, model, tmp_path, enable_adaptive_verification=True
    )
    adaptive = TinyEngine(model, speculative_config=config, **SMALL)
    policy = adaptive.executor.worker.model_runner.verifier.policy
    assert isinstance(policy, AdaptiveBudget)
    expected = [output.outputs[0].token_ids for output in plain.run(prompts)]
    for _ in range(2):
        outputs = adaptive.run(prompts)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    plain.shutdown()
    adaptive.shutdown()


def test_a_later_start_measures_nothing(model, cache, monkeypatch):
    monkeypatch.setattr(cost_profiler, "relative_noise", lambda times: 0.0)
    TinyEngine(model, speculative_config=ADAPTIVE, **SMALL).shutdown()
    monkeypatch.setattr(cost_profiler, "measure_steps", None)
    TinyEngine(model, speculative_config=ADAPTIVE, **SMALL).shutdown()


def test_a_cost_table_is_used_as_it_is(model, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(cost_profiler, "measure_steps", None)
    path = tmp_path / "costs.json"
    path.write_text('{"draft_curve": [[1, 2]], "verify_curve": [[1, 10], [8, 80]]}')
    engine = TinyEngine(
        model, speculative_config=ADAPTIVE | {"cost_table": str(path)}, **SMALL
    )
    worker = engine.executor.worker
    costs = cost_profiler.prepare_cost_model(
        worker.model_runner, worker.get_kv_cache_config()
    )
    assert costs.step_costs(1, 1, 3, 5).tolist() == [12.0, 22.0, 32.0, 42.0]
    assert not cache.exists()
    engine.shutdown()


@pytest.mark.parametrize("max_model_len", [1, 4, 9])
def test_any_context_can_be_measured(model, cache, max_model_len):
    engine = TinyEngine(
        model, max_model_len=max_model_len, speculative_config=ADAPTIVE, **SMALL
    )
    assert engine.executor.worker.model_runner.req_states.num_reqs == 0
    engine.shutdown()


@pytest.mark.parametrize(
    ("num_reqs", "num_blocks", "num_ids"),
    [(64, 18, 99), (64, 17, 136), (64, 18, 62), (4, 18, 1000), (3, 4, 4), (2, 1, 1)],
)
def test_dummies_that_share_blocks_do_not_write_the_same_ones(
    num_reqs, num_blocks, num_ids
):
    config = SimpleNamespace(num_blocks=num_ids + 1, kv_cache_groups=[])
    ids = _choose_block_ids(config, num_reqs, num_blocks, torch.device("cuda"))
    assert ids == list(range(1, 1 + len(ids)))
    assert len(ids) <= min(num_ids, num_reqs * num_blocks)
    starts = {req * num_blocks % len(ids) for req in range(num_reqs)}
    assert len(starts) == min(num_reqs, len(ids))
    # Few are given up for it.
    assert len(ids) >= min(num_reqs * num_blocks, num_ids) - num_blocks
