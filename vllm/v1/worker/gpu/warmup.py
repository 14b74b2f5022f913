"""Steps that run before the first request, so that no request pays for a first time."""

import numpy as np

from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetPolicy,
    FixedBudget,
    VerifyAll,
    list_draft_lengths,
)

_NUM_PROMPT_TOKENS = 3


def warm_up(runner: GPUModelRunner) -> None:
    """Run a prefill, a decode and a verification with every effect, then forget them.

    The tokens live in the null block, which no request reads. What a very short context
    has no room for is left out.
    """
    config = runner.vllm_config
    max_model_len = config.model_config.max_model_len
    params = _make_params()
    req_ids = list(params)[: config.scheduler_config.max_num_seqs]
    prompt = [0] * min(_NUM_PROMPT_TOKENS, max_model_len)
    new_reqs = [
        NewRequestData(req_id, prompt, prompt, params[req_id], ([0],), 0)
        for req_id in req_ids
    ]
    _run(runner, _make_step(req_ids, len(prompt), new_reqs=new_reqs))
    num_computed = len(prompt)
    for num_drafts, policy in _list_steps(config.speculative_config):
        # The sampled tokens must have a place, too.
        if num_computed + 2 * (1 + num_drafts) <= max_model_len:
            with runner.verifier.forced_policy(policy):
                step = _make_step(req_ids, 1 + num_drafts, num_computed, num_drafts)
                _run(runner, step)
            num_computed += 1 + num_drafts
    end = SchedulerOutput([], CachedRequestData(), {}, 0, finished_req_ids=set(req_ids))
    runner.execute_model(end)
    runner.sample_tokens(None)
    runner.verifier.forget_confidences()
    if runner.speculator is not None:
        runner.speculator.forget_acceptance()


def _list_steps(
    config: SpeculativeConfig | None,
) -> list[tuple[int, BudgetPolicy]]:
    """Return the numbers of drafts of a decode, and how many of them are verified."""
    steps: list[tuple[int, BudgetPolicy]] = [(0, VerifyAll())]
    if config is not None:
        num_drafts = config.num_speculative_tokens
        steps.append((num_drafts, VerifyAll()))
        if config.enable_adaptive_verification:
            # Only the device knows which one it is.
            steps.append((num_drafts, FixedBudget(1)))
            lengths = list_draft_lengths(num_drafts, num_drafts)[:-1]
            steps += [(0, FixedBudget(0, length)) for length in lengths]
    return steps


def _make_params() -> dict[str, SamplingParams]:
    every_effect = SamplingParams(
        top_k=2,
        top_p=0.9,
        min_p=0.01,
        min_tokens=1,
        logprobs=1,
        prompt_logprobs=1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias={0: 1.0},
        allowed_token_ids=[0, 1, 2],
        bad_words_token_ids=[[0, 1]],
        all_stop_token_ids=[0],
    )
    return {
        "warmup-greedy": SamplingParams(temperature=0.0),
        "warmup-seeded": SamplingParams(seed=0, temperature=0.5),
        "warmup-effects": every_effect,
    }


def _make_step(
    req_ids: list[str],
    num_tokens: int,
    num_computed_tokens: int = 0,
    num_drafts: int = 0,
    new_reqs: list[NewRequestData] | None = None,
) -> SchedulerOutput:
    cached = CachedRequestData()
    if new_reqs is None:
        num_reqs = len(req_ids)
        cached = CachedRequestData(
            req_ids, [None] * num_reqs, [num_computed_tokens] * num_reqs
        )
    drafts = {req_id: [0] * num_drafts for req_id in req_ids} if num_drafts else {}
    return SchedulerOutput(
        scheduled_new_reqs=new_reqs or [],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(req_ids, num_tokens),
        total_num_scheduled_tokens=num_tokens * len(req_ids),
        scheduled_spec_decode_tokens=drafts,
    )


def _run(runner: GPUModelRunner, step: SchedulerOutput) -> None:
    req_ids = list(step.num_scheduled_tokens)
    num_drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
    num_words = -(-runner.vocab_size // 32)
    allow_all = np.full((len(req_ids) + num_drafts, num_words), -1, dtype=np.int32)
    # A speculator may have proposed less than is verified here.
    runner.req_states.draft_tokens.zero_()
    runner.execute_model(step)
    runner.sample_tokens(GrammarOutput(req_ids, allow_all))
    runner.take_draft_token_ids()
