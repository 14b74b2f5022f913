"""The check that the API process makes before a request reaches the engine."""

from typing import TYPE_CHECKING

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar_spec import resolve_spec

if TYPE_CHECKING:
    from vllm.config.structured_outputs import StructuredOutputsConfig


def validate_structured_outputs(
    params: StructuredOutputsParams,
    config: "StructuredOutputsConfig",
    parameter_prefix: str = "structured_outputs",
) -> None:
    """Refuse a constraint that is malformed, too large or not enforceable.

    Pure Python and quick. What only a compiler finds is refused by the engine, as
    `StructuredOutputRequest.error`.

    Args:
        parameter_prefix: the request field that the constraint came from:
            structured_outputs or response_format.

    Raises:
        VLLMValidationError: names the field, and the keyword with its path.
    """
    resolve_spec(params, config, parameter_prefix)
