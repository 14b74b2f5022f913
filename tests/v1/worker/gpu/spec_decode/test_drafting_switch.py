import pytest

from vllm.v1.worker.gpu.spec_decode.drafting_switch import DraftingSwitch


def decide(switch, speedup, num_steps):
    return [switch.decide(speedup) for _ in range(num_steps)]


def test_an_odd_step_does_not_stop_drafting():
    switch = DraftingSwitch()
    for _ in range(20):
        assert switch.decide(0.25)
        assert switch.decide(1.25)


@pytest.mark.parametrize(("speedup", "num_steps"), [(0.25, 1), (0.75, 2), (0.9375, 8)])
def test_half_a_step_may_be_lost(speedup, num_steps):
    decisions = decide(DraftingSwitch(), speedup, num_steps + 1)
    assert decisions == [True] * num_steps + [False]


def test_drafting_is_tried_ever_more_rarely():
    decisions = decide(DraftingSwitch(), 0.75, 3000)
    tries = [step for step, drafts in enumerate(decisions) if drafts and step >= 2]
    pauses = [b - a - 1 for a, b in zip([1, *tries], tries, strict=False)]
    assert pauses == [64, 128, 256, 512, 512, 512, 512]


def test_drafting_goes_on_at_once_when_it_pays():
    switch = DraftingSwitch()
    assert not decide(switch, 0.75, 80)[-1]
    assert switch.decide(1.25)
    # As patient as at first, and as quick to try again.
    decisions = decide(switch, 0.75, 2 + 65)
    assert decisions == [True] * 2 + [False] * 64 + [True]


def test_the_drafts_of_a_try_are_known_when_they_can_be_verified():
    switch = DraftingSwitch()
    seen = []
    for _ in range(70):
        seen.append((switch.is_testing, switch.decide(0.75)))
    assert [step for step, (testing, _) in enumerate(seen) if testing] == [67]
    assert [step for step, (_, drafts) in enumerate(seen[2:], 2) if drafts] == [66]


def test_steps_that_are_passed_over_count_as_steps_of_the_pause():
    switch, expected = DraftingSwitch(), decide(DraftingSwitch(), 0.75, 700)
    decisions, num_looks = [], 0
    for _ in range(700):
        is_passed = switch.pass_over()
        num_looks += not is_passed
        decisions.append(not is_passed and switch.decide(0.75))
    assert decisions == expected
    assert num_looks < 700 / 6


def test_nothing_is_passed_over_while_drafting():
    switch = DraftingSwitch()
    for _ in range(20):
        assert not switch.pass_over()
        assert switch.decide(1.25)


def test_a_pause_is_looked_at_within_eight_steps():
    switch = DraftingSwitch()
    decide(switch, 0.75, 20)
    passed = [switch.pass_over() or switch.decide(1.25) for _ in range(8)]
    assert all(passed)
    assert not switch.pass_over()
