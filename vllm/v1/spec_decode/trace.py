"""What became of each single draft of a step, for whoever wants to see it."""

import enum

import msgspec


class DraftFate(enum.StrEnum):
    """The end of a draft.

    A draft is UNREACHED if it was verified behind one that was not accepted: nobody
    knows what would have become of it. One that the grammar forbids is MASKED, verified
    or not: the counts leave it out.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNREACHED = "unreached"
    TRIMMED = "trimmed"
    MASKED = "masked"


class DraftTrace(msgspec.Struct, array_like=True):
    """The drafts of one request in one step.

    Args:
        token_ids: in order.
        num_admitted: leading ones that the budget had room for; the rest is trimmed.
        num_allowed: leading ones that the grammar allows; all without a grammar.
        num_accepted: leading ones that became output.
        survivals: the predicted probability that a draft and those before it are
            accepted; empty if nobody predicted.
    """

    token_ids: list[int]
    num_admitted: int
    num_allowed: int
    num_accepted: int
    survivals: list[float] = []

    def fates(self) -> list[DraftFate]:
        """Return the end of each draft."""
        return [self._fate(place) for place in range(len(self.token_ids))]

    def _fate(self, place: int) -> DraftFate:
        if place < self.num_accepted:
            return DraftFate.ACCEPTED
        if place >= self.num_allowed:
            return DraftFate.MASKED
        if place >= self.num_admitted:
            return DraftFate.TRIMMED
        if place == self.num_accepted:
            return DraftFate.REJECTED
        return DraftFate.UNREACHED
