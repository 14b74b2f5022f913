"""A request with n > 1: n sequences for the engine core, one answer for the caller."""

import msgspec

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.seeds import derive_seed
from vllm.v1.engine import EngineCoreRequest


class ParentRequest:
    """Splits a request and gathers what its children say, in the order of their index.

    Children have seeds derived from (seed, index); the child of index 0 keeps the seed
    itself, so that n = 1 and the first of n > 1 answers are the same.
    """

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.params = params
        self.child_request_ids = {
            f"{index}_{request_id}": index for index in range(params.n)
        }
        self.max_num_generation_tokens = 0
        self.num_cached_tokens = 0
        self._latest: dict[int, CompletionOutput] = {}
        self._num_unfinished = params.n

    @property
    def is_finished(self) -> bool:
        """Whether every child has ended."""
        return self._num_unfinished == 0

    def make_children(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """Return the n requests that `request`, with its n, stands for."""
        return [
            msgspec.structs.replace(
                request,
                request_id=child_id,
                sampling_params=self._child_params(request.sampling_params, index),
                parent_request_id=self.request_id,
            )
            for child_id, index in self.child_request_ids.items()
        ]

    def gather(
        self, output: CompletionOutput, num_generation_tokens: int
    ) -> list[CompletionOutput]:
        """Take a child's output; return what the caller may see now, maybe nothing.

        A delta is passed on as it is. Cumulative outputs show the latest state of every
        child that has one. Final outputs wait for the last child.

        Args:
            num_generation_tokens: of the child so far.
        """
        if output.finished():
            self._num_unfinished -= 1
            self.max_num_generation_tokens = max(
                self.max_num_generation_tokens, num_generation_tokens
            )
        if self.params.output_kind == RequestOutputKind.DELTA:
            return [output]
        self._latest[output.index] = output
        is_final_only = self.params.output_kind == RequestOutputKind.FINAL_ONLY
        if is_final_only and not self.is_finished:
            return []
        return [self._latest[index] for index in sorted(self._latest)]

    @staticmethod
    def _child_params(params: SamplingParams, index: int) -> SamplingParams:
        seed = None if params.seed is None else derive_seed(params.seed, index)
        # A shallow copy: the lists in it are only read.
        return msgspec.structs.replace(params, n=1, seed=seed)
