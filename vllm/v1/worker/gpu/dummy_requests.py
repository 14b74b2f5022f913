"""Requests of nobody, for steps that are run to be timed before the first real one."""

import math
import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.async_utils import wait_for_device
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetChoice, BudgetPolicy

# On a CPU: more than any processor caches itself, and no burden.
_MAX_CPU_CONTEXT_BYTES = 256 * 2**20
# Cache slots that are written at once.
_SLOTS_PER_WRITE = 1024


@dataclass(frozen=True)
class StepShape:
    """A step of equal requests.

    Args:
        num_reqs: in the step.
        num_new_tokens: that each computes beside its drafts: one, or a prompt's chunk.
        num_drafts: that each verifies.
        num_next_drafts: that are proposed for each at its end.
    """

    num_reqs: int
    num_new_tokens: int = 1
    num_drafts: int = 0
    num_next_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_reqs * (self.num_new_tokens + self.num_drafts)


class _AsScheduled(BudgetPolicy):
    """Verifies what is scheduled, and drafts when it is told to."""

    reads_confidences = False

    def __init__(self) -> None:
        self.num_next_drafts = 0

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        return BudgetChoice(step.num_drafts, self.num_next_drafts)


class DummyRequests:
    """Rows that are in the same state before every step, taken while it is entered.

    Args:
        runner: has no request.
        kv_cache_config: of its cache.
        num_reqs: rows to take.
        context_len: tokens of each that are computed before a step.
        prompt_len: known tokens, at least one more; a step that reaches the last one
            samples.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        kv_cache_config: KVCacheConfig,
        num_reqs: int,
        context_len: int,
        prompt_len: int,
    ) -> None:
        self._runner = runner
        self._kv_cache_config = kv_cache_config
        self._req_ids = [f"dummy-{i}" for i in range(num_reqs)]
        self._context_len = context_len
        self._prompt_len = prompt_len
        self._policy = _AsScheduled()
        self._forced_policy = runner.verifier.forced_policy(self._policy)

    def __enter__(self) -> Self:
        """Add the requests, and let each compute a token."""
        self._forced_policy.__enter__()
        num_tokens = dict.fromkeys(self._req_ids, 1)
        self._run(
            SchedulerOutput(
                self._make_requests(),
                CachedRequestData(),
                num_tokens,
                len(self._req_ids),
            )
        )
        return self

    def __exit__(self, *exception: Any) -> None:
        """Free the rows."""
        self._forced_policy.__exit__(*exception)
        self._run(
            SchedulerOutput(
                [], CachedRequestData(), {}, 0, finished_req_ids=set(self._req_ids)
            )
        )
        if self._runner.speculator is not None:
            self._runner.speculator.forget_acceptance()

    def time_step(self, shape: StepShape) -> float:
        """Run a step with the first requests, and return its milliseconds."""
        self._policy.num_next_drafts = shape.num_next_drafts
        states = self._runner.req_states
        states.total_len.gpu.fill_(self._prompt_len)
        states.num_computed_tokens.gpu.fill_(self._context_len)
        states.draft_tokens.zero_()
        req_ids = self._req_ids[: shape.num_reqs]
        num_reqs, num_drafts = shape.num_reqs, shape.num_drafts
        cached = CachedRequestData(
            req_ids, [None] * num_reqs, [self._context_len] * num_reqs
        )
        drafts = {req_id: [0] * num_drafts for req_id in req_ids} if num_drafts else {}
        step = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(
                req_ids, shape.num_new_tokens + num_drafts
            ),
            total_num_scheduled_tokens=shape.num_tokens,
            scheduled_spec_decode_tokens=drafts,
        )
        if self._runner.speculator is not None:
            # It belongs to other steps.
            with torch.inference_mode():
                self._runner.speculator.catch_up()
            wait_for_device(self._runner.device)
        start_s = time.perf_counter()
        self._run(step)
        # What follows the samples is of this step, too: the drafter's context.
        wait_for_device(self._runner.device)
        return 1e3 * (time.perf_counter() - start_s)

    def _run(self, step: SchedulerOutput) -> None:
        self._runner.execute_model(step)
        self._runner.sample_tokens(None)
        self._runner.take_draft_token_ids()

    def _make_requests(self) -> list[NewRequestData]:
        config = self._runner.vllm_config
        num_slots = min(
            # What a step verifies, as much again, and what is drafted behind that.
            self._prompt_len
            + 2 * (1 + config.num_speculative_tokens)
            + config.num_lookahead_tokens,
            config.model_config.max_model_len,
        )
        num_blocks = -(-num_slots // config.cache_config.block_size)
        ids = _choose_block_ids(
            self._kv_cache_config, len(self._req_ids), num_blocks, self._runner.device
        )
        _write_zeros(self._runner, self._kv_cache_config, ids)
        prompt = [0] * self._prompt_len
        params = SamplingParams(**config.model_config.default_sampling_params)
        requests = []
        for number, req_id in enumerate(self._req_ids):
            first = number * num_blocks
            own = [ids[i % len(ids)] for i in range(first, first + num_blocks)]
            requests.append(
                NewRequestData(
                    req_id, prompt, prompt, params, (own,), self._context_len
                )
            )
        return requests


def _choose_block_ids(
    config: KVCacheConfig, num_reqs: int, num_blocks: int, device: torch.device
) -> list[int]:
    """Return blocks for contexts of num_blocks; if they are too few they are shared.

    Requests take them in turn, from the first again behind the last. As long as there
    are enough, no two requests have the same block at the same place: what a step
    writes to one slot twice is not computed twice.
    """
    most = num_reqs * num_blocks
    if device.type == "cpu":
        block_bytes = sum(group.block_bytes for group in config.kv_cache_groups)
        most = min(most, max(_MAX_CPU_CONTEXT_BYTES // block_bytes, 1))
    count = min(most, config.num_blocks - 1)
    while count // math.gcd(count, num_blocks) < min(num_reqs, count):
        count -= 1
    return list(range(1, 1 + count))


def _write_zeros(
    runner: GPUModelRunner, config: KVCacheConfig, block_ids: list[int]
) -> None:
    """Fill the blocks: memory that was never written is not what a step will read."""
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        zeros = torch.zeros(
            (_SLOTS_PER_WRITE, spec.num_kv_heads, spec.head_size),
            dtype=runner.dtype,
            device=runner.device,
        )
        first, last = (
            block_ids[0] * spec.block_size,
            (block_ids[-1] + 1) * spec.block_size,
        )
        slots = torch.arange(first, last, device=runner.device)
        for layer_name in group.layer_names:
            cache = runner.kv_caches[layer_name]
            for part in slots.split(_SLOTS_PER_WRITE):
                runner.attn_backend.write_kv_cache(
                    zeros[: len(part)], zeros[: len(part)], cache, part
                )
