"""What the compiled operators do with the rows in one call, beside their twins."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from tests.markers import needs_cpu_ops
from vllm import _custom_ops as ops
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout, ScheduledStep
from vllm.v1.worker.gpu.block_table import BlockTable
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.verified_layout import make_verified_layout
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu.step_requests import StepRequests
from vllm.v1.worker.gpu.step_rows import StepRows

pytestmark = needs_cpu_ops

NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE = 8, 96, 16
CPU = torch.device("cpu")


class Rows:
    """Eight requests that know 2 tokens more than are computed, but for drafts."""

    def __init__(self, num_drafts: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.states = RequestState(NUM_ROWS, MAX_MODEL_LEN, num_drafts, CPU)
        self.table = BlockTable(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, CPU)
        for name in "abcdefgh":
            num_computed = int(generator.integers(0, 40))
            token_ids = generator.integers(0, 99, num_computed + 2).tolist()
            row = self.states.add_request(name, 1, token_ids, num_computed)
            blocks = generator.permutation(99)[: MAX_MODEL_LEN // BLOCK_SIZE]
            self.table.set_block_ids(row, blocks.tolist())
        self.states.draft_tokens += torch.from_numpy(
            generator.integers(0, 99, (NUM_ROWS, num_drafts))
        )
        self.step_rows = StepRows(self.states, self.table)

    @property
    def num_computed(self) -> list[int]:
        return self.states.num_computed_tokens.gpu.tolist()

    def arrays(self) -> list[torch.Tensor]:
        states = self.states
        rows = states.all_token_ids, states.total_len, states.num_computed_tokens
        return [row.gpu for row in rows]


@pytest.fixture
def twins(monkeypatch):
    """Return a function that makes rows: with the compiled operators, and without."""

    def make(num_drafts: int, seed: int) -> tuple[Rows, Rows]:
        compiled = Rows(num_drafts, seed)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "maybe_step_ops", lambda: None)
            return compiled, Rows(num_drafts, seed)

    return make


def draw_step(generator: np.random.Generator, max_drafts: int) -> ScheduledStep:
    num_reqs = int(generator.integers(1, NUM_ROWS + 1))
    drafts = generator.integers(0, max_drafts + 1, num_reqs)
    is_sampling = (generator.random(num_reqs) < 0.8) | (drafts > 0)
    known = np.where(is_sampling, 2, generator.integers(1, 3, num_reqs))
    return ScheduledStep(
        generator.permutation(NUM_ROWS)[:num_reqs].astype(np.int32),
        (known + drafts).astype(np.int32),
        drafts.astype(np.int32),
        is_sampling,
        1,
    )


def draw_layout(generator: np.random.Generator, step: ScheduledStep) -> BatchLayout:
    regime = generator.integers(3)
    admitted = step.num_drafts_np * (regime > 0)
    if regime == 2:
        admitted = generator.integers(0, step.num_drafts_np + 1).astype(np.int32)
    return make_verified_layout(
        step, int(admitted.sum()), torch.from_numpy(admitted.astype(np.int32))
    )


def prepare(rows: Rows, step: ScheduledStep, layout: BatchLayout) -> InputBatch:
    requests = StepRequests(
        [f"{row}" for row in step.idx_mapping_np],
        torch.from_numpy(step.idx_mapping_np),
        step.num_drafts_np,
        step.num_tokens_np.tolist(),
        step,
    )
    num_computed = [rows.num_computed[row] for row in step.idx_mapping_np]
    return rows.step_rows.prepare(requests, layout, num_computed)


def assert_same(left: InputBatch, right: InputBatch) -> None:
    for field in fields(InputBatch):
        values, others = getattr(left, field.name), getattr(right, field.name)
        if isinstance(values, torch.Tensor):
            assert values.dtype == others.dtype, field.name
            assert torch.equal(values, others), field.name
        elif field.name not in ("layout", "idx_mapping_np"):
            assert values == others, field.name


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("seed", range(10))
def test_steps_in_one_call_are_those_of_the_twins(seed, max_drafts, twins):
    generator = np.random.default_rng(100 + seed)
    compiled, plain = twins(max_drafts, seed)
    step = draw_step(generator, max_drafts)
    layout = draw_layout(generator, step)
    for _ in range(6):
        # Every other step is laid out as the one before it.
        if generator.random() < 0.5:
            step = draw_step(generator, max_drafts)
            layout = draw_layout(generator, step)
        batch = prepare(compiled, step, layout)
        assert_same(batch, prepare(plain, step, layout))
        width = max_drafts + 1
        sampled = torch.from_numpy(generator.integers(-1, 99, (step.num_reqs, width)))
        num_rows = layout.cu_num_logits.diff().numpy()
        num_sampled = torch.from_numpy(
            generator.integers(np.minimum(num_rows, 1), num_rows + 1).astype(np.int32)
        )
        for rows in compiled, plain:
            rows.step_rows.advance(batch, SamplerOutput(sampled, num_sampled))
        for values, others in zip(compiled.arrays(), plain.arrays(), strict=True):
            assert torch.equal(values, others)


def test_layouts_come_back_in_any_order(twins):
    generator = np.random.default_rng(7)
    compiled, plain = twins(3, 0)

    def draw() -> tuple[ScheduledStep, BatchLayout]:
        step = draw_step(generator, 3)
        return step, draw_layout(generator, step)

    def compare(step: ScheduledStep, layout: BatchLayout) -> None:
        assert_same(prepare(compiled, step, layout), prepare(plain, step, layout))

    kept = [draw() for _ in range(40)]
    for number in [0, 1, 0, 2, 1, *range(40), 0, 39, 5]:
        compare(*kept[number])
    # Nobody else keeps these: the next may lie where the last one lay.
    for _ in range(40):
        compare(*draw())


def test_the_inputs_of_a_step_outlive_the_next_one(twins):
    rows, _ = twins(0, 0)
    step = ScheduledStep(
        np.array([3], np.int32),
        np.array([2], np.int32),
        np.array([0], np.int32),
        np.array([True]),
        1,
    )
    layout = make_verified_layout(step, 0, torch.zeros(1, dtype=torch.int32))
    batch = prepare(rows, step, layout)
    kept = {field.name: getattr(batch, field.name) for field in fields(batch)}
    copies = {
        name: value.clone()
        for name, value in kept.items()
        if isinstance(value, torch.Tensor)
    }
    output = SamplerOutput(torch.tensor([[5]]), torch.ones(1, dtype=torch.int32))
    rows.step_rows.advance(batch, output)
    assert not torch.equal(prepare(rows, step, layout).positions, batch.positions)
    for name, copy in copies.items():
        assert torch.equal(kept[name], copy), name


def test_a_sample_past_the_context_is_not_written(twins):
    for rows in twins(0, 0):
        states = rows.states
        states.total_len.gpu[2] = MAX_MODEL_LEN
        states.num_computed_tokens.gpu[2] = MAX_MODEL_LEN - 1
        before = states.all_token_ids.gpu.clone()
        step = ScheduledStep(
            np.array([2], np.int32),
            np.array([1], np.int32),
            np.array([0], np.int32),
            np.array([True]),
            1,
        )
        layout = make_verified_layout(step, 0, torch.zeros(1, dtype=torch.int32))
        batch = prepare(rows, step, layout)
        output = SamplerOutput(torch.tensor([[9]]), torch.ones(1, dtype=torch.int32))
        rows.step_rows.advance(batch, output)
        assert torch.equal(states.all_token_ids.gpu, before)
        assert states.total_len.gpu[2] == MAX_MODEL_LEN + 1
