"""Long proposals in the midst of short ones: when."""

from vllm.v1.worker.gpu.spec_decode.long_look import LongLook


def test_the_first_look_is_free():
    look = LongLook()
    assert look.take_turn(1000.0)
    assert not look.take_turn(0.1)


def test_a_look_is_paid_for_by_a_hundredth_of_the_time():
    look = LongLook()
    look.take_turn(0.0)
    num_steps = 0
    while not look.take_turn(3.0):
        look.save(10.0)
        num_steps += 1
    assert num_steps in (30, 31)
    # What it cost is spent.
    assert not look.take_turn(0.1)
