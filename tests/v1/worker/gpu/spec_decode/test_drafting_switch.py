from vllm.v1.worker.gpu.spec_decode.drafting_switch import DraftingSwitch


def decide(switch, pays, num_steps):
    return [switch.decide(pays) for _ in range(num_steps)]


def test_an_odd_step_does_not_stop_drafting():
    switch = DraftingSwitch()
    for _ in range(20):
        assert decide(switch, False, 8) == [True] * 8
        assert switch.decide(True)


def test_drafting_stops_when_it_does_not_pay_for_long_and_is_tried_ever_more_rarely():
    switch = DraftingSwitch()
    decisions = decide(switch, False, 3000)
    assert decisions[:9] == [True] * 8 + [False]
    tries = [step for step, drafts in enumerate(decisions) if drafts and step >= 8]
    pauses = [b - a - 1 for a, b in zip([7, *tries], tries, strict=False)]
    assert pauses == [32, 64, 128, 256, 512, 512, 512, 512]


def test_drafting_goes_on_at_once_when_it_pays():
    switch = DraftingSwitch()
    assert not decide(switch, False, 30)[-1]
    assert switch.decide(True)
    # As patient as at first, and as quick to try again.
    decisions = decide(switch, False, 8 + 33)
    assert decisions == [True] * 8 + [False] * 32 + [True]


def test_the_drafts_of_a_try_are_known_when_they_can_be_verified():
    switch = DraftingSwitch()
    seen = []
    for _ in range(45):
        seen.append((switch.is_testing, switch.decide(False)))
    assert [step for step, (testing, _) in enumerate(seen) if testing] == [41]
    assert [step for step, (_, drafts) in enumerate(seen[8:], 8) if drafts] == [40]
