"""When a request ends, and why: decided token by token, up to the first reason."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}

# What the sampler gives for a row whose every logit is -inf.
NO_TOKEN = -1


class GrammarManager(Protocol):
    """What the scheduler asks of the structured output manager."""

    def grammar_bitmask(
        self,
        requests: dict[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> GrammarOutput | None:
        """Mask the constrained logit rows of a step."""

    def accept_tokens(self, request: Request, token_ids: list[int]) -> bool:
        """Advance the request's grammar; False if a token does not fit."""

    def takes_drafts(self, request: Request) -> bool:
        """Whether the request's grammar can look ahead over drafts."""

    def is_terminated(self, request: Request) -> bool:
        """Whether nothing can follow in the request's grammar."""

    def get_failure(self, request: Request) -> str | None:
        """Return why the request's grammar was given up, or None."""


class Commit(NamedTuple):
    """What became of the tokens that a request sampled in a step.

    Args:
        num_kept: the leading tokens that belong to the output.
        status: a finished one, or None if the request goes on.
        stop_reason: the stop token that ended it, unless it is the end of sequence.
        error: set with FINISHED_ERROR.
        error_parameter: the request's field that is to blame; None: the engine is.
    """

    num_kept: int
    status: RequestStatus | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_parameter: str | None = None


def decide_commit(
    request: Request,
    token_ids: Sequence[int],
    vocab_size: int,
    grammar_manager: GrammarManager,
) -> Commit:
    """Walk over sampled tokens up to the first reason to end.

    Only the grammar is advanced, by the tokens that are kept. It judges a token that
    ends the request as well: a grammar that was given up allows nothing else, and an
    unfinished text must not end as if it were complete.

    Args:
        token_ids: in order; several under speculation.
        vocab_size: ids at or above it cannot be tokens.
    """
    max_new_tokens = request.max_total_tokens - request.num_tokens
    if max_new_tokens <= 0:
        return Commit(0, RequestStatus.FINISHED_LENGTH_CAPPED)
    has_grammar = request.structured_output_request is not None
    for index, token_id in enumerate(token_ids):
        if token_id == NO_TOKEN:
            return _no_choice(request, index)
        if not 0 <= token_id < vocab_size:
            return _error(index, f"the model gave the invalid token id {token_id}")
        if has_grammar and not grammar_manager.accept_tokens(request, [token_id]):
            return _refused(
                request, index, token_id, grammar_manager.get_failure(request)
            )
        if _is_stop_token(request, token_id, request.num_output_tokens + index + 1):
            is_eos = token_id == request.sampling_params.eos_token_id
            reason = None if is_eos else token_id
            return Commit(index + 1, RequestStatus.FINISHED_STOPPED, reason)
        if has_grammar and grammar_manager.is_terminated(request):
            return Commit(index + 1, RequestStatus.FINISHED_STOPPED)
        if index + 1 == max_new_tokens:
            return Commit(index + 1, RequestStatus.FINISHED_LENGTH_CAPPED)
    return Commit(len(token_ids))


def _is_stop_token(request: Request, token_id: int, num_output_tokens: int) -> bool:
    params = request.sampling_params
    if num_output_tokens < params.min_tokens:
        return False
    if token_id == params.eos_token_id:
        # A stop token that the user names ends the request also with ignore_eos.
        return not params.ignore_eos or token_id in (params.stop_token_ids or ())
    return token_id in params.all_stop_token_ids


def _refused(
    request: Request, num_kept: int, token_id: int, failure: str | None
) -> Commit:
    constraint = request.sampling_params.structured_outputs
    # Without a failure the mask and the grammar disagree, and the engine is to blame.
    if failure is None or constraint is None:
        return _error(
            num_kept, f"the grammar does not allow the sampled token {token_id}"
        )
    num_tokens = request.num_output_tokens + num_kept
    return Commit(
        num_kept,
        RequestStatus.FINISHED_ERROR,
        error="the constraint cannot be enforced any further after "
        f"{num_tokens} tokens of output: {failure}",
        error_parameter=f"structured_outputs.{constraint.constraint}",
    )


def _no_choice(request: Request, num_kept: int) -> Commit:
    params = request.sampling_params
    constraints = {
        "structured_outputs": params.structured_outputs is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        # Stop tokens cannot come before min_tokens, nor before the grammar may end.
        "stop_token_ids": bool(params.stop_token_ids),
        "min_tokens": params.min_tokens > 0,
    }
    names = [name for name, is_set in constraints.items() if is_set]
    # One alone always leaves a token, so then the model or the grammar has failed.
    if len(names) < 2:
        return _error(num_kept, "the model gave no token that can be sampled")
    message = (
        f"no token satisfies {' and '.join(names)} together after "
        f"{request.num_output_tokens + num_kept} tokens of output"
    )
    return Commit(
        num_kept,
        RequestStatus.FINISHED_ERROR,
        error=message,
        error_parameter=names[-1],
    )


def _error(num_kept: int, message: str) -> Commit:
    return Commit(num_kept, RequestStatus.FINISHED_ERROR, error=message)
