import pytest

from vllm.v1.spec_decode.trace import DraftTrace


@pytest.mark.parametrize(
    ("num_admitted", "num_allowed", "num_accepted", "fates"),
    [
        (4, 4, 4, "accepted accepted accepted accepted"),
        (4, 4, 1, "accepted rejected unreached unreached"),
        # What was not verified was not rejected.
        (2, 4, 0, "rejected unreached trimmed trimmed"),
        (0, 4, 0, "trimmed trimmed trimmed trimmed"),
        # The grammar, not the model, has refused the second one.
        (4, 1, 1, "accepted masked masked masked"),
        (3, 2, 1, "accepted rejected masked masked"),
        # It would have refused them also if they had been verified.
        (0, 2, 0, "trimmed trimmed masked masked"),
        (1, 3, 0, "rejected trimmed trimmed masked"),
    ],
)
def test_every_draft_has_the_fate_that_decided_about_it(
    num_admitted, num_allowed, num_accepted, fates
):
    trace = DraftTrace([5, 6, 7, 8], num_admitted, num_allowed, num_accepted)
    assert " ".join(trace.fates()) == fates
