"""Where the outputs of one request wait for the caller."""

import asyncio

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind


class RequestOutputCollector:
    """A queue of one place: what a slow caller has not fetched is merged.

    Deltas are joined, so that nothing is lost; of cumulative outputs only the latest
    counts. All methods but `get` return at once; use it from one event loop.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._is_delta = output_kind == RequestOutputKind.DELTA
        self._output: RequestOutput | Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the request."""
        waiting = self._output
        if isinstance(waiting, Exception):
            return
        if (
            self._is_delta
            and isinstance(waiting, RequestOutput)
            and isinstance(output, RequestOutput)
        ):
            merge_deltas(waiting, output)
        else:
            self._output = output
        self._ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """Return the waiting output, or None.

        Raises:
            Exception: the error that was put.
        """
        output = self._output
        if output is None:
            return None
        self._output = None
        self._ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> RequestOutput:
        """Wait for an output and return it.

        Raises:
            Exception: the error that was put.
        """
        while True:
            output = self.get_nowait()
            if output is not None:
                return output
            await self._ready.wait()


def merge_deltas(first: RequestOutput, second: RequestOutput) -> None:
    """Append to `first` what `second` adds, keeping the answers in index order."""
    first.finished = second.finished
    first.metrics = second.metrics
    first.num_cached_tokens = second.num_cached_tokens
    if second.prompt_logprobs is not None:
        first.prompt_logprobs = second.prompt_logprobs
    by_index = {output.index: output for output in first.outputs}
    for output in second.outputs:
        if output.index in by_index:
            _append_delta(by_index[output.index], output)
        else:
            by_index[output.index] = output
    first.outputs = [by_index[index] for index in sorted(by_index)]


def _append_delta(first: CompletionOutput, second: CompletionOutput) -> None:
    first.text += second.text
    first.token_ids.extend(second.token_ids)
    if second.logprobs:
        first.logprobs = [*(first.logprobs or ()), *second.logprobs]
    first.cumulative_logprob = second.cumulative_logprob
    first.finish_reason = second.finish_reason
    first.stop_reason = second.stop_reason
    first.spec_decode_metrics = second.spec_decode_metrics
