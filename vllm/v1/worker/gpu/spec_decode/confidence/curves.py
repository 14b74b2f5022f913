"""From a draft's score to the probability of its acceptance, by fitted curves."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    PARTS_PER_KNOT,
    ScoreScale,
    Verification,
)


def read_curves(
    curves: torch.Tensor,
    scores: torch.Tensor,
    num_drafts: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    is_seeded: torch.Tensor,
    is_constrained: torch.Tensor,
    scale: ScoreScale,
    marks: torch.Tensor,
) -> torch.Tensor:
    """Read the curve of each draft's place and kind, linear between knots.

    Args:
        curves: [NUM_KINDS, num_speculative_tokens, num_knots] float32, logits of
            acceptance at the knots; kinds are verifications without a grammar, then
            under one.
        scores: [num_reqs, num_speculative_tokens] float32, NaN for no draft.
        num_drafts: [num_reqs] int32: there is no draft past them either.
        idx_mapping: [num_reqs] int32, batch_idx -> request row.
        temperature: [max_num_reqs] float32.
        is_seeded: [max_num_reqs] bool.
        is_constrained: [max_num_reqs] bool: a grammar judges the drafts as well.
        scale: of the scores.
        marks: [max_num_reqs, num_speculative_tokens] int32, by request row, written:
            where on the curves the draft stands, in parts from the first knot of all;
            -1 where there is no draft.

    Returns:
        [num_reqs, num_speculative_tokens] float32 in [0, 1], 0 where there is no draft.

    Twin: _read_curves_torch.
    """
    rows = num_drafts, idx_mapping, temperature, is_seeded, is_constrained
    if scores.is_cuda:
        return _read_curves_triton(curves, scores, *rows, scale, marks)
    native = ops.maybe_step_ops()
    if native is None:
        return _read_curves_torch(curves, scores, *rows, scale, marks)
    units = scale.low, scale.knots_per_unit, PARTS_PER_KNOT
    return native.read_curves(curves, scores, *rows, *units, marks)


def _read_curves_torch(
    curves: torch.Tensor,
    scores: torch.Tensor,
    num_drafts: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    is_seeded: torch.Tensor,
    is_constrained: torch.Tensor,
    scale: ScoreScale,
    marks: torch.Tensor,
) -> torch.Tensor:
    steps = torch.arange(scores.shape[1], device=scores.device)
    is_none = scores.isnan() | (steps >= num_drafts.unsqueeze(1))
    distance = scores.masked_fill(is_none, scale.low).sub_(scale.low)
    distance.mul_(scale.knots_per_unit).clamp_(0.0, scale.num_knots - 1.0)
    knot = distance.to(torch.int32).clamp_(max=scale.num_knots - 2)
    is_drawn = temperature[idx_mapping] != 0
    kind = is_drawn.to(torch.int32) + (is_drawn & is_seeded[idx_mapping])
    kind += is_constrained[idx_mapping] * len(Verification)
    first = torch.arange(0, curves[0].numel(), scale.num_knots, device=scores.device)
    first = kind.unsqueeze(1) * curves[0].numel() + first.to(torch.int32)
    places = (distance * PARTS_PER_KNOT + 0.5).to(torch.int32) + first * PARTS_PER_KNOT
    marks[idx_mapping.long()] = places.masked_fill_(is_none, -1)
    first += knot
    below, above = curves.take(first.long()), curves.take(first.long() + 1)
    probs = torch.lerp(below, above, distance - knot).sigmoid_()
    return probs.masked_fill_(is_none, 0.0)


def _read_curves_triton(
    curves: torch.Tensor,
    scores: torch.Tensor,
    num_drafts: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    is_seeded: torch.Tensor,
    is_constrained: torch.Tensor,
    scale: ScoreScale,
    marks: torch.Tensor,
) -> torch.Tensor:
    num_reqs, max_drafts = scores.shape
    probs = torch.empty_like(scores)
    _read_curves_kernel[(num_reqs,)](
        curves,
        scores,
        scores.stride(0),
        scores.stride(1),
        num_drafts,
        idx_mapping,
        temperature,
        is_seeded,
        is_constrained,
        probs,
        marks,
        max_drafts,
        scale.low,
        scale.knots_per_unit,
        NUM_KNOTS=scale.num_knots,
        PARTS=PARTS_PER_KNOT,
        NUM_VERIFICATIONS=len(Verification),
        BLOCK_SIZE=triton.next_power_of_2(max_drafts),
    )
    return probs


@triton.jit
def _read_curves_kernel(
    curves_ptr,  # [NUM_KINDS, num_speculative_tokens, num_knots]
    scores_ptr,  # [num_reqs, num_speculative_tokens]
    scores_req_stride,
    scores_stride,
    num_drafts_ptr,  # [num_reqs]
    idx_mapping_ptr,  # [num_reqs]
    temperature_ptr,  # [max_num_reqs]
    is_seeded_ptr,  # [max_num_reqs]
    is_constrained_ptr,  # [max_num_reqs]
    probs_ptr,  # [num_reqs, num_speculative_tokens]
    marks_ptr,  # [max_num_reqs, num_speculative_tokens]
    max_drafts,
    low,
    knots_per_unit,
    NUM_KNOTS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_VERIFICATIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    is_drawn = (tl.load(temperature_ptr + req_state_idx) != 0.0).to(tl.int32)
    is_seeded = tl.load(is_seeded_ptr + req_state_idx).to(tl.int32)
    is_constrained = tl.load(is_constrained_ptr + req_state_idx).to(tl.int32)
    kind = is_drawn + is_drawn * is_seeded + NUM_VERIFICATIONS * is_constrained
    step = tl.arange(0, BLOCK_SIZE)
    mask = step < max_drafts
    num_drafts = tl.load(num_drafts_ptr + batch_idx)
    score_ptr = scores_ptr + batch_idx * scores_req_stride + step * scores_stride
    score = tl.load(score_ptr, mask=mask, other=float("nan"))
    # False for NaN.
    is_draft = (score == score) & (step < num_drafts)
    distance = (tl.where(is_draft, score, low) - low) * knots_per_unit
    distance = tl.minimum(tl.maximum(distance, 0.0), NUM_KNOTS - 1.0)
    knot = tl.minimum(distance.to(tl.int32), NUM_KNOTS - 2)
    first = (kind * max_drafts + step) * NUM_KNOTS
    mark = (distance * PARTS + 0.5).to(tl.int32) + first * PARTS
    below = tl.load(curves_ptr + first + knot, mask=mask, other=0.0)
    above = tl.load(curves_ptr + first + knot + 1, mask=mask, other=0.0)
    logit = below + (distance - knot.to(tl.float32)) * (above - below)
    prob = tl.where(is_draft, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    tl.store(probs_ptr + batch_idx * max_drafts + step, prob, mask=mask)
    out = req_state_idx * max_drafts + step
    tl.store(marks_ptr + out, tl.where(is_draft, mark, -1), mask=mask)
