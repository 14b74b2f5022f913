"""The grammar of one request, from its compilation to its last token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from vllm.v1.structured_output.backend_types import (
        StructuredOutputBackend,
        StructuredOutputGrammar,
    )


@dataclass
class StructuredOutputRequest:
    """A constraint and, once it is compiled, the request's own matcher.

    Written once by the thread that compiles, then only used by the engine's thread.

    Args:
        params: the constraint as the client gave it.
        grammar: the matcher; None while compiling and after a failure.
        backend: the library that the matcher belongs to.
        error: why it does not compile, as (message, parameter) for the client; without
            a parameter the engine has no room to compile it now.
    """

    params: StructuredOutputsParams
    grammar: "StructuredOutputGrammar | None" = None
    backend: "StructuredOutputBackend | None" = None
    error: tuple[str, str | None] | None = None

    @property
    def is_grammar_ready(self) -> bool:
        """Whether the request can be scheduled."""
        return self.grammar is not None
