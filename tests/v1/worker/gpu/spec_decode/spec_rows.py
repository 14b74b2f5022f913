"""Logit rows of requests with drafts, for the tests of their verification."""

import numpy as np
import torch

from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum
from vllm.v1.worker.gpu.sample.sampler import SamplingRows


def make_spec_rows(
    device: torch.device,
    drafts: list[list[int] | None],
    first_positions: list[int],
    *,
    num_scheduled: list[int] | None = None,
    last_token_ids: list[int] | None = None,
    all_token_ids: torch.Tensor | None = None,
    idx_mapping: list[int] | None = None,
) -> SamplingRows:
    """Lay out the rows of a step.

    Args:
        drafts: of each request, those that are verified; None: it owns no row.
        first_positions: of each request, where its first sampled token will stand.
        num_scheduled: scheduled drafts of each request; None: all are verified.
        last_token_ids: what the requests' first rows read; 0 by default.
        all_token_ids: the committed tokens.
        idx_mapping: request -> state row; the same by default.
    """
    num_reqs = len(drafts)
    idx_mapping_np = np.array(idx_mapping or range(num_reqs), dtype=np.int32)
    num_rows = [0 if ids is None else len(ids) + 1 for ids in drafts]
    if num_scheduled is None:
        num_scheduled = [max(count - 1, 0) for count in num_rows]
    scheduled_rows = [
        0 if ids is None else count + 1
        for ids, count in zip(drafts, num_scheduled, strict=True)
    ]
    cu_num_logits = torch.from_numpy(prefix_sum(np.array(num_rows))).to(device)
    layout = BatchLayout(
        cu_num_logits_np=prefix_sum(np.array(scheduled_rows)),
        cu_num_logits=cu_num_logits,
        query_start_loc=cu_num_logits,
        num_scheduled_tokens_np=np.array(scheduled_rows, dtype=np.int32),
        num_draft_tokens_per_req=np.array(num_scheduled, dtype=np.int32),
        num_bonus_tokens=1,
        draft_budget=sum(max(count - 1, 0) for count in num_rows),
    )
    local_pos = torch.tensor([p for n in num_rows for p in range(n)], dtype=torch.int32)
    first = np.repeat(np.array(first_positions, dtype=np.int64), num_rows)
    last = last_token_ids or [0] * num_reqs
    input_ids = [
        token
        for token, ids in zip(last, drafts, strict=True)
        if ids is not None
        for token in (token, *ids)
    ]
    if all_token_ids is None:
        all_token_ids = torch.zeros((num_reqs, 64), dtype=torch.int32, device=device)
    return SamplingRows(
        idx_mapping_np=idx_mapping_np,
        expanded_idx_mapping=torch.from_numpy(np.repeat(idx_mapping_np, num_rows)).to(
            device
        ),
        expanded_local_pos=local_pos.to(device),
        positions=(torch.from_numpy(first) + local_pos).to(device),
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        all_token_ids=all_token_ids,
        layout=layout,
    )
