import itertools

import numpy as np
import pytest
import torch

from tests.v1.spec_decode.linear_costs import LinearCosts
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import StepTiming
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

NUM_DRAFTS = 3
FREE = {"fixed_ms": 10.0, "token_ms": 0.0, "draft_req_ms": 0.0}
# A token costs as much as it brings at the best.
DEAR = {"fixed_ms": 0.0, "token_ms": 1.0, "draft_req_ms": 0.5}


class Steps:
    """A policy over requests whose drafter is always as sure."""

    def __init__(self, num_reqs: int, confidence: float, **costs: float) -> None:
        self.num_reqs = num_reqs
        self.confidence = confidence
        self.policy = AdaptiveBudget(LinearCosts(**costs))
        device = torch.device("cpu")
        self.history = ConfidenceHistory(num_reqs, NUM_DRAFTS, device)
        self.num_drafts = 0
        for row in range(num_reqs):
            self.history.add_request(row)

    def run(self, num_steps=1, caps=None, prompt_tokens=None):
        """Return the choices of these steps."""
        return [self._step(caps, prompt_tokens) for _ in range(num_steps)]

    def _step(self, caps, prompt_tokens):
        rows = np.arange(self.num_reqs, dtype=np.int32)
        is_sampling = np.ones(self.num_reqs, dtype=bool)
        num_drafts = np.full(self.num_reqs, self.num_drafts, np.int32)
        if caps is not None:
            num_drafts = np.minimum(num_drafts, caps).astype(np.int32)
        num_tokens = 1 + num_drafts
        if prompt_tokens is not None:
            # The last request is a prompt's chunk.
            is_sampling[-1], num_drafts[-1] = False, 0
            num_tokens[-1] = prompt_tokens
        step = ScheduledStep(rows, num_tokens, num_drafts, is_sampling, 1)
        self.history.begin_step()
        max_drafts = [NUM_DRAFTS] * self.num_reqs if caps is None else caps
        max_drafts_np = np.array(max_drafts, dtype=np.int32)
        choice = self.policy.choose(step, max_drafts_np, self.history)
        self.num_drafts = choice.max_next_drafts
        if self.num_drafts > 0:
            shape = (self.num_reqs, NUM_DRAFTS)
            drafts = Drafts(
                torch.zeros(shape, dtype=torch.int64),
                torch.full((self.num_reqs,), self.num_drafts, dtype=torch.int32),
                torch.as_tensor(self.confidence).expand(shape).contiguous(),
            )
            self.history.record(rows, torch.from_numpy(rows), drafts)
        return choice


def test_where_drafts_cost_nothing_all_are_verified():
    choices = Steps(4, 0.5, **FREE).run(20)
    assert [choice.draft_budget for choice in choices[1:]] == [12] * 19
    assert all(choice.max_next_drafts for choice in choices)
    assert {choice.predicted_ms for choice in choices} == {10.0}


def test_a_budget_between_none_and_all_is_found_and_predicted():
    # 1, 1.75, 2.31 and 2.73 tokens in 2.2, 3.2, 4.2 and 5.2 ms.
    steps = Steps(1, 0.75, fixed_ms=1.0, token_ms=1.0, draft_req_ms=0.2)
    choice = steps.run(60)[-1]
    assert choice.draft_budget == 2
    assert choice.predicted_ms == pytest.approx(4.2)


def test_drafting_that_does_not_pay_stops_and_is_tried_with_a_few_drafts():
    steps = Steps(4, 0.25, **DEAR)
    choices = steps.run(220)
    drafting = [index for index, choice in enumerate(choices) if choice.max_next_drafts]
    assert drafting[:1] == [0]
    # What is typical has to become known before the patience begins to run.
    num_first = next(
        i for i, choice in enumerate(choices) if not choice.max_next_drafts
    )
    assert num_first < 20
    tries = [index for index in drafting if index > num_first]
    assert len(tries) == 2
    budgets = [choices[index + 1].draft_budget for index in tries]
    assert budgets == [8, 8]
    pausing = choices[num_first + 1]
    assert (pausing.draft_budget, pausing.predicted_ms) == (0, 4.0)


def test_drafts_at_hand_in_a_pause_are_weighed_and_the_pause_goes_on():
    # To propose drafts costs more than they bring; once there, they cost nothing.
    steps = Steps(4, 0.5, fixed_ms=10.0, token_ms=0.0, draft_req_ms=50.0)
    assert all(choice.max_next_drafts == 0 for choice in steps.run(30)[-10:])
    choices = []
    for _ in range(10):
        steps.num_drafts = NUM_DRAFTS
        choices += steps.run()
    # More steps than from one look at what drafts would bring to the next.
    assert [choice.draft_budget for choice in choices] == [12] * 10
    assert all(choice.max_next_drafts == 0 for choice in choices)


def test_a_try_finds_out_that_drafting_pays_again():
    steps = Steps(4, 0.1, **DEAR | {"fixed_ms": 8.0})
    assert steps.run(40)[-1].max_next_drafts == 0
    steps.confidence = 0.95
    choices = steps.run(110)
    assert all(choice.max_next_drafts for choice in choices[-30:])
    assert choices[-1].draft_budget == 12


class DearForMany(LinearCosts):
    def step_costs(self, num_draft_reqs, *args):
        costs = super().step_costs(num_draft_reqs, *args)
        return 10 * costs if num_draft_reqs > 8 else costs


def test_another_number_of_requests_ends_a_pause_at_once():
    steps = Steps(12, 0.9)
    steps.policy = AdaptiveBudget(DearForMany(**FREE))
    assert all(choice.max_next_drafts == 0 for choice in steps.run(30)[-4:])
    steps.num_reqs = 8
    assert steps.run()[0].max_next_drafts


def test_a_batch_that_fills_up_loses_once_what_it_may_lose():
    steps, alone = Steps(16, 0.25, **DEAR), Steps(16, 0.25, **DEAR)
    growing = []
    for steps.num_reqs in (1, 2, 4, 8, 16):
        growing += steps.run(8)
    alone.num_reqs = 1
    assert growing[0].max_next_drafts
    drafting = [bool(choice.max_next_drafts) for choice in growing]
    assert drafting == [bool(choice.max_next_drafts) for choice in alone.run(40)]


def test_a_batch_that_shrinks_may_lose_anew():
    steps = Steps(16, 0.25, **DEAR)
    assert steps.run(20)[-1].max_next_drafts == 0
    steps.num_reqs = 2
    assert [bool(choice.max_next_drafts) for choice in steps.run(3)] == [
        True,
        False,
        False,
    ]


def test_a_pause_holds_no_other_number_of_requests_that_could_not_draft_before():
    steps = Steps(12, 0.9)
    steps.policy = AdaptiveBudget(DearForMany(**FREE))
    assert all(choice.max_next_drafts == 0 for choice in steps.run(30)[-4:])
    steps.num_reqs = 1
    assert not steps.run(caps=[0])[0].max_next_drafts
    assert steps.run()[0].max_next_drafts


def test_steps_that_sample_nothing_shorten_no_pause():
    tries = []
    for num_chunks in (0, 20):
        steps = Steps(1, 0.25, **DEAR)
        steps.run(20)
        steps.run(num_chunks, prompt_tokens=64)
        choices = steps.run(100)
        tries.append([bool(choice.max_next_drafts) for choice in choices].index(True))
    assert tries[0] == tries[1]


def test_what_pays_for_few_requests_does_not_end_the_pause_of_many():
    steps = Steps(16, 0.9)
    steps.policy = AdaptiveBudget(DearForMany(**FREE))
    assert all(choice.max_next_drafts == 0 for choice in steps.run(30)[-4:])
    steps.num_reqs = 1
    assert all(choice.max_next_drafts for choice in steps.run(5))
    steps.num_reqs = 16
    assert all(choice.max_next_drafts == 0 for choice in steps.run(20))


def test_drafts_that_nobody_may_have_are_not_proposed():
    steps = Steps(2, 0.9, **FREE)
    choices = steps.run(5, caps=[0, 0])
    assert all(choice.max_next_drafts == 0 for choice in choices)
    assert steps.run(1, caps=[0, 2])[0].max_next_drafts


def test_a_step_of_prompts_alone_proposes_nothing():
    choice = Steps(1, 0.9, **FREE).run(1, prompt_tokens=64)[0]
    assert (choice.draft_budget, choice.max_next_drafts) == (0, False)
    assert choice.predicted_ms == 10.0


def test_a_chunk_of_a_prompt_makes_the_step_dear_and_drafts_cheap():
    costs = {"fixed_ms": 1.0, "token_ms": 1.0, "draft_req_ms": 0.0}
    alone, beside = Steps(4, 0.6, **costs), Steps(4, 0.6, **costs)
    alone.run(6)
    beside.run(6)
    assert alone.run(1)[0].draft_budget == 0
    assert beside.run(1, prompt_tokens=500)[0].draft_budget == 9


def test_a_chunk_of_a_prompt_earns_no_token():
    steps = Steps(2, 0.6, fixed_ms=1.0, token_ms=1.0, draft_req_ms=0.0)
    steps.run(6)
    # 1, 1.6 and 1.96 tokens in 3, 4 and 5 ms; if it earned one, none would be best.
    assert steps.run(1, prompt_tokens=1)[0].draft_budget == 1


def test_proposals_have_as_many_drafts_as_pay():
    lengths = []
    for next_draft_ms in (0.0, 3.0):
        steps = Steps(2, 0.6, **FREE | {"next_draft_ms": next_draft_ms})
        choices = steps.run(200)
        lengths.append({choice.max_next_drafts for choice in choices[20:]})
        # No verification is dearer for more drafts, so all at hand are verified.
        assert choices[-1].draft_budget == steps.num_drafts * 2
    # One draft of 0.6 tokens, or three of 1.18 that cost 6 ms of 10 more.
    assert lengths == [{3}, {1, 3}]


def test_a_long_proposal_comes_when_a_hundredth_of_the_time_pays_for_it():
    gaps = []
    # Two drafts more for each cost 6.4 ms, which 64 steps of 10 ms pay for.
    for num_reqs, next_draft_ms in [(32, 0.1), (4, 0.8)]:
        steps = Steps(num_reqs, 0.4, **FREE | {"next_draft_ms": next_draft_ms})
        choices = steps.run(300)
        long = [i for i, choice in enumerate(choices) if choice.max_next_drafts == 3]
        assert long[0] == 0
        gaps.append({b - a for a, b in itertools.pairwise(long[1:])})
        # All of its drafts are there to be verified in the step behind it.
        assert choices[long[1] + 1].draft_budget == num_reqs * 3
    assert gaps == [{66}, {66}]


def test_long_proposals_that_begin_to_pay_are_found_within_a_look():
    costs = {"fixed_ms": 20.0, "token_ms": 1.0, "draft_req_ms": 0.8}
    steps = Steps(2, 0.3, **costs, next_draft_ms=0.8)
    steps.confidence = torch.tensor([0.7, 0.2, 0.2])
    choices = steps.run(600)
    # But for looks.
    assert [choice.max_next_drafts for choice in choices[-100:]].count(3) < 10
    steps.confidence = 0.95
    choices = steps.run(60)
    assert all(choice.max_next_drafts == 3 for choice in choices[-10:])


@pytest.mark.parametrize(
    ("num_reqs", "next_draft_ms"), [(64, 1.0), (24, 1.0), (2, 3.0)]
)
def test_looks_at_long_proposals_cost_next_to_nothing(num_reqs, next_draft_ms):
    costs = {"fixed_ms": 20.0, "token_ms": 0.3, "draft_req_ms": 0.1}
    steps = Steps(num_reqs, 0.5, **costs, next_draft_ms=next_draft_ms)
    steps.confidence = torch.tensor([0.75, 0.1, 0.1])
    steps.run(200)
    lengths = [choice.max_next_drafts for choice in steps.run(1000)]
    assert lengths.count(1) > 900
    extra_ms = lengths.count(3) * 2 * next_draft_ms * num_reqs
    assert extra_ms < 0.011 * 1000 * (20 + 0.3 * 2 * num_reqs + 0.1 * num_reqs)
    assert 3 in lengths


def test_batches_of_short_answers_put_off_no_look():
    steps = Steps(2, 0.5, **FREE | {"next_draft_ms": 1.0})
    lengths = []
    for _ in range(100):
        lengths += [choice.max_next_drafts for choice in steps.run(10)]
        assert steps.run(1, caps=[1, 1])[0].max_next_drafts in (0, 1)
    assert lengths.count(3) > 10


def test_a_try_is_a_long_proposal():
    # So dear that beliefs about later drafts say: one.
    steps = Steps(2, 0.3, **DEAR)
    choices = steps.run(70)
    assert choices[-1].max_next_drafts == 0
    tries = [
        choice.max_next_drafts for choice in steps.run(300) if choice.max_next_drafts
    ]
    assert tries
    assert set(tries) == {NUM_DRAFTS}


def test_lengths_are_those_that_every_start_has_run():
    device = torch.device("cpu")
    for cap, lengths in [(3, {1, 2, 4}), (5, {1, 2, 4, 7}), (7, {1, 2, 4, 7})]:
        policy = AdaptiveBudget(LinearCosts(20.0, 1.0, 0.5, 2.0))
        history = ConfidenceHistory(1, 7, device)
        rows, seen = np.zeros(1, dtype=np.int32), set()
        for num_steps in range(400):
            history.begin_step()
            num_drafts = np.zeros(1, dtype=np.int32)
            step = ScheduledStep(rows, 1 + num_drafts, num_drafts, np.ones(1, bool), 1)
            caps = np.array([cap], dtype=np.int32)
            length = policy.choose(step, caps, history).max_next_drafts
            seen.add(length)
            if length:
                drafts = Drafts(
                    torch.zeros((1, 7), dtype=torch.int64),
                    torch.tensor([length], dtype=torch.int32),
                    torch.full((1, 7), 0.3 if num_steps % 100 < 50 else 0.95),
                )
                history.record(rows, torch.from_numpy(rows), drafts)
        assert seen - {0} <= lengths
        assert max(lengths) in seen


def test_a_proposal_is_no_longer_than_requests_allow():
    steps = Steps(2, 0.9, **FREE)
    choices = steps.run(20, caps=[1, 2])
    assert {choice.max_next_drafts for choice in choices} == {2}
    assert choices[-1].draft_budget == 3


def test_a_plain_step_shows_what_it_costs_while_drafts_win_little():
    # 1.17 of what plain steps give, and 1.56.
    for draft_ms, num_plain in [(10.0, 9), (5.0, 0)]:
        costs = {"fixed_ms": 10.0, "token_ms": 0.0, "draft_req_ms": draft_ms}
        steps = Steps(1, 0.65, **costs)
        choices = steps.run(100)
        plain = [i for i, choice in enumerate(choices) if choice.max_next_drafts == 0]
        assert len(plain) == num_plain
        # Drafts follow it.
        assert all(choices[i + 1].max_next_drafts for i in plain[2::3])


class Asked(LinearCosts):
    num_asked = 0

    def step_costs(self, *args):
        self.num_asked += 1
        return super().step_costs(*args)


@pytest.mark.parametrize(("num_reqs", "num_weighed"), [(1, 3), (8, 6), (32, 24)])
def test_a_choice_stands_until_what_it_was_made_from_is_replaced(num_reqs, num_weighed):
    costs = Asked(**FREE)
    steps = Steps(num_reqs, 0.9)
    steps.policy = AdaptiveBudget(costs)
    steps.run(24)
    costs.num_asked = 0
    choices = steps.run(24)
    # Once for what is verified, once for each length of what follows.
    assert costs.num_asked == 4 * num_weighed
    assert {choice.draft_budget for choice in choices} == {NUM_DRAFTS * num_reqs}


def test_a_choice_stands_for_steps_of_its_size_alone():
    costs = Asked(**FREE)
    steps = Steps(4, 0.9)
    steps.policy = AdaptiveBudget(costs)
    steps.run(20)
    costs.num_asked = 0
    budgets = []
    for cap in (1, 2, 3):
        budgets += [choice.draft_budget for choice in steps.run(1, caps=[cap, 3, 3, 3])]
    assert budgets == [10, 11, 12]
    assert costs.num_asked == 12


CHEAP = {"fixed_ms": 1.0, "token_ms": 1.0, "draft_req_ms": 0.2}


def make_standing(confidence: float = 0.75) -> tuple[Steps, Asked]:
    """Return one request's steps, and their costs, in front of a choice that stands."""
    costs = Asked(**CHEAP)
    steps = Steps(1, confidence)
    steps.policy = AdaptiveBudget(costs)
    steps.run(30)
    while steps.policy._num_standing != 3:
        steps.run(1)
    costs.num_asked = 0
    return steps, costs


def become(costs: Asked, **numbers: float) -> None:
    costs.__init__(**numbers)
    costs.num_asked = 0


def test_a_step_of_another_size_ends_a_choice():
    steps, costs = make_standing()
    # Drafts are dear now: the step in between makes no choice that stands.
    become(costs, **DEAR)
    steps.run(1, caps=[1])
    costs.num_asked = 0
    steps.run(1, caps=[3])
    assert costs.num_asked == 4


def test_a_choice_that_loses_much_stands_no_longer_than_patience():
    steps, costs = make_standing()
    become(costs, **CHEAP | {"draft_req_ms": 1.8})
    steps.run(3)
    assert costs.num_asked == 0
    # A fifth of each: a third step would lose more than half a step.
    choices = steps.run(6)
    assert [bool(choice.max_next_drafts) for choice in choices] == [True] * 2 + [
        False
    ] * 4


def test_a_choice_that_loses_little_is_looked_at_less_often_than_it_is_made():
    steps, costs = make_standing()
    become(costs, **CHEAP | {"draft_req_ms": 0.7})
    choices = steps.run(60)
    lengths = [choice.max_next_drafts for choice in choices]
    # Three plain steps are no pause.
    num_drafting = next(i for i in range(60) if lengths[i : i + 4] == [0] * 4)
    # 1.6 % of each, as long as half a step is lost.
    assert 31 <= num_drafting <= 35
    assert costs.num_asked / 4 < num_drafting / 2


def test_no_choice_stands_where_nothing_could_be_drafted():
    steps, _ = make_standing()
    choices = steps.run(2, caps=[0])
    assert [bool(choice.max_next_drafts) for choice in choices] == [False, False]
    assert steps.run(1)[0].max_next_drafts


def test_what_a_try_verifies_does_not_stand():
    steps, costs = make_standing()
    assert steps.run(1)[0].draft_budget == 2
    become(costs, **DEAR)
    while steps.run(1)[0].max_next_drafts:
        pass
    while steps.run(1)[0].max_next_drafts == 0:
        pass
    become(costs, **CHEAP)
    budgets = [choice.draft_budget for choice in steps.run(40)]
    assert budgets[0] == 3
    assert 3 not in budgets[1:]
    # But for the plain steps that show what such a one costs.
    assert sorted(budgets[-20:]) == [0] * 3 + [2] * 17


def test_costs_are_told_what_steps_took():
    class Learning(LinearCosts):
        def observe(self, *args):
            self.seen = args

    costs = Learning()
    AdaptiveBudget(costs).observe_step(StepTiming(3, 17, False, 4.5))
    assert costs.seen == (3, 17, 4.5, False)


def test_costs_are_learnt_from_steps_that_were_weighed():
    class Counting(LinearCosts):
        num_seen = 0

        def observe(self, *args):
            self.num_seen += 1

    costs = Counting(**DEAR)
    steps = Steps(4, 0.25)
    steps.policy = AdaptiveBudget(costs)
    steps.run(40)
    costs.num_seen = 0
    for _ in range(16):
        steps.run()
        steps.policy.observe_step(StepTiming(4, 4, False, 4.0))
    assert costs.num_seen == 2
