import math

import pytest

from vllm.v1.worker.gpu.spec_decode.drafting_switch import DraftingSwitch


def decide(switch, speedup, num_steps):
    return [switch.decide(speedup) for _ in range(num_steps)]


@pytest.mark.parametrize(("speedup", "num_steps"), [(0.25, 0), (0.75, 1), (0.9375, 7)])
def test_drafting_stops_when_half_a_step_is_lost(speedup, num_steps):
    decisions = decide(DraftingSwitch(), speedup, num_steps + 2)
    assert decisions == [True] * num_steps + [False] * 2


def test_an_odd_step_that_is_made_up_for_does_not_stop_drafting():
    switch = DraftingSwitch()
    for _ in range(20):
        assert decide(switch, 1.25, 2) == [True, True]
        assert switch.decide(0.625)


def test_small_gains_do_not_hide_larger_losses():
    switch = DraftingSwitch()
    decisions = [switch.decide(speedup) for speedup in [0.875, 1.0625] * 20]
    # From then on it drafts where it gains, and stops where it loses.
    assert decisions == [True] * 12 + [False, True] * 14


def test_gains_of_long_ago_make_nobody_more_patient():
    switch = DraftingSwitch()
    decide(switch, 1.25, 50)
    assert decide(switch, 0.75, 2) == [True, False]


def test_what_neither_wins_nor_loses_goes_on_as_it_is():
    drafting, pausing = DraftingSwitch(), DraftingSwitch()
    decide(pausing, 0.75, 4)
    for _ in range(15):
        assert decide(drafting, 1.0, 2) == [True, True]
        assert decide(pausing, 1.0, 2) == [False, False]


def test_drafting_is_tried_ever_more_rarely():
    decisions = decide(DraftingSwitch(), 0.75, 3000)
    tries = [step for step, drafts in enumerate(decisions) if drafts and step >= 1]
    pauses = [b - a - 1 for a, b in zip([0, *tries], tries, strict=False)]
    assert pauses == [64, 128, 256, 512, 512, 512, 512]


def test_patience_comes_back_by_what_is_won():
    switch = DraftingSwitch()
    assert not decide(switch, 0.75, 60)[-1]
    assert switch.decide(1.25)
    assert decide(switch, 0.75, 2) == [False, False]
    # As patient as at first, and as long until it is tried again.
    assert decide(switch, 1.25, 2) == [True, True]
    decisions = decide(switch, 0.75, 1 + 65)
    assert decisions == [True] + [False] * 64 + [True]


def test_steps_without_a_decision_lose_what_the_last_one_lost():
    switch = DraftingSwitch()
    assert switch.decide(0.875)
    switch.go_on()
    assert switch.num_harmless_steps == 2
    switch.go_on()
    assert not switch.decide(0.875)


def test_nothing_is_lost_in_a_pause():
    switch = DraftingSwitch()
    decide(switch, 0.75, 9)
    while switch.pass_over():
        pass
    # Not for the steps of the pause, too.
    assert switch.decide(1.0625)
    assert not switch.decide(0.9375)


def test_patience_has_room_for_so_many_steps():
    switch = DraftingSwitch()
    assert math.isinf(switch.num_harmless_steps)
    switch.decide(0.875)
    assert switch.num_harmless_steps == 3
    switch.decide(1.0625)
    assert math.isinf(switch.num_harmless_steps)
    switch.decide(0.6875)
    assert switch.num_harmless_steps < 1


def test_a_larger_batch_starts_with_what_a_smaller_one_has_lost():
    few = DraftingSwitch()
    decide(few, 0.875, 1)
    assert decide(few.make_for_larger_batch(), 0.875, 3) == [True, True, False]
    decide(few, 0.75, 9)
    # The pause is a new one.
    many = few.make_for_larger_batch()
    assert decide(many, 0.75, 66) == [False] * 64 + [True, False]
    assert decide(few, 1.25, 2) == [True, True]
    assert decide(few.make_for_larger_batch(), 0.75, 2) == [True, False]


def test_the_drafts_of_a_try_are_known_when_they_can_be_verified():
    switch = DraftingSwitch()
    seen = []
    for _ in range(70):
        seen.append((switch.is_testing, switch.decide(0.75)))
    assert [step for step, (testing, _) in enumerate(seen) if testing] == [66]
    assert [step for step, (_, drafts) in enumerate(seen[1:], 1) if drafts] == [65]


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
