"""The draw of a token by the Gumbel-max rule, and the argmax of greedy rows.

argmax(logit + Gumbel noise) is a draw from softmax(logits); with noise that depends on
seed and position only, the same request draws the same token in any batch.
"""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.random import Purpose, noise_keys, philox_uniform_at

# Keeps the noise finite; far below the smallest number but 0 that Philox gives.
MIN_UNIFORM = 2.0**-33


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    purpose: Purpose = Purpose.TARGET,
    is_all_greedy: bool = False,
) -> torch.Tensor:
    """Draw one token from softmax of each row, or take the argmax of a greedy row.

    The noise of token v is -log(-log1p(-u)) in float64, with u the float32 uniform
    number `tl.rand(key, v)` but at least 2**-33. Ties go to the lowest token id. A
    token whose logit is -inf or NaN is never chosen.

    Args:
        logits: [num_logits, vocab_size] float32, temperature already applied.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        temperature: [max_num_reqs] float32; 0 means greedy.
        seeds: [max_num_reqs] int64.
        positions: [num_logits] int64, absolute position of the token to sample.
        purpose: of the draws.
        is_all_greedy: the host knows that every row is greedy: no key is needed.

    Returns:
        [num_logits] int64; -1 where a row has no token to choose.

    Raises:
        ValueError: logits is not float32 or its rows are not contiguous.

    Source: Maddison, Tarlow and Minka, "A* sampling", NIPS 2014. Twin:
    _gumbel_argmax_torch.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(
            f"gumbel_sample needs row-contiguous float32 logits, got {logits.dtype} "
            f"with strides {logits.stride()}"
        )
    if is_all_greedy:
        return greedy_argmax(logits)
    keys = noise_keys(seeds[expanded_idx_mapping], positions, purpose)
    is_greedy = (temperature[expanded_idx_mapping] == 0).to(torch.uint8)
    return gumbel_argmax(logits, keys, is_greedy)


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's likeliest token, as `gumbel_sample` takes it of a greedy row.

    Args:
        logits: [num_logits, vocab_size] float32.
    """
    native = ops.maybe_step_ops()
    if native is not None and not logits.is_cuda:
        return native.greedy_argmax(logits)
    num_logits = logits.shape[0]
    is_greedy = torch.ones(num_logits, dtype=torch.uint8, device=logits.device)
    # A greedy row reads no noise: any number will do as its key.
    keys = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
    return gumbel_argmax(logits, keys, is_greedy)


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, is_greedy: torch.Tensor
) -> torch.Tensor:
    """Return the token that wins with each row's noise: see `gumbel_sample`.

    Args:
        logits: [num_logits, vocab_size] float32.
        keys: [num_logits] int64, from `noise_keys`.
        is_greedy: [num_logits] uint8; 1 leaves the noise out.

    Returns:
        [num_logits] int64; -1 where a row has no token to choose.
    """
    if logits.is_cuda:
        return _gumbel_argmax_triton(logits, keys, is_greedy)
    if ops.has_cpu_ops():
        return ops.gumbel_argmax(logits.contiguous(), keys, is_greedy)
    return _gumbel_argmax_torch(logits, keys, is_greedy)


def _gumbel_argmax_torch(
    logits: torch.Tensor, keys: torch.Tensor, is_greedy: torch.Tensor
) -> torch.Tensor:
    sampled = torch.full_like(keys, -1)
    for logit_idx, row in enumerate(logits):
        # False for NaN as well.
        token_ids = (row > float("-inf")).nonzero().squeeze(-1)
        if token_ids.numel() == 0:
            continue
        scores = row[token_ids].to(torch.float64)
        if is_greedy[logit_idx] == 0:
            uniform = philox_uniform_at(keys[logit_idx], token_ids)
            uniform = uniform.clamp_(min=MIN_UNIFORM).to(torch.float64)
            scores -= torch.log(-torch.log1p(-uniform))
        # argmax returns the first of equal maxima.
        sampled[logit_idx] = token_ids[scores.argmax()]
    return sampled


def _gumbel_argmax_triton(
    logits: torch.Tensor, keys: torch.Tensor, is_greedy: torch.Tensor
) -> torch.Tensor:
    num_logits, vocab_size = logits.shape
    block_size = 1024
    num_blocks = triton.cdiv(vocab_size, block_size)
    device = logits.device
    best_scores = torch.empty(
        (num_logits, num_blocks), dtype=torch.float64, device=device
    )
    best_ids = torch.empty((num_logits, num_blocks), dtype=torch.int64, device=device)
    sampled = torch.empty(num_logits, dtype=torch.int64, device=device)
    _gumbel_argmax_kernel[(num_logits, num_blocks)](
        logits,
        logits.stride(0),
        keys,
        is_greedy,
        best_scores,
        best_ids,
        vocab_size,
        BLOCK_SIZE=block_size,
    )
    _reduce_blocks_kernel[(num_logits,)](
        best_scores,
        best_ids,
        sampled,
        num_blocks,
        BLOCK_SIZE=triton.next_power_of_2(num_blocks),
    )
    return sampled


@triton.jit
def _gumbel_argmax_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    keys_ptr,  # [num_logits]
    is_greedy_ptr,  # [num_logits]
    best_scores_ptr,  # [num_logits, num_blocks]
    best_ids_ptr,  # [num_logits, num_blocks]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row and block of the vocabulary.
    logit_idx = tl.program_id(0).to(tl.int64)
    block_idx = tl.program_id(1)
    token_ids = block_idx * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    logits = tl.load(
        logits_ptr + logit_idx * logits_stride + token_ids,
        mask=token_ids < vocab_size,
        other=float("-inf"),
    )
    # False for NaN as well.
    is_choosable = logits > float("-inf")
    scores = logits.to(tl.float64)
    if tl.load(is_greedy_ptr + logit_idx) == 0:
        uniform = tl.rand(tl.load(keys_ptr + logit_idx), token_ids)
        uniform = tl.maximum(uniform, 1.1641532182693481e-10).to(tl.float64)
        # log1p(-u), which Triton lacks: the quotient undoes the rounding of 1 - u.
        rest = 1.0 - uniform
        is_one = rest == 1.0
        quotient = -uniform / tl.where(is_one, -1.0, rest - 1.0)
        log1p = tl.where(is_one, -uniform, tl.log(rest) * quotient)
        scores = scores - tl.log(-log1p)
    scores = tl.where(is_choosable, scores, float("-inf"))
    num_blocks = tl.num_programs(1)
    best = tl.argmax(scores, axis=0)
    out = logit_idx * num_blocks + block_idx
    tl.store(best_scores_ptr + out, tl.max(scores, axis=0))
    tl.store(best_ids_ptr + out, (block_idx * BLOCK_SIZE + best).to(tl.int64))


@triton.jit
def _reduce_blocks_kernel(
    best_scores_ptr,  # [num_logits, num_blocks]
    best_ids_ptr,  # [num_logits, num_blocks]
    sampled_ptr,  # [num_logits]
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
):
    logit_idx = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK_SIZE)
    scores = tl.load(
        best_scores_ptr + logit_idx * num_blocks + blocks,
        mask=blocks < num_blocks,
        other=float("-inf"),
    )
    best = tl.argmax(scores, axis=0)
    token_id = tl.load(best_ids_ptr + logit_idx * num_blocks + best)
    token_id = tl.where(tl.max(scores, axis=0) == float("-inf"), -1, token_id)
    tl.store(sampled_ptr + logit_idx, token_id)
