"""The manager of grammars: compiles them aside and masks what the model may say."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.backend_types import (
    EmptyGrammarError,
    GrammarError,
    StructuredOutputBackend,
    Vocabulary,
    is_library_failure,
    num_mask_words,
)
from vllm.v1.structured_output.compile_pool import (
    CompileBusyError,
    CompilePool,
    CompileTimeoutError,
)
from vllm.v1.structured_output.grammar_cache import GrammarCache
from vllm.v1.structured_output.grammar_spec import GrammarSpec, resolve_spec
from vllm.v1.structured_output.request import StructuredOutputRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.transformers_utils.tokenizer import Tokenizer
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import FillJob
    from vllm.v1.structured_output.grammar_cache import Entry

logger = init_logger(__name__)

NUM_COMPILE_THREADS = 2
# Grammars that do not end, beside which others are still compiled.
NUM_SPARE_THREADS = 6

T = TypeVar("T")


class StructuredOutputManager:
    """Owns the backends, the compile threads and the cache of one engine.

    Args:
        vllm_config: of the engine.
        tokenizer: the model's, or a function that loads it when it is first needed.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        tokenizer: "Tokenizer | Callable[[], Tokenizer]",
    ) -> None:
        self._config = vllm_config.structured_outputs_config
        self._vocab_size = vllm_config.model_config.vocab_size
        self._tokenizer = tokenizer
        self._pool = CompilePool(
            NUM_COMPILE_THREADS, envs.VLLM_GRAMMAR_COMPILE_TIMEOUT, NUM_SPARE_THREADS
        )
        self._cache = GrammarCache(
            envs.VLLM_GRAMMAR_CACHE_ENTRIES, envs.VLLM_GRAMMAR_CACHE_BYTES
        )
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, StructuredOutputBackend] = {}
        self._backends_lock = threading.Lock()

    def warm_up(self) -> None:
        """Read the vocabulary on a compile thread, before a request needs it."""
        name = "xgrammar" if self._config.backend == "xgrammar" else "guidance"
        self._pool.submit(lambda: self._get_backend(name)).add_done_callback(
            _log_warm_up
        )

    def grammar_init(
        self, request: "Request", on_done: Callable[[], None] | None = None
    ) -> None:
        """Start to compile a request's grammar; a request without one is left alone.

        Args:
            request: gets a `structured_output_request`, which soon holds either the
                grammar or the error.
            on_done: called on a compile thread when it does.
        """
        params = request.sampling_params.structured_outputs
        if params is None:
            return
        state = StructuredOutputRequest(params)
        request.structured_output_request = state
        stop_token_ids = tuple(request.sampling_params.all_stop_token_ids)

        def fail(error: BaseException) -> None:
            state.error = _describe(error, params.constraint)
            if on_done is not None:
                on_done()

        def deliver(entry: "Entry") -> None:
            grammar = entry[1].create_grammar(stop_token_ids)
            # The scheduler looks at the grammar only, so it comes last.
            state.backend, state.grammar = entry[0], grammar
            if on_done is not None:
                on_done()

        def compile_checked(spec: GrammarSpec) -> None:
            _pass_on(self._compile_once(spec), deliver, fail)

        try:
            check = self._pool.submit(lambda: resolve_spec(params, self._config))
        except CompileBusyError as error:
            fail(error)
            return
        _pass_on(check, compile_checked, fail)

    def grammar_bitmask(
        self,
        requests: Mapping[str, "Request"],
        structured_output_request_ids: Sequence[str],
        scheduled_spec_decode_tokens: Mapping[str, Sequence[int]],
    ) -> GrammarOutput | None:
        """Mask the step's constrained rows, in the scheduled layout.

        Args:
            requests: every request of the engine, by id.
            structured_output_request_ids: those that sample in this step under a
                grammar; they own neighbouring rows in this order.
            scheduled_spec_decode_tokens: the drafts of the step; -1 is a draft whose
                id is not known here.

        Returns:
            One row for each scheduled draft and one bonus row a request, or None if
            nothing is constrained.
        """
        if not structured_output_request_ids:
            return None
        num_words = num_mask_words(self._vocab_size)
        drafts = [
            scheduled_spec_decode_tokens.get(req_id, ())
            for req_id in structured_output_request_ids
        ]
        first_rows = np.cumsum([0] + [len(ids) + 1 for ids in drafts]).tolist()
        bitmask = np.empty((first_rows[-1], num_words), dtype=np.int32)
        num_acceptable = [0] * len(drafts)
        jobs: dict[StructuredOutputBackend, list[tuple[int, FillJob]]] = {}
        for index, req_id in enumerate(structured_output_request_ids):
            state = requests[req_id].structured_output_request
            assert state is not None, f"request {req_id} has no grammar"
            assert state.grammar is not None, f"grammar of {req_id} is not compiled"
            assert state.backend is not None, f"grammar of {req_id} has no backend"
            ids = drafts[index]
            if not state.grammar.takes_drafts:
                # Decided before the step: within it, what is scheduled is looked over.
                ids = [-1] * len(ids)
            job = (state.grammar, first_rows[index], ids)
            jobs.setdefault(state.backend, []).append((index, job))
        for backend, indexed_jobs in jobs.items():
            filled = backend.fill_bitmasks([job for _, job in indexed_jobs], bitmask)
            for (index, _), num_valid in zip(indexed_jobs, filled, strict=True):
                num_acceptable[index] = num_valid
        return GrammarOutput(
            list(structured_output_request_ids),
            bitmask,
            num_acceptable if any(drafts) else None,
        )

    def accept_tokens(self, request: "Request", token_ids: Sequence[int]) -> bool:
        """Advance a request's grammar over committed tokens, up to its end.

        Returns:
            False if a token does not fit: the request must then be failed. The mask
            makes that impossible unless the library gave up, see `get_failure`.
        """
        state = request.structured_output_request
        if state is None or state.grammar is None:
            return True
        if state.grammar.accept_tokens(token_ids):
            return True
        if state.grammar.failure is None:
            logger.error("Request %s lost its grammar", request.request_id)
        return False

    def get_failure(self, request: "Request") -> str | None:
        """Return why a library gave up on a request's constraint, or None."""
        state = request.structured_output_request
        return None if state is None or state.grammar is None else state.grammar.failure

    def takes_drafts(self, request: "Request") -> bool:
        """Whether the drafts of a request can be verified.

        They count as unknown where this is False, and so as refused.
        """
        state = request.structured_output_request
        return state is None or state.grammar is None or state.grammar.takes_drafts

    def is_terminated(self, request: "Request") -> bool:
        """Whether a request's text is complete and nothing can follow it."""
        state = request.structured_output_request
        return (
            state is not None
            and state.grammar is not None
            and state.grammar.is_terminated()
        )

    def validate_tokens(
        self, request: "Request", draft_token_ids: Sequence[int]
    ) -> list[int]:
        """Return the leading drafts that the grammar allows; nothing advances."""
        state = request.structured_output_request
        if state is None or state.grammar is None:
            return list(draft_token_ids)
        return state.grammar.validate_tokens(draft_token_ids)

    def shutdown(self) -> None:
        """Let the compile threads end."""
        self._pool.shutdown()

    def _compile_once(self, spec: GrammarSpec) -> "Future[Entry]":
        """Compile on a pool thread, unless that was or is being done already."""
        return self._cache.get_or_submit(
            spec, lambda: self._compile(spec), self._pool.submit
        )

    def _compile(self, spec: GrammarSpec) -> "Entry":
        refusals: list[str] = []
        for name in spec.backends:
            backend = self._get_backend(name)
            try:
                return backend, backend.compile_grammar(spec)
            except EmptyGrammarError:
                # Another library could only find texts by reading it differently.
                raise
            except GrammarError as error:
                refusals.append(str(error))
        raise GrammarError(refusals[0])

    def _get_backend(self, name: str) -> StructuredOutputBackend:
        """Build a backend when it is first used, which can take seconds."""
        with self._pool.clock_stopped(), self._backends_lock:
            if name not in self._backends:
                self._backends[name] = _create_backend(name, self._get_vocabulary())
            return self._backends[name]

    def _get_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            source = self._tokenizer
            tokenizer = source() if callable(source) else source
            self._vocabulary = Vocabulary.from_tokenizer(tokenizer, self._vocab_size)
        return self._vocabulary


def _create_backend(name: str, vocabulary: Vocabulary) -> StructuredOutputBackend:
    # Imported here: xgrammar brings torch and transformers along, for seconds.
    if name == "xgrammar":
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        return XgrammarBackend(vocabulary)
    from vllm.v1.structured_output.backend_llguidance import GuidanceBackend

    return GuidanceBackend(vocabulary)


def _pass_on(
    future: "Future[T]",
    take: Callable[[T], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Give a future's result to `take`, and to `fail` whatever goes wrong."""

    def settle(done: "Future[T]") -> None:
        # The engine ends; nobody waits any more.
        if done.cancelled():
            return
        try:
            take(done.result())
        except BaseException as error:
            if not is_library_failure(error):
                raise
            fail(error)

    future.add_done_callback(settle)


def _describe(error: BaseException, constraint: str) -> tuple[str, str | None]:
    """Say to the client why its grammar is not there."""
    parameter: str | None = f"structured_outputs.{constraint}"
    if isinstance(error, VLLMValidationError):
        return error.message, error.parameter
    if isinstance(error, CompileTimeoutError):
        limit_s = envs.VLLM_GRAMMAR_COMPILE_TIMEOUT
        return f"the constraint does not compile within {limit_s:g} seconds", parameter
    if isinstance(error, CompileBusyError):
        # Nothing is wrong with the request: it can be sent again.
        return str(error), None
    if isinstance(error, GrammarError):
        return str(error), parameter
    logger.error("A grammar failed to compile", exc_info=error)
    return "the constraint could not be compiled", parameter


def _log_warm_up(done: "Future[StructuredOutputBackend]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("Structured output is not available", exc_info=error)
