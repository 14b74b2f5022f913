"""Sampling under drafts: every token by the request's rules, and by its law."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.test_feature_matrix import FEATURES, make_request
from tests.v1.e2e.tiny_drafter import KINDS, check_regimes, make_drafting_engine
from tests.v1.e2e.tiny_engine import NAN_ID, TinyEngine, save_tiny_model, visible
from tests.v1.engine.fakes import make_tokenizer
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

PROMPT = "how it goes on"
ALPHABET = "abcdefghijklmnop"
LETTER_IDS = [make_tokenizer().token_to_id(char) for char in ALPHABET]
NEVER_NAN = {NAN_ID: -100.0}
Request = tuple[Any, SamplingParams]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of few characters, which drafters often meet."""
    return save_tiny_model(tmp_path_factory.mktemp("writer"), alphabet=ALPHABET)


def drafting(drafter: str, model: Path, folder: Path, **kwargs: Any) -> TinyEngine:
    return make_drafting_engine(drafter, model, folder, ALPHABET, **kwargs)


def run(engine: TinyEngine, requests: list[Request]) -> list[RequestOutput]:
    """Run the requests on an engine, to its end."""
    outputs = engine.run(requests)
    engine.shutdown()
    return outputs


@bit_for_bit
def test_a_greedy_text_is_the_same_wherever_a_draft_is_refused(
    model: Path, tmp_path: Path
):
    params = SamplingParams(temperature=0.0, max_tokens=30, logit_bias=NEVER_NAN)
    requests = [(f"{PROMPT} {number}", params) for number in range(16)]
    expected = run(TinyEngine(model), requests)
    engine = drafting("M", model, tmp_path)
    outputs = engine.run(requests)
    # Refused at each of the five places, and not at all.
    assert set(engine.executor.accepted) == set(range(6))
    engine.shutdown()
    assert list(map(visible, outputs)) == list(map(visible, expected))


HOT = 2.0
FEW = list(range(60, 75))
Scores = dict[int, float]


def chances(scores: Scores) -> dict[int, float]:
    total = sum(math.exp(score / HOT) for score in scores.values())
    return {one: math.exp(score / HOT) / total for one, score in scores.items()}


def is_within_top_p(scores: Scores, token_id: int) -> bool:
    probs = chances(scores)
    return sum(prob for prob in probs.values() if prob > probs[token_id]) < 0.5


# Name -> (parameters, whether a token may come where the model has these scores).
RULES: dict[str, tuple[dict[str, Any], Callable[[Scores, int], bool]]] = {
    "top_k": (
        {"top_k": 3},
        lambda scores, one: sum(s > scores[one] for s in scores.values()) < 3,
    ),
    "top_p": ({"top_p": 0.5}, is_within_top_p),
    "min_p": (
        {"min_p": 0.3},
        lambda scores, one: scores[one] >= max(scores.values()) + HOT * math.log(0.299),
    ),
    "allowed": ({"allowed_token_ids": FEW}, lambda _, one: one in FEW),
    "bias": (
        {"logit_bias": dict.fromkeys(FEW, -100.0) | NEVER_NAN},
        lambda _, one: one not in FEW,
    ),
    "bad words": (
        {"bad_words": list(ALPHABET[:8])},
        lambda _, one: one not in LETTER_IDS[:8],
    ),
    "min tokens": (
        {"min_tokens": 12, "stop_token_ids": LETTER_IDS[:8]},
        lambda _, one: one not in LETTER_IDS[:8],
    ),
}


@pytest.mark.parametrize("drafter", KINDS)
def test_no_token_of_an_unseeded_answer_breaks_its_requests_rules(
    model: Path, tmp_path: Path, drafter: str
):
    """Filters, masks and bans hold at every place, the drafts' own and the bonus."""
    common = {"temperature": HOT, "max_tokens": 12, "logprobs": -1}
    requests = [
        (PROMPT, SamplingParams(**({"logit_bias": NEVER_NAN} | common | params)))
        for params, _ in RULES.values()
        for _ in range(6)
    ]
    engine = drafting(drafter, model, tmp_path, seed=1)
    outputs = iter(engine.run(requests))
    assert engine.executor.accepted
    check_regimes(engine)
    engine.shutdown()
    for name, (_, may_come) in RULES.items():
        for output in itertools.islice(outputs, 6):
            [answer] = output.outputs
            for token_id, column in zip(answer.token_ids, answer.logprobs, strict=True):
                scores = {one: entry.logprob for one, entry in column.items()}
                assert may_come(scores, token_id), name


# What shapes the next token of a text, however it was drafted.
SHAPED = [
    name
    for name, params in FEATURES.items()
    if "seed" in params and params.get("n", 1) == 1 and params.get("logprobs") != -1
]


def make_unseeded(name: str) -> Request:
    prompt, params = make_request(name)
    params = params.clone()
    params.seed = params.logprob_token_ids = None
    params.logit_bias = NEVER_NAN | (params.logit_bias or {})
    params.logprobs = 2
    return prompt, params


@bit_for_bit
@pytest.mark.parametrize("drafter", KINDS)
def test_a_new_score_of_an_unseeded_answer_agrees_with_it(
    model: Path, tmp_path: Path, drafter: str
):
    """O2: raw scores are the model's own, whatever has shaped and drafted the text."""
    requests = [make_unseeded(name) for name in SHAPED]
    outputs = run(drafting(drafter, model, tmp_path, seed=1), requests)
    scored = run(
        TinyEngine(model),
        [
            (
                [*output.prompt_token_ids, *output.outputs[0].token_ids],
                SamplingParams(max_tokens=0, prompt_logprobs=2),
            )
            for output in outputs
        ],
    )
    for output, again in zip(outputs, scored, strict=True):
        [answer] = output.outputs
        given = [
            {token_id: (one.logprob, one.rank) for token_id, one in column.items()}
            for column in answer.logprobs
        ]
        expected = [
            {token_id: (one.logprob, one.rank) for token_id, one in column.items()}
            for column in again.prompt_logprobs[-len(given) :]
        ]
        assert given == expected


@bit_for_bit
@pytest.mark.parametrize(
    "drafter", ["ngram", "H", "H probabilistic", "M", "ngram adaptive"]
)
def test_logprobs_take_nothing_from_the_drafts(
    model: Path, tmp_path: Path, drafter: str
):
    counts, texts = [], []
    for logprobs in (None, 3):
        params = SamplingParams(
            seed=1, max_tokens=24, logprobs=logprobs, logit_bias=NEVER_NAN
        )
        engine = drafting(drafter, model, tmp_path)
        outputs = engine.run([(PROMPT * 3, params)] * 4)
        counts.append(engine.executor.accepted)
        texts.append([output.outputs[0].text for output in outputs])
        engine.shutdown()
    assert texts[0] == texts[1]
    assert counts[0] == counts[1]
    assert sum(accepted * count for accepted, count in counts[0].items()) > 0


@bit_for_bit
@pytest.mark.parametrize("drafter", KINDS)
def test_a_seed_holds_alone_again_and_among_any_neighbours(
    model: Path, tmp_path: Path, drafter: str
):
    """Also whatever number of drafts the request gets."""
    common = {"max_tokens": 16, "logit_bias": NEVER_NAN}
    seeded = [SamplingParams(seed=seed, **common) for seed in range(6)]
    capped = [params.clone() for params in seeded for _ in range(3)]
    for index, params in enumerate(capped):
        params.num_speculative_tokens = index % 3
    unseeded = [SamplingParams(temperature=0.05, **common)] * 6
    greedy = SamplingParams(temperature=0.0, **common)
    [*expected, most_likely] = run(
        TinyEngine(model, max_num_seqs=1),
        [(PROMPT, params) for params in (*seeded, greedy)],
    )
    texts = [output.outputs[0].text for output in expected]
    assert len(set(texts)) == len(texts)
    engine = drafting(drafter, model, tmp_path)
    alone = [engine.run([(PROMPT, params)])[0] for params in seeded]
    together = engine.run(
        [(PROMPT, params) for params in (*seeded, *unseeded, *capped)]
    )
    check_regimes(engine)
    engine.shutdown()
    assert [output.outputs[0].text for output in alone] == texts
    mixed = [output.outputs[0].text for output in together]
    assert mixed[:6] == texts
    assert mixed[12:] == [text for text in texts for _ in range(3)]
    # So cold that the most likely token is nearly always drawn.
    begin = most_likely.outputs[0].text[:4]
    assert sum(text.startswith(begin) for text in mixed[6:12]) >= 3


@pytest.mark.parametrize("drafter", [None, *KINDS])
def test_a_bias_of_a_hundred_leaves_one_token(
    model: Path, tmp_path: Path, drafter: str | None
):
    token_id = make_tokenizer().token_to_id("k")
    requests = [
        (PROMPT, SamplingParams(max_tokens=12, logit_bias={token_id: 100}, **sampled))
        for sampled in ({"temperature": 0.0}, {"seed": 1}, {})
    ]
    engine = drafting(drafter, model, tmp_path) if drafter else TinyEngine(model)
    outputs = run(engine, requests)
    assert [output.outputs[0].text for output in outputs] == ["k" * 12] * 3


def repeats_itself(text: str) -> bool:
    return any(text.endswith(text[-size:] * 3) for size in range(1, 9))


@bit_for_bit
@pytest.mark.parametrize("drafter", KINDS)
def test_a_penalty_breaks_a_loop(model: Path, tmp_path: Path, drafter: str):
    common = {"temperature": 0.0, "max_tokens": 24}
    looping = ("abab" * 5, SamplingParams(**common))
    penalties = [
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
    ]
    broken = [("abab" * 5, SamplingParams(**common, **one)) for one in penalties]
    expected = run(TinyEngine(model, max_num_seqs=1), [looping, *broken])
    outputs = run(drafting(drafter, model, tmp_path), [looping, *broken])
    assert list(map(visible, outputs)) == list(map(visible, expected))
    texts = [output.outputs[0].text for output in outputs]
    assert repeats_itself(texts[0])
    assert len(set(texts)) == 4


# The law of unseeded answers of few tokens.

LETTERS = "ijklmnop"
CHOICES = [make_tokenizer().token_to_id(char) for char in LETTERS]
# N-grams find most pairs of letters in it.
LETTER_PROMPT = "ijkponmlkjiijklmno"
NUM_DRAWN = 4
Law = dict[tuple[int, ...], float]
NUM_ANSWERS = 2000
LAWFUL: dict[str, Any] = {
    "allowed_token_ids": CHOICES,
    "temperature": 2.0,
    "top_p": 0.98,
    # The text before counts as well: an answer's beginning may stand in the prompt.
    "repetition_penalty": 1.2,
}


def compute_law(model: Path) -> Law:
    """Return the chance of every answer, by the scores of one token after another."""
    prompt = make_tokenizer().encode(LETTER_PROMPT).ids
    engine = TinyEngine(model, logprobs_mode="processed_logprobs")
    params = SamplingParams(max_tokens=1, logprobs=len(CHOICES), **LAWFUL)
    law: Law = {(): 1.0}
    for _ in range(NUM_DRAWN):
        outputs = engine.run([([*prompt, *answer], params) for answer in law])
        law = {
            (*answer, token_id): chance * math.exp(score.logprob)
            for (answer, chance), output in zip(law.items(), outputs, strict=True)
            for token_id, score in output.outputs[0].logprobs[0].items()
            if token_id in CHOICES
        }
    engine.shutdown()
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-4)
    return law


@pytest.fixture(scope="module")
def lawful(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Law]:
    """A model of a few letters, and the chance of each of its answers."""
    model = save_tiny_model(tmp_path_factory.mktemp("lawful"), alphabet=LETTERS)
    return model, compute_law(model)


def count_sigmas(counts: Counter[Any], law: dict[Any, float], num_draws: int) -> float:
    """Return how far counts are from a law, by chi-square; rare outcomes are one."""
    common = {outcome for outcome, chance in law.items() if chance * num_draws >= 5}
    assert len(common) > 15, "the law has too few outcomes to be told from another"
    rare_chance = 1 - sum(law[outcome] for outcome in common)
    num_rare = sum(count for outcome, count in counts.items() if outcome not in common)
    pairs = [(counts[outcome], law[outcome] * num_draws) for outcome in common]
    if rare_chance * num_draws >= 1:
        pairs.append((num_rare, rare_chance * num_draws))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    return (statistic - len(pairs)) / math.sqrt(2 * len(pairs))


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram",
        "H",
        "H probabilistic",
        "M probabilistic",
        "dspark probabilistic",
        "H probabilistic adaptive",
    ],
)
def test_unseeded_answers_follow_the_models_law(
    lawful: tuple[Path, Law], tmp_path: Path, drafter: str
):
    model, law = lawful
    engine = make_drafting_engine(drafter, model, tmp_path, LETTERS, seed=1)
    params = SamplingParams(max_tokens=NUM_DRAWN, ignore_eos=True, **LAWFUL)
    outputs = engine.run([(LETTER_PROMPT, params)] * NUM_ANSWERS)
    accepted = engine.executor.accepted
    check_regimes(engine)
    engine.shutdown()
    # Drafts are accepted, and others are refused.
    assert min(accepted[0], sum(accepted.values()) - accepted[0]) > NUM_ANSWERS / 20
    counts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    assert count_sigmas(counts, law, NUM_ANSWERS) < 10
