"""Which ways to choose how many drafts are verified keep the target's law, exactly.

Every draft, acceptance and replacement of small random models is enumerated. A way is
safe if whether draft k is verified does not depend on draft k or a later one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import pytest
import torch

from tests.v1.spec_decode.linear_costs import LinearCosts
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerifier
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    choose_draft_budget,
    expected_gains,
)
from vllm.v1.worker.gpu.spec_decode.residual import _write_residual_logits_torch
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

Text = tuple[int, ...]
EXACT = 1e-12


class Model:
    """Laws of a target and of a drafter, each by the text so far.

    Args:
        num_tokens: the vocabulary.
        num_drafts: of a round.
        seed: of the laws.
        horizon: tokens of an output whose law is compared.
        is_certain: the drafter takes its likeliest token instead of drawing one.
        is_blind: the drafter does not look at the text.
    """

    def __init__(
        self,
        num_tokens: int,
        num_drafts: int,
        seed: int,
        *,
        horizon: int | None = None,
        is_certain: bool = False,
        is_blind: bool = False,
    ) -> None:
        self.num_tokens = num_tokens
        self.num_drafts = num_drafts
        self.horizon = horizon or num_drafts + 1
        self.is_certain = is_certain
        self.is_blind = is_blind
        self._seed = seed
        self._known: dict[tuple[str, Text], np.ndarray] = {}

    def target(self, text: Text) -> np.ndarray:
        return self._law("target", text)

    def draft(self, text: Text) -> np.ndarray:
        law = self._law("draft", () if self.is_blind else text)
        return np.eye(self.num_tokens)[law.argmax()] if self.is_certain else law

    def confidence(self, text: Text) -> float:
        """Return the probability that a draft after `text` is accepted."""
        return float(np.minimum(self.target(text), self.draft(text)).sum())

    def residual(self, text: Text) -> np.ndarray:
        """Return what the engine draws from in place of a rejected draft."""
        logits = torch.from_numpy(np.log(self.target(text))[None].copy())
        with np.errstate(divide="ignore"):
            drafted = torch.from_numpy(np.log(self.draft(text))[None, None].copy())
        zero = torch.zeros(1, dtype=torch.int64)
        is_rejected = torch.ones(1, dtype=torch.bool)
        _write_residual_logits_torch(logits, drafted, is_rejected, zero, zero)
        return logits[0].softmax(dim=-1).numpy()

    def continuation(self, text: Text) -> np.ndarray:
        """Return the law of the outputs that begin with `text`, by the target."""
        law = np.zeros((self.num_tokens,) * self.horizon)
        if len(text) >= self.horizon:
            law[text[: self.horizon]] = 1.0
            return law
        for token, probability in enumerate(self.target(text)):
            law += probability * self.continuation((*text, token))
        return law

    @cached_property
    def truth(self) -> np.ndarray:
        return self.continuation(())

    def _law(self, kind: str, text: Text) -> np.ndarray:
        if (kind, text) not in self._known:
            numbers = [self._seed, int(kind == "target"), len(text), *text]
            law = np.random.default_rng(numbers).dirichlet(np.ones(self.num_tokens))
            self._known[kind, text] = law
        return self._known[kind, text]


class PaperModel(Model):
    """The counterexample of the DSpark paper, appendix A: one law for every place."""

    def __init__(self) -> None:
        super().__init__(2, 2, seed=0, horizon=1)

    def target(self, text: Text) -> np.ndarray:
        return np.array([0.7, 0.3])

    def draft(self, text: Text) -> np.ndarray:
        return np.array([0.5, 0.5])

    def confidence(self, text: Text) -> float:
        return {(): 0.8, (0,): 0.9, (1,): 0.0}[text]


# How many drafts are verified, from the model, the text and the drafts.
Policy = Callable[[Model, Text, Text], int]
# One number a draft, from the same.
Confidences = Callable[[Model, Text, Text], np.ndarray]


def drafts_of(model: Model, text: Text) -> Iterator[tuple[Text, float]]:
    """Yield the possible drafts after `text` and their probabilities."""
    for drafts in itertools.product(range(model.num_tokens), repeat=model.num_drafts):
        weight = 1.0
        for k, token in enumerate(drafts):
            weight *= model.draft(text + drafts[:k])[token]
        if weight > 0:
            yield drafts, weight


def verify(
    model: Model, text: Text, drafts: Text, num_verified: int
) -> Iterator[tuple[Text, float]]:
    """Yield the possible texts after a round and their probabilities."""
    reached = 1.0
    for k in range(num_verified):
        before = text + drafts[:k]
        token = drafts[k]
        ratio = model.target(before)[token] / model.draft(before)[token]
        accepted = min(1.0, ratio)
        for other, probability in enumerate(model.residual(before)):
            yield (*before, other), reached * (1 - accepted) * probability
        reached *= accepted
    before = text + drafts[:num_verified]
    for token, probability in enumerate(model.target(before)):
        yield (*before, token), reached * probability


def law_of_round(
    model: Model, text: Text, drafts: Text, num_verified: int
) -> np.ndarray:
    law = np.zeros_like(model.truth)
    for after, probability in verify(model, text, drafts, num_verified):
        if probability > 0:
            law += probability * model.continuation(after)
    return law


def law_of_policy(model: Model, policy: Policy) -> np.ndarray:
    return sum(
        weight * law_of_round(model, (), drafts, policy(model, (), drafts))
        for drafts, weight in drafts_of(model, ())
    )


def distance(law: np.ndarray, truth: np.ndarray) -> float:
    """Return the total variation."""
    return float(0.5 * np.abs(law - truth).sum())


def confidences(model: Model, text: Text, drafts: Text) -> np.ndarray:
    """Return one number a draft; the k-th has seen the drafts before the k-th."""
    return np.array([model.confidence(text + drafts[:k]) for k in range(len(drafts))])


def best_length(survivals: np.ndarray, speeds: tuple[float, ...]) -> int:
    """Return the number of drafts with most tokens a second, among all."""
    emitted = 1 + np.concatenate([[0.0], np.cumsum(survivals)])
    return int(np.argmax(emitted * np.array(speeds)))


def fixed(num_verified: int) -> Policy:
    return lambda model, text, drafts: num_verified


def above_threshold(threshold: float, say: Confidences = confidences) -> Policy:
    def policy(model: Model, text: Text, drafts: Text) -> int:
        is_low = say(model, text, drafts) < threshold
        return int(is_low.argmax()) if is_low.any() else len(drafts)

    return policy


def first_that_does_not_pay(speeds: tuple[float, ...]) -> Policy:
    def policy(model: Model, text: Text, drafts: Text) -> int:
        survivals = np.cumprod(confidences(model, text, drafts))
        emitted, best = 1.0, speeds[0]
        for k, survival in enumerate(survivals):
            emitted += survival
            if emitted * speeds[k + 1] <= best:
                return k
            best = emitted * speeds[k + 1]
        return len(drafts)

    return policy


def live_argmax(speeds: tuple[float, ...]) -> Policy:
    return lambda model, text, drafts: best_length(
        np.cumprod(confidences(model, text, drafts)), speeds
    )


def while_drawn_token_is_likely(model: Model, text: Text, drafts: Text) -> int:
    for k, token in enumerate(drafts):
        if model.draft(text + drafts[:k])[token] < 0.5:
            return k
    return len(drafts)


SMOOTH = (1.0, 0.6, 0.45, 0.38)
CLIFF = (1.0, 0.3, 0.3, 0.32)
SAFE = {
    **{f"fixed-{n}": fixed(n) for n in range(4)},
    "threshold-0.5": above_threshold(0.5),
    "threshold-0.8": above_threshold(0.8),
    "early-stop-smooth": first_that_does_not_pay(SMOOTH),
    "early-stop-cliff": first_that_does_not_pay(CLIFF),
}
UNSAFE = {
    "live-argmax-smooth": live_argmax(SMOOTH),
    "live-argmax-cliff": live_argmax(CLIFF),
    "drawn-token": while_drawn_token_is_likely,
}


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_a_policy_that_looks_only_back_is_lossless(name, shape):
    for seed in range(4):
        model = Model(*shape, seed)
        assert distance(law_of_policy(model, SAFE[name]), model.truth) < EXACT


@pytest.mark.parametrize(
    ("name", "bound"),
    [("live-argmax-smooth", 0.05), ("live-argmax-cliff", 0.1), ("drawn-token", 0.15)],
)
def test_a_policy_that_looks_at_what_it_decides_about_is_seen(name, bound):
    distances = []
    for seed in range(40):
        model = Model(2, 3, seed)
        distances.append(distance(law_of_policy(model, UNSAFE[name]), model.truth))
    assert max(distances) > bound


@pytest.mark.parametrize("name", [*SAFE, *UNSAFE])
def test_with_certain_drafts_every_policy_is_lossless(name):
    for seed in range(4):
        model = Model(3, 3, seed, is_certain=True)
        policy = (SAFE | UNSAFE)[name]
        assert distance(law_of_policy(model, policy), model.truth) < EXACT


def test_the_counterexample_of_the_paper_turns_7_to_3_into_85_to_15():
    model = PaperModel()
    speeds = (1.0, 0.5, 0.45)
    lengths = {
        drafts: live_argmax(speeds)(model, (), drafts)
        for drafts, _ in drafts_of(model, ())
    }
    assert lengths == {(0, 0): 2, (0, 1): 2, (1, 0): 0, (1, 1): 0}
    law = law_of_policy(model, live_argmax(speeds))
    np.testing.assert_allclose(law, [0.85, 0.15], rtol=0, atol=EXACT)
    # Stopping at the first draft that does not pay verifies none here.
    stopped = law_of_policy(model, first_that_does_not_pay(speeds))
    np.testing.assert_allclose(stopped, [0.7, 0.3], rtol=0, atol=EXACT)


def test_the_score_of_a_drawn_token_by_hand():
    class Coin(PaperModel):
        def target(self, text: Text) -> np.ndarray:
            return np.array([0.5, 0.5])

        def draft(self, text: Text) -> np.ndarray:
            return np.array([0.8, 0.2])

    # 0 is drafted at 0.8: 0.5 stays, 0.3 turns to 1. 1 is drafted at 0.2 and not
    # verified: 0.1 each.
    law = law_of_policy(Coin(), while_drawn_token_is_likely)
    np.testing.assert_allclose(law, [0.6, 0.4], rtol=0, atol=EXACT)


def ranked(scores: list[np.ndarray], budget: int) -> list[int]:
    """Return how many drafts of each request are among the `budget` best.

    Ties go to the lower place, then to the lower request.
    """
    pairs = [
        (-score, place, request)
        for request, of_request in enumerate(scores)
        for place, score in enumerate(of_request)
    ]
    admitted = [request for _, _, request in sorted(pairs)[:budget]]
    return [admitted.count(request) for request in range(len(scores))]


# How many drafts of each request are verified, from the confidences of both.
Ranking = Callable[[list[np.ndarray]], Sequence[int]]


def by_score(budget: int, score: Callable[[np.ndarray], np.ndarray]) -> Ranking:
    return lambda of_requests: ranked(list(map(score, of_requests)), budget)


def joint_law(
    models, ranking: Ranking, say: Confidences = confidences
) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of two requests' outputs together, and the target's."""
    first, second = models
    law = np.zeros((first.truth.size, second.truth.size))
    for drafts_a, weight_a in drafts_of(first, ()):
        for drafts_b, weight_b in drafts_of(second, ()):
            length_a, length_b = ranking(
                [
                    say(model, (), drafts)
                    for model, drafts in ((first, drafts_a), (second, drafts_b))
                ]
            )
            law_a = law_of_round(first, (), drafts_a, length_a).ravel()
            law_b = law_of_round(second, (), drafts_b, length_b).ravel()
            law += weight_a * weight_b * np.outer(law_a, law_b)
    return law, np.outer(first.truth.ravel(), second.truth.ravel())


def survival(numbers: np.ndarray) -> np.ndarray:
    return np.cumprod(numbers)


def coarse_survival(numbers: np.ndarray) -> np.ndarray:
    # Rounding makes ties, and would break the order if nothing restored it.
    return np.minimum.accumulate(np.round(np.cumprod(numbers), 1))


@pytest.mark.parametrize("budget", range(7))
@pytest.mark.parametrize("score", [survival, coarse_survival])
def test_a_given_budget_and_a_ranking_of_live_survivals_are_lossless(budget, score):
    models = Model(2, 3, seed=5), Model(2, 3, seed=6)
    law, truth = joint_law(models, by_score(budget, score))
    assert distance(law, truth) < EXACT


def test_a_ranking_by_single_confidences_is_seen():
    # A request's second draft may then be admitted before its first, and the choice of
    # the first looks at it.
    distances = []
    for seed in range(6):
        models = Model(2, 3, seed=2 * seed), Model(2, 3, seed=2 * seed + 1)
        law, truth = joint_law(models, by_score(1, lambda numbers: numbers))
        distances.append(distance(law, truth))
    assert max(distances) > 0.01


class GivenCosts(LinearCosts):
    """Costs by the number of drafts alone."""

    def __init__(self, costs_ms: Sequence[float]) -> None:
        super().__init__()
        self._costs_ms = np.array(costs_ms)
        self.num_asked = 0

    def step_costs(
        self,
        num_draft_reqs: int,
        num_non_draft_tokens: int,
        max_drafts: int,
        num_next_drafts: int,
    ) -> np.ndarray:
        self.num_asked += 1
        return self._costs_ms[: max_drafts + 1]


class Shipped:
    """The engine's own plan for two requests, of whose past something is known.

    Args:
        past: [2, num_drafts] confidences of the drafts before.
        costs_ms: of a step, by the number of drafts that it verifies.
        num_rounds: of such a past; of many, a choice stands for some steps.
        is_live: plant a fault: the budget knows the confidences of the drafts at hand.
    """

    def __init__(
        self,
        past: np.ndarray,
        costs_ms: Sequence[float],
        *,
        num_rounds: int = 1,
        is_live: bool = False,
    ) -> None:
        self._past = past
        self._costs_ms = costs_ms
        self._num_rounds = num_rounds
        self._is_live = is_live
        self.budgets: set[int] = set()
        # The last plan was made by a choice that stood.
        self.has_stood = False

    def __call__(self, of_requests: list[np.ndarray]) -> list[int]:
        num_reqs, num_drafts = self._past.shape
        verifier = AdaptiveVerifier(num_reqs, num_drafts, torch.device("cpu"))
        costs = GivenCosts(self._costs_ms)
        verifier.policy = AdaptiveBudget(costs)
        live = np.stack(of_requests)
        rows = np.arange(num_reqs, dtype=np.int32)
        for row in range(num_reqs):
            verifier.add_request(row)
        before = live if self._is_live else self._past
        for round_idx in range(self._num_rounds + 1):
            proposed = before if round_idx < self._num_rounds else live
            self._plan(verifier, rows, num_drafts if round_idx else 0)
            drafts = Drafts(
                torch.zeros(live.shape, dtype=torch.int64),
                torch.full((num_reqs,), num_drafts, dtype=torch.int32),
                torch.from_numpy(proposed).float(),
            )
            verifier.observe_drafts(rows, torch.from_numpy(rows), drafts)
        num_asked = costs.num_asked
        plan = self._plan(verifier, rows, num_drafts)
        self.has_stood = costs.num_asked == num_asked
        self.budgets.add(plan.draft_budget)
        return plan.admitted.tolist()

    def _plan(self, verifier: AdaptiveVerifier, rows: np.ndarray, num_scheduled: int):
        counts = np.full(len(rows), num_scheduled, dtype=np.int32)
        is_sampling = np.ones(len(rows), dtype=bool)
        step = ScheduledStep(rows, counts + 1, counts, is_sampling, 1)
        caps = np.full(len(rows), self._past.shape[1], dtype=np.int32)
        return verifier.plan(step, torch.from_numpy(rows), caps)


FLAT = (1.0,) * 7
STAIRS = (1.0, 1.1, 1.2, 1.2, 2.5, 2.5, 2.5)
# One draft is as dear as all.
PADDED = (1.0,) + (2.4,) * 6


def past_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((2, 3)) ** 0.5


def test_the_engines_own_plans_are_lossless():
    budgets = set()
    for seed in range(4):
        models = Model(2, 3, seed=2 * seed), Model(2, 3, seed=2 * seed + 1)
        for costs_ms in (FLAT, STAIRS, PADDED):
            plans = Shipped(past_of(seed), costs_ms)
            law, truth = joint_law(models, plans)
            assert distance(law, truth) < EXACT
            assert len(plans.budgets) == 1
            budgets |= plans.budgets
    # None, some and all.
    assert {0, 6} < budgets
    assert len(budgets) > 2


def test_plans_that_stand_are_lossless():
    num_stood = 0
    models = Model(2, 3, seed=2), Model(2, 3, seed=3)
    for num_rounds in range(6, 10):
        plans = Shipped(past_of(1), STAIRS, num_rounds=num_rounds)
        law, truth = joint_law(models, plans)
        assert distance(law, truth) < EXACT
        assert 0 < min(plans.budgets) <= max(plans.budgets) < 6
        num_stood += plans.has_stood
    assert 0 < num_stood < 4


def test_a_plan_whose_budget_knows_the_drafts_at_hand_is_seen():
    distances = []
    for seed in range(4):
        models = Model(2, 3, seed=2 * seed), Model(2, 3, seed=2 * seed + 1)
        plans = Shipped(past_of(seed), PADDED, is_live=True)
        law, truth = joint_law(models, plans)
        distances.append(distance(law, truth))
    assert max(distances) > 0.01


def shipped_budget(past: np.ndarray) -> int:
    """Return what the engine's rule verifies of one request's next drafts."""
    gains = expected_gains(past[None, None], np.array([len(past)], dtype=np.int32))
    return choose_draft_budget(1, gains, np.array([1.0, 2.8, 2.8, 2.8]))


def law_of_two_rounds(model: Model, draws_afresh: bool) -> np.ndarray:
    """Verify one draft, then as many as the confidences of the first round pay for.

    Args:
        draws_afresh: whether a place that was drafted in the first round is drafted by
            other noise in the second.
    """
    law = np.zeros_like(model.truth)
    for drafts, weight in drafts_of(model, ()):
        budget = shipped_budget(confidences(model, (), drafts))
        for text, reached in verify(model, (), drafts, 1):
            redrafted = drafts[len(text) :]
            for again, weight_again in drafts_of(model, text):
                if not draws_afresh:
                    if again[: len(redrafted)] != redrafted:
                        continue
                    # What was drafted before is certain now.
                    for k, token in enumerate(redrafted):
                        weight_again /= model.draft(text + again[:k])[token]
                probability = weight * reached * weight_again
                law += probability * law_of_round(model, text, again, budget)
    return law


def test_a_budget_from_the_round_before_is_lossless_if_drafts_are_drawn_afresh():
    distances = []
    for seed in range(6):
        model = Model(2, 3, seed, horizon=5, is_blind=True)
        assert distance(law_of_two_rounds(model, True), model.truth) < EXACT
        distances.append(distance(law_of_two_rounds(model, False), model.truth))
    assert max(distances) > 0.05
