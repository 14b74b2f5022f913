"""Steps without drafts in the midst of steps with drafts: when, and how often."""

from vllm.v1.worker.gpu.spec_decode.plain_steps import PlainStepProbe


def run(probe: PlainStepProbe, speedup: float, num_steps: int) -> list[int]:
    """Return which of these steps were plain ones."""
    plain = []
    for step in range(num_steps):
        if probe.take_turn(speedup):
            plain.append(step)
        else:
            probe.go_on()
    return plain


def test_plain_steps_become_ever_rarer():
    plain = run(PlainStepProbe(), 1.1, 700)
    gaps = [b - a - 1 for a, b in zip([-1, *plain], plain, strict=False)]
    # Three in a row.
    assert gaps[::3] == [8, 16, 32, 64, 128, 128, 128, 128]
    assert gaps[1::3] == gaps[2::3] == [0] * 8


def test_where_drafts_win_much_no_step_is_plain():
    probe = PlainStepProbe()
    assert run(probe, 1.3, 500) == []
    assert probe.take_turn(1.2)


def test_a_plain_step_that_was_made_anyway_counts():
    probe = PlainStepProbe()
    assert run(probe, 1.1, 8) == []
    probe.restart()
    assert run(probe, 1.1, 10) == [8, 9]
    probe.restart()
    assert run(probe, 1.1, 16) == []
