"""Random lives of many requests: every text is the one that the request has alone."""

import random

import pytest

from tests.v1.core.fakes import (
    FakeGrammar,
    FakeWorker,
    collect,
    expected_output,
    make_request,
    make_scheduler,
    run_step,
)
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

NUM_REQUESTS = 60


def random_config(rng: random.Random) -> dict:
    num_drafts = rng.choice([0, 0, 1, 3])
    return {
        # Each request fits alone, few fit together.
        "num_blocks": rng.randint(13, 30),
        "max_model_len": 48,
        "max_num_batched_tokens": rng.choice([5, 8, 17, 64]),
        "max_num_seqs": rng.randint(1, 10),
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "priority"]),
        "num_drafts": num_drafts,
        "num_groups": 1 + (num_drafts > 0),
    }


def random_family(rng: random.Random, scheduler, index: int) -> list[Request]:
    """Make a request, or the children of one; prompts repeat to be found again."""
    prompt = [rng.choice([7, 8])] * rng.randint(1, 24)
    prompt += [rng.randrange(1000) for _ in range(rng.choice([0, 0, 1, 5]))]
    num_children = rng.choice([1, 1, 1, 4])
    requests = []
    for child in range(num_children):
        request = make_request(
            scheduler,
            f"{index}.{child}",
            prompt,
            priority=rng.randint(0, 2),
            arrival_time=float(index),
            cache_salt=rng.choice([None, None, "salt"]),
            parent=f"{index}" if num_children > 1 else None,
            grammar=rng.random() < 0.2,
            max_tokens=rng.randint(0, 48 - len(prompt)),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        requests.append(request)
    return requests


def compile_some(rng: random.Random, scheduler) -> None:
    for request in scheduler.waiting_for_grammar.values():
        if rng.random() < 0.3:
            literal = expected_output(request.prompt_token_ids, rng.randint(1, 10))
            request.structured_output_request.grammar = FakeGrammar(literal)


def expected_end(request: Request) -> tuple[list[int], FinishReason]:
    num_tokens = request.sampling_params.max_tokens
    reason = FinishReason.LENGTH
    state = request.structured_output_request
    if state is not None and 0 < len(state.grammar.token_ids) <= num_tokens:
        num_tokens, reason = len(state.grammar.token_ids), FinishReason.STOP
    return expected_output(request.prompt_token_ids, num_tokens), reason


@pytest.mark.parametrize("seed", range(25))
def test_every_request_ends_with_its_own_text(seed):
    rng = random.Random(seed)
    config = random_config(rng)
    scheduler = make_scheduler(**config)
    worker = FakeWorker(num_drafts=config["num_drafts"])
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    total: dict = {}
    num_families = 0

    def maybe_abort() -> None:
        if scheduler.requests and rng.random() < 0.04:
            victim = rng.choice(list(scheduler.requests))
            aborted.add(victim)
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    for _ in range(5000):
        if num_families == NUM_REQUESTS and not scheduler.has_requests():
            break
        if num_families < NUM_REQUESTS and rng.random() < 0.4:
            for request in random_family(rng, scheduler, num_families):
                requests[request.request_id] = request
                scheduler.add_request(request)
            num_families += 1
        compile_some(rng, scheduler)
        maybe_abort()
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache()
        for output in run_step(scheduler, worker, maybe_abort)[1]:
            assert output.request_id not in aborted
            collect(total, output)
    else:
        raise AssertionError(f"{scheduler.get_request_counts()} never end")

    assert total.keys() | aborted == requests.keys()
    for request_id in requests.keys() - aborted:
        output = total[request_id]
        end = (output.new_token_ids, output.finish_reason)
        assert end == expected_end(requests[request_id]), output.error
    assert worker.rows == {}
    assert scheduler.kv_cache_manager.usage == 0.0
