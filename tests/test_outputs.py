from vllm.outputs import SpecDecodeMetrics


def observe(*steps: tuple[int, int], is_detailed: bool = False) -> SpecDecodeMetrics:
    metrics = SpecDecodeMetrics.make(3, is_detailed=is_detailed)
    for num_verified, num_accepted in steps:
        metrics.observe(num_verified, num_accepted)
    return metrics


STEPS = ((3, 3), (3, 0), (3, 1), (1, 1), (3, 1), (0, 0))


def test_steps_are_counted_by_verified_and_by_accepted_drafts():
    metrics = observe(*STEPS)
    assert metrics.acceptance_histogram_by_draft_length == {
        0: [1],
        1: [0, 1],
        3: [1, 2, 0, 1],
    }
    assert metrics.acceptance_histogram == [2, 3, 0, 1]


def test_sums_and_means_follow_from_the_histograms():
    metrics = observe(*STEPS)
    assert metrics.num_spec_steps == 6
    assert metrics.num_draft_tokens == 13
    assert metrics.num_accepted_draft_tokens == 6
    assert metrics.mean_acceptance_length == 2.0
    assert metrics.draft_acceptance_rate == 6 / 13


def test_only_detailed_metrics_keep_each_step():
    detailed = observe(*STEPS, is_detailed=True)
    assert detailed.per_step_drafted == [3, 3, 3, 1, 3, 0]
    assert detailed.per_step_accepted == [3, 0, 1, 1, 1, 0]
    summary = observe(*STEPS)
    assert (summary.per_step_drafted, summary.per_step_accepted) == (None, None)


def test_without_steps_every_number_is_that_of_plain_decoding():
    metrics = observe()
    assert metrics.acceptance_histogram == [0, 0, 0, 0]
    assert metrics.acceptance_histogram_by_draft_length == {}
    assert (metrics.num_spec_steps, metrics.num_draft_tokens) == (0, 0)
    assert metrics.mean_acceptance_length == 1.0
    assert metrics.draft_acceptance_rate == 0.0


def test_steps_that_verify_nothing_give_one_token_each():
    metrics = observe((0, 0), (0, 0))
    assert metrics.num_spec_steps == 2
    assert metrics.mean_acceptance_length == 1.0
    assert metrics.draft_acceptance_rate == 0.0
