"""Measures what steps cost here, by running them before the first request."""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

from vllm import envs
from vllm.config import VllmConfig
from vllm.config.cost_profile import CostProfile
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.cost_cache import CostCache
from vllm.v1.worker.gpu.dummy_requests import DummyRequests, StepShape
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.cost_model import CostModel

logger = init_logger(__name__)

# Every step runs once for nothing and then this often, as long as the time lasts.
_NUM_ROUNDS = 5
_TIME_LIMIT_S = 11.0
# Of the time, for prompts: most of it is for what the budget chooses among.
_PROMPT_SHARE = 0.25
# Of equal steps: beyond, the curves are not worth keeping.
_MAX_NOISE = 0.2
# Attention over a longer context would leave a CPU no time for anything else.
_MAX_CPU_CONTEXT_LEN = 256


@dataclass
class _Clock:
    """The time that a measurement may take.

    Args:
        limit_s: from now on.
    """

    limit_s: float
    _start_s: float = field(default_factory=lambda: time.perf_counter())

    def has_left(self, wanted_ms: float) -> bool:
        """Whether so much can still be spent."""
        spent_s = time.perf_counter() - self._start_s
        return spent_s + wanted_ms / 1e3 <= self.limit_s


def prepare_cost_model(
    runner: GPUModelRunner, kv_cache_config: KVCacheConfig
) -> CostModel:
    """Return the costs that the user names, else those of an earlier start, else new.

    Args:
        runner: complete, without a request.
        kv_cache_config: of its cache.
    """
    config = runner.vllm_config
    assert config.speculative_config is not None, "costs are for speculation"
    profile = config.speculative_config.cost_profile
    if profile is None:
        profile = _load_or_measure(runner, kv_cache_config)
    max_num_reqs = config.scheduler_config.max_num_seqs
    max_num_tokens = max(
        config.scheduler_config.max_num_batched_tokens,
        max_num_reqs * (1 + config.num_speculative_tokens),
    )
    return CostModel.from_profile(
        profile,
        max_num_reqs,
        max_num_tokens,
        config.num_speculative_tokens,
    )


def _load_or_measure(
    runner: GPUModelRunner, kv_cache_config: KVCacheConfig
) -> CostProfile:
    cache = CostCache(runner.vllm_config, runner.device)
    profile = cache.load()
    if profile is None:
        with cache.alone() as has_waited:
            profile = cache.load() if has_waited else None
            if profile is None:
                return _measure_and_save(runner, kv_cache_config, cache)
    logger.info("Step costs read from %s", cache.path)
    return profile


def _measure_and_save(
    runner: GPUModelRunner, kv_cache_config: KVCacheConfig, cache: CostCache
) -> CostProfile:
    start_s = time.perf_counter()
    times = measure_steps(runner, kv_cache_config)
    profile = make_profile(
        {shape: statistics.median(rounds) for shape, rounds in times.items()}
    )
    noise = relative_noise(times)
    if noise <= _MAX_NOISE:
        cache.save(profile)
    else:
        logger.warning(
            "Times of equal steps differ by %.0f%%, the machine is busy: what steps "
            "cost is learnt while serving, and measured again at the next start",
            100 * noise,
        )
    elapsed_s = time.perf_counter() - start_s
    logger.info("Step costs measured in %.1f s", elapsed_s)
    return profile


def measure_steps(
    runner: GPUModelRunner, kv_cache_config: KVCacheConfig
) -> dict[StepShape, list[float]]:
    """Time steps of all sizes in interleaved rounds.

    The requests have a context of VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
    tokens, or of what there is room and time for.

    Args:
        runner: complete, without a request.
        kv_cache_config: of its cache.

    Returns:
        shape -> ms in each round.
    """
    config = runner.vllm_config
    scheduler_config = config.scheduler_config
    max_num_reqs = scheduler_config.max_num_seqs
    max_num_tokens = scheduler_config.max_num_batched_tokens
    max_model_len = config.model_config.max_model_len
    num_drafts, num_next_drafts = _max_num_drafts(config), config.num_speculative_tokens
    verify_shapes = list_verify_shapes(max_num_reqs, num_drafts, max_num_tokens)
    shapes = list(
        dict.fromkeys(
            [*list_draft_shapes(max_num_reqs, num_next_drafts), *verify_shapes]
        )
    )
    prompt_shapes = list_prompt_shapes(
        verify_shapes[-1].num_tokens, min(max_num_tokens, max_model_len - 1)
    )
    context_len = _context_len(config, runner.device)
    with tqdm(
        total=(len(shapes) + len(prompt_shapes)) * (1 + _NUM_ROUNDS),
        desc="Measuring step costs",
        unit="step",
        disable=not config.load_config.use_tqdm_on_load,
    ) as bar:
        limit_s = _TIME_LIMIT_S * (1 - _PROMPT_SHARE if prompt_shapes else 1)
        with DummyRequests(
            runner, kv_cache_config, max_num_reqs, context_len, context_len + 1
        ) as requests:
            times = time_shapes(requests, shapes, limit_s, bar)
        if prompt_shapes:
            prompt_len = prompt_shapes[-1].num_tokens + 1
            with DummyRequests(runner, kv_cache_config, 1, 0, prompt_len) as requests:
                limit_s = _TIME_LIMIT_S * _PROMPT_SHARE
                times |= time_shapes(requests, prompt_shapes, limit_s, bar)
    return times


def list_draft_shapes(max_num_reqs: int, num_drafts: int) -> list[StepShape]:
    """Return decodes with nothing, one draft or all drafts proposed behind them.

    Args:
        num_drafts: that a proposal can have.
    """
    return [
        StepShape(num_reqs, num_next_drafts=num_next_drafts)
        for num_reqs in _doublings(1, max_num_reqs)
        for num_next_drafts in sorted({0, 1, num_drafts})
    ]


def list_verify_shapes(
    max_num_reqs: int, num_drafts: int, max_num_tokens: int
) -> list[StepShape]:
    """Return verifications of all sizes, of half the drafts that requests can have.

    Args:
        num_drafts: that a request can have.
        max_num_tokens: of a step.
    """
    per_req = -(-(1 + num_drafts) // 2)
    most = min(max_num_reqs * (1 + num_drafts), max_num_tokens)
    shapes = []
    for num_tokens in _doublings(1, most):
        num_reqs = min(max(num_tokens // per_req, 1), max_num_reqs)
        own_drafts = min(num_tokens // num_reqs - 1, num_drafts)
        shapes.append(StepShape(num_reqs, num_drafts=own_drafts))
    return list(dict.fromkeys(shapes))


def list_prompt_shapes(largest: int, max_num_tokens: int) -> list[StepShape]:
    """Return chunks of a prompt that are larger than any verification."""
    sizes = _doublings(largest, max_num_tokens)[1:]
    return [StepShape(1, num_new_tokens=num_tokens) for num_tokens in sizes]


def _doublings(first: int, last: int) -> list[int]:
    """Return first, 2 * first, 4 * first, ... and last; [] if there is no such size."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last] if sizes or first == last else []


def _max_num_drafts(config: VllmConfig) -> int:
    """Return the drafts that a request has room for, and for as many new tokens."""
    room = config.model_config.max_model_len // 2 - 1
    return max(min(config.num_speculative_tokens, room), 0)


def _context_len(config: VllmConfig, device: torch.device) -> int:
    wanted = envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
    if device.type == "cpu":
        wanted = min(wanted, _MAX_CPU_CONTEXT_LEN)
    room = config.model_config.max_model_len - 2 * (1 + _max_num_drafts(config))
    return max(min(wanted, room), 0)


def time_shapes(
    requests: DummyRequests, shapes: Sequence[StepShape], limit_s: float, bar: tqdm
) -> dict[StepShape, list[float]]:
    """Return each shape's ms in all rounds; a slow machine leaves large shapes out."""
    clock = _Clock(limit_s)
    times: dict[StepShape, list[float]] = {shape: [] for shape in shapes}
    by_size = sorted(shapes, key=lambda shape: shape.num_tokens)
    for _ in range(1 + _NUM_ROUNDS):
        for shape in by_size:
            bar.update()
            known = times[shape]
            is_needed = not known and shape.num_tokens == by_size[0].num_tokens
            if is_needed or clock.has_left(known[-1] if known else 0.0):
                known.append(requests.time_step(shape))
    # What ran for the first time is the best there is where time was short.
    return {shape: known[1:] or known for shape, known in times.items() if known}


def relative_noise(times: dict[StepShape, list[float]]) -> float:
    """Return how far a step's time is from the median of its shape, as a rule.

    A shape that ran once is not near its median, it is it: a machine so busy that
    little could be repeated must not seem quiet. 0 where nothing ran twice.
    """
    deviations = []
    for rounds in times.values():
        if len(rounds) > 1:
            median = statistics.median(rounds)
            deviations += [abs(ms - median) / median for ms in rounds]
    return statistics.median(deviations) if deviations else 0.0


def make_profile(costs: dict[StepShape, float]) -> CostProfile:
    """Tell drafting and the rest of a step apart.

    Args:
        costs: shape -> ms; one that drafts is there without drafting, too, and for one
            draft or as many as can be, or both.
    """
    draft_samples, verify_samples = defaultdict(list), defaultdict(list)
    for shape, ms in costs.items():
        if shape.num_next_drafts:
            drafting_ms = max(ms - costs[replace(shape, num_next_drafts=0)], 0.0)
            draft_samples[shape.num_next_drafts].append((shape.num_reqs, drafting_ms))
        else:
            verify_samples[shape.num_tokens].append(ms)
    draft_curves = [
        tuple(sorted(draft_samples[number])) for number in sorted(draft_samples)
    ]
    # As many tokens of many requests, or of few and their drafts: the table has one
    # number for both.
    verify_curve = [(size, statistics.mean(ms)) for size, ms in verify_samples.items()]
    return CostProfile(
        draft_curve=draft_curves[-1] if draft_curves else (),
        verify_curve=tuple(sorted(verify_curve)),
        single_draft_curve=draft_curves[0] if draft_curves else (),
    )
