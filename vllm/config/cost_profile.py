"""What a step costs on one machine: two measured curves, and their JSON document."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError

_CURVES = {
    "draft_curve": "requests",
    "verify_curve": "tokens",
    "single_draft_curve": "requests",
}
_OPTIONAL_CURVE = "single_draft_curve"
_KEYS = (*_CURVES, "cudagraph_limit")
# What is beyond is a mistake, and arithmetic with it would overflow.
_MAX_SIZE, _MAX_MS = 10**9, 10**9

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CostProfile:
    """Measured times of a step.

    Args:
        draft_curve: (requests, ms) of drafting for so many requests, as many drafts as
            each can have.
        verify_curve: (tokens, ms) of all else in a step of so many tokens, drafts
            included: the forward pass, logits, verification, host work.
        cudagraph_limit: size up to which a step is padded to the next size in a curve;
            0 where nothing is captured.
        single_draft_curve: (requests, ms) of drafting one token for each; empty: it is
            not known to cost less.
    """

    draft_curve: Curve
    verify_curve: Curve
    cudagraph_limit: int = 0
    single_draft_curve: Curve = ()

    def to_json(self) -> dict[str, Any]:
        """Return the document that `parse_cost_profile` reads."""
        return asdict(self)


def parse_cost_profile(
    document: object, source: str, parameter: str | None = None
) -> CostProfile:
    """Check a document and return its profile.

    Args:
        document: parsed JSON: {"draft_curve": [[requests, ms], ...], "verify_curve":
            [[tokens, ms], ...]} and, as one likes, "single_draft_curve", of the form of
            the first, and "cudagraph_limit": tokens; sizes rise.
        source: the file, for the error.
        parameter: what named the file.

    Raises:
        VLLMValidationError: it is not of this form; the message names the place.
    """

    def wrong(place: str, rule: str) -> VLLMValidationError:
        return VLLMValidationError(f"{source}: {place} {rule}", parameter=parameter)

    if not isinstance(document, dict):
        raise wrong("the document", "must be a JSON object")
    for key in document:
        if key not in _KEYS:
            raise wrong(str(key), f"is unknown: the keys are {', '.join(_KEYS)}")
    curves = {}
    for name, unit in _CURVES.items():
        samples = document.get(name)
        is_given = name in document and samples != []
        if name == _OPTIONAL_CURVE and not is_given:
            continue
        if not isinstance(samples, list) or not samples:
            raise wrong(name, f"must be a list of [{unit}, ms] pairs")
        for index, sample in enumerate(samples):
            if not _is_sample(sample):
                rule = f"must be [{unit} from 1 to 1e9, ms from 0 to 1e9]"
                raise wrong(f"{name}[{index}]", rule)
            if index and sample[0] <= samples[index - 1][0]:
                raise wrong(f"{name}[{index}]", f"must have more {unit} than the last")
        curves[name] = tuple((size, float(ms)) for size, ms in samples)
    limit = document.get("cudagraph_limit", 0)
    if not _is_integer(limit) or limit < 0:
        raise wrong("cudagraph_limit", "must be an integer >= 0")
    return CostProfile(**curves, cudagraph_limit=limit)


def read_cost_profile(path: str, parameter: str | None = None) -> CostProfile:
    """Read a document from a file.

    Raises:
        VLLMValidationError: there is no such file, or it is no such document; the
            message names what named the file, and the file.
    """
    source = path if parameter is None else f"{parameter} {path}"
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise VLLMValidationError(
            f"{source} cannot be read: {error.strerror}", parameter=parameter
        ) from None
    except (ValueError, RecursionError) as error:
        raise VLLMValidationError(
            f"{source} is not JSON: {error}", parameter=parameter
        ) from None
    return parse_cost_profile(document, source, parameter)


def _is_sample(sample: object) -> bool:
    if not isinstance(sample, list) or len(sample) != 2:
        return False
    size, ms = sample
    is_number = isinstance(ms, (int, float)) and not isinstance(ms, bool)
    return (
        _is_integer(size)
        and 1 <= size <= _MAX_SIZE
        and is_number
        and 0 <= ms <= _MAX_MS
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
