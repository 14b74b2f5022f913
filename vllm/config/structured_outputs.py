"""Defaults of structured output."""

from dataclasses import dataclass

STRUCTURED_OUTPUTS_BACKENDS = ("auto", "guidance", "xgrammar")


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """How grammars are compiled and enforced.

    Args:
        backend: one of STRUCTURED_OUTPUTS_BACKENDS. auto tries guidance and gives to
            xgrammar what guidance refuses and xgrammar enforces.
        disable_any_whitespace: JSON without optional whitespace, for every request.
        disable_additional_properties: objects are closed unless the schema says
            otherwise, for every request.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
