"""A load of constant concurrency: the next request starts when one has ended."""

import time
from dataclasses import dataclass

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter

_COUNTERS = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class LoadFigures:
    """What an engine did while as many requests ran as were asked for.

    Args:
        num_tokens: that were sampled.
        seconds: that it took.
        num_steps: of the engine.
        drafts: counts of drafts, by the end of their metric's name; empty without
            statistics or drafts.
    """

    num_tokens: int
    seconds: float
    num_steps: int
    drafts: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second, over all requests."""
        return self.num_tokens / self.seconds


def run_closed_loop(
    engine: LLMEngine,
    prompts: list[list[int]],
    params: SamplingParams,
    concurrency: int,
    run_id: str,
) -> LoadFigures:
    """Answer prompts, and measure for as long as no slot is empty.

    The requests that are left then are ended without an answer: a batch that drains
    says nothing about its concurrency.

    Args:
        prompts: token ids, at least as many as `concurrency`.
        run_id: makes the requests' ids.
    """
    assert len(prompts) >= concurrency, "slots would be empty from the start"
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    waiting = [(f"{run_id}-{i}", prompt) for i, prompt in enumerate(prompts)][::-1]
    running: set[str] = set()
    num_tokens = num_steps = 0
    before = _count_drafts(engine)
    start_s = time.perf_counter()
    while True:
        while waiting and len(running) < concurrency:
            request_id, prompt = waiting.pop()
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            running.add(request_id)
        if len(running) < concurrency:
            break
        num_steps += 1
        for output in engine.step():
            num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
            if output.finished:
                running.remove(output.request_id)
    seconds = time.perf_counter() - start_s
    after = _count_drafts(engine)
    engine.abort_request(running)
    while engine.has_unfinished_requests():
        engine.step()
    drafts = {name: count - before[name] for name, count in after.items()}
    return LoadFigures(num_tokens, seconds, num_steps, drafts)


def _count_drafts(engine: LLMEngine) -> dict[str, int]:
    if not engine.log_stats:
        return {}
    return {
        metric.name.removeprefix(_COUNTERS): int(metric.value)
        for metric in engine.get_metrics()
        if isinstance(metric, Counter) and metric.name.startswith(_COUNTERS)
    }
