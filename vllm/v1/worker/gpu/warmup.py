"""Steps that run before the first request, so that no request pays for a first time."""

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

_NUM_PROMPT_TOKENS = 3


def warm_up(runner: GPUModelRunner) -> None:
    """Run a prefill and a decode that use every effect, then forget them.

    The tokens live in the null block, which no request reads.
    """
    params = {
        "warmup-greedy": SamplingParams(temperature=0.0),
        "warmup-sampled": SamplingParams(
            seed=0,
            top_k=2,
            top_p=0.9,
            min_p=0.01,
            logprobs=1,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            logit_bias={0: 1.0},
        ),
    }
    max_num_reqs = runner.vllm_config.scheduler_config.max_num_seqs
    req_ids = list(params)[:max_num_reqs]
    prompt = [0] * _NUM_PROMPT_TOKENS
    prefill = SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(req_id, prompt, prompt, params[req_id], ([0],), 0)
            for req_id in req_ids
        ],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens=dict.fromkeys(req_ids, _NUM_PROMPT_TOKENS),
        total_num_scheduled_tokens=_NUM_PROMPT_TOKENS * len(req_ids),
    )
    decode = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids, [None] * len(req_ids), [_NUM_PROMPT_TOKENS] * len(req_ids)
        ),
        num_scheduled_tokens=dict.fromkeys(req_ids, 1),
        total_num_scheduled_tokens=len(req_ids),
    )
    num_words = -(-runner.vocab_size // 32)
    allow_all = np.full((len(req_ids), num_words), -1, dtype=np.int32)
    for step in (prefill, decode):
        runner.execute_model(step)
        runner.sample_tokens(GrammarOutput(req_ids, allow_all))
    end = SchedulerOutput([], CachedRequestData(), {}, 0, finished_req_ids=set(req_ids))
    runner.execute_model(end)
    runner.sample_tokens(None)
