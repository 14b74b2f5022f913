"""Loads that rise and fall, and requests of which little is expected."""

from pathlib import Path

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.budget_policies import Watched
from tests.v1.e2e.tiny_drafter import DRAFTERS, make_speculative_config
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model, visible
from tests.v1.spec_decode.linear_costs import LinearCosts
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetPolicy,
    FixedBudget,
)

MAX_NUM_SEQS = 64
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Steps:
    """What the steps of an engine were.

    Attributes:
        results: of each, the request's id -> the number of its tokens.
        verified: of each, the request's id -> the number of its verified drafts.
    """

    def __init__(self, engine: TinyEngine) -> None:
        self.results: list[dict[str, int]] = []
        self.verified: list[dict[str, int]] = []
        self._drafts: dict[str, int] = {}
        executor = engine.executor
        execute_model, sample_tokens = executor.execute_model, executor.sample_tokens

        def execute(scheduler_output: SchedulerOutput) -> None:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self._drafts = {req_id: len(ids) for req_id, ids in drafts.items()}
            execute_model(scheduler_output)

        def sample(grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
            output = sample_tokens(grammar_output)
            tokens = output.sampled_token_ids
            self.results.append(
                {
                    req_id: len(tokens[batch_idx])
                    for req_id, batch_idx in output.req_id_to_index.items()
                }
            )
            self.verified.append(self._drafts | output.num_verified_drafts)
            return output

        executor.execute_model, executor.sample_tokens = execute, sample


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose drafts are as good as itself: of few characters, and no NaN."""
    return save_tiny_model(tmp_path_factory.mktemp("writer"), alphabet="abcdefgh")


def make_engine(writer: Path, policy: BudgetPolicy) -> TinyEngine:
    """Return an engine of which every verified greedy draft is accepted."""
    config = {"model": str(writer), "num_speculative_tokens": 3}
    return TinyEngine(
        writer,
        max_num_seqs=MAX_NUM_SEQS,
        budget_policy=policy,
        speculative_config=config,
    )


@bit_for_bit
def test_the_last_of_many_requests_get_drafts_again_and_the_next_wave_goes_on(
    writer: Path,
):
    """Among many, no drafts are proposed; and no step is without a token for anyone."""
    lengths = [3 + number * number % 22 for number in range(250)] + [90] * 3
    requests = [
        (f"{number}:", SamplingParams(max_tokens=length, **GREEDY))
        for number, length in enumerate(lengths)
    ]
    plain = TinyEngine(writer, max_num_seqs=MAX_NUM_SEQS)
    expected = [visible(output) for output in plain.run(requests)]
    plain.shutdown()
    policy = Watched(AdaptiveBudget(LinearCosts(3.0, 1.0, 0.5)))
    engine = make_engine(writer, policy)
    steps = Steps(engine)
    for _ in range(2):
        outputs = engine.run(requests)
        assert [visible(output) for output in outputs] == expected
        paused = [length == 0 for _, _, length in policy.choices]
        assert sum(paused) > 10
        assert all(min(result.values()) > 0 for result in steps.results)
        # The last requests: every token is the drafter's too.
        drained = [
            sum(result.values()) / len(result)
            for result in steps.results
            if len(result) <= 3
        ]
        assert sum(drained) / len(drained) > 3
        steps.results.clear()
        policy.choices.clear()
    engine.shutdown()


def test_a_request_whose_drafts_are_never_likely_enough_has_its_token_each_step(
    writer: Path,
):
    """Beside 63 whose drafts take the whole budget."""
    sure = SamplingParams(max_tokens=40, **GREEDY)
    unsure = SamplingParams(max_tokens=12, temperature=50.0, ignore_eos=True)
    engine = make_engine(writer, FixedBudget(100))
    steps = Steps(engine)
    last = engine.add("unsure", unsure)
    for number in range(63):
        engine.add(f"{number} sure", sure)
    engine.drain()
    engine.shutdown()
    shared = [
        (result, verified)
        for result, verified in zip(steps.results, steps.verified, strict=True)
        if last in verified and len(verified) == MAX_NUM_SEQS
    ]
    assert len(shared) > 8
    for result, verified in shared:
        assert sum(verified.values()) == 100
        assert (result[last], verified[last]) == (1, 0)
        # Others have more than one, in the same step.
        assert max(verified.values()) > 1


@bit_for_bit
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_can_be_verified_by_costs(
    model: Path, tmp_path: Path, drafter: str
):
    table = tmp_path / "costs.json"
    table.write_text('{"draft_curve": [[1, 1]], "verify_curve": [[1, 9], [64, 40]]}')
    requests = [
        (f"{number}, {number}, {number}", SamplingParams(max_tokens=24, **sampled))
        for number in range(3)
        for sampled in (GREEDY, {"seed": number, "logprobs": 1})
    ]
    plain = TinyEngine(model)
    expected = [visible(output) for output in plain.run(requests)]
    plain.shutdown()
    config = make_speculative_config(
        drafter,
        model,
        tmp_path,
        enable_adaptive_verification=True,
        cost_table=str(table),
    )
    engine = TinyEngine(model, speculative_config=config)
    verifier = engine.executor.worker.model_runner.verifier
    assert isinstance(verifier.policy, AdaptiveBudget)
    outputs = engine.run(requests)
    engine.shutdown()
    assert [visible(output) for output in outputs] == expected
