"""The verification of drafts: which of them become output, and what follows them.

A row of the target's logits judges the draft behind it. Everything that a row needs is
the row's own, so rows are worked on in chunks of bounded size; only the last walk, over
one verdict and one token a row, is per request.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from vllm import _custom_ops as ops
from vllm.config import SpeculativeConfig
from vllm.triton_utils import tl, triton
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu.batch_layout import find_owners
from vllm.v1.worker.gpu.sample.gumbel import greedy_argmax, gumbel_argmax
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import no_samples
from vllm.v1.worker.gpu.sample.output_rows import OutputRows
from vllm.v1.worker.gpu.sample.random import Purpose, noise_keys, philox_uniform
from vllm.v1.worker.gpu.sample.sampler import LogprobRows, Sampler, SamplingRows
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.accept_drafts import accept_drafts
from vllm.v1.worker.gpu.spec_decode.accepted_prefix import take_accepted_prefix
from vllm.v1.worker.gpu.spec_decode.residual import write_residual_logits

# Size of the float32 rows that are worked on at a time. An effect's own temporaries are
# a small multiple of it.
MAX_CHUNK_BYTES = 256 * 2**20

# The processed logits of the rows from `start` to before `end`; the caller may change
# them.
LogitsSource = Callable[[int, int], torch.Tensor]


class GrammarMask(Protocol):
    """Masks what the grammars forbid."""

    def __call__(self, logits: torch.Tensor, *, first_logit_idx: int) -> None:
        """Mask, in place, the rows of the step that begin with `first_logit_idx`."""


def get_max_chunk_logits(vocab_size: int) -> int:
    """Return how many logit rows are worked on at a time, at least one."""
    num_rows = max(MAX_CHUNK_BYTES // (4 * vocab_size), 1)
    # Kernels are compiled apart for numbers that 16 divides: let chunks begin there.
    return num_rows if num_rows < 16 else num_rows - num_rows % 16


def rejection_sample(
    target_logits: LogitsSource,
    draft_logits: torch.Tensor | None,
    rows: SamplingRows,
    states: SamplingStates,
    max_rows_per_req: int,
    conditional_rates: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest draft prefix that leaves the target distribution unchanged.

    A row without a draft, or with the placeholder -1 for one, emits exactly the token
    that `gumbel_sample` draws, so a request without drafts is sampled as if alone. Of
    the rows with a draft,

    * greedy and seeded requests (coupled sampling) emit that token too, and the draft
      is accepted if it is equal;
    * others accept with probability p_target / p_draft, by noise of their own, and a
      rejected draft is replaced by a draw from norm(max(p_target - p_draft, 0)), by
      noise of its own again;
    * with `conditional_rates`, every draft is accepted by chance alone, and a rejected
      one is replaced by the token that `gumbel_sample` draws; whoever needs a draft to
      be rejected puts the placeholder in its place.

    Args:
        target_logits: gives the processed float32 rows, at most `get_max_chunk_logits`
            at a time: grammar, penalties, temperature and filters applied at every row.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab_size] float32 by
            request row, as the drafts were drawn from their softmax, with the keys of
            `draft_noise_keys`; None: the drafts are no draws (greedy, n-gram).
        rows: of the step; `input_ids` holds the drafts.
        states: temperatures and seeds.
        max_rows_per_req: drafts + bonus rows.
        conditional_rates: [max_rows_per_req] float32, the probability that a draft is
            accepted if those before it are, by its place; None: keep the target's law.

    Returns:
        sampled: [num_reqs, max_rows_per_req] int64, -1 past num_sampled, and where a
            row has no token to choose.
        num_sampled: [num_reqs] int32, at least 1 for a request that owns a row.

    Source: as `accept_drafts`; Daliri, Musco and Suresh, "Coupling without
    Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
    """
    draft_token_ids = _drafts_behind(rows)
    num_logits = len(draft_token_ids)
    chunk_size = get_max_chunk_logits(states.vocab_size)
    verdicts = [
        _judge_rows(
            target_logits(start, min(start + chunk_size, num_logits)),
            draft_logits,
            draft_token_ids[start : start + chunk_size],
            rows.chunk(start, start + chunk_size),
            states,
            conditional_rates,
        )
        for start in range(0, num_logits, chunk_size)
    ]
    is_accepted, token_ids = (
        verdicts[0]
        if len(verdicts) == 1
        else map(torch.cat, zip(*verdicts, strict=True))
    )
    return take_accepted_prefix(
        is_accepted, token_ids, rows.layout.cu_num_logits, max_rows_per_req
    )


class RejectionSampler:
    """Verifies the drafts of a step, and samples where there is none.

    Args:
        sampler: whose effects, rows and log-probabilities are used.
        config: of speculation; None: no request ever has a draft.
    """

    def __init__(self, sampler: Sampler, config: SpeculativeConfig | None) -> None:
        self.sampler = sampler
        self._max_rows_per_req = 1
        self._conditional_rates: torch.Tensor | None = None
        if config is None:
            return
        self._max_rows_per_req += config.num_speculative_tokens
        if config.rejection_sample_method == "synthetic":
            rates = compute_conditional_rates(config.synthetic_acceptance_rates)
            # The bonus row has no draft: no rate is too low for it.
            self._conditional_rates = torch.tensor(
                [*rates, 0.0], device=sampler.states.seeds.gpu.device
            )

    def __call__(
        self,
        outputs: OutputRows,
        rows: SamplingRows,
        draft_logits: torch.Tensor | None,
        apply_grammar: GrammarMask | None = None,
    ) -> SamplerOutput:
        """Verify the drafts of every request that owns rows.

        Args:
            outputs: of the step. Their logits are changed in place where nobody reads
                them afterwards.
            rows: of the step; `input_ids` holds the drafts, -1 for one that is unknown:
                it is not accepted.
            draft_logits: as in `rejection_sample`.
            apply_grammar: None: no grammar.

        Returns:
            Up to one token more a request than it has drafts. Log-probabilities are in
            the verified layout: every row of a request has them, and those past its
            last token say nothing.
        """
        if len(outputs) == 0:
            return no_samples(rows.num_reqs, outputs.device)
        nans_before = None
        if self.sampler.counts_nans:
            # The logits are about to be changed.
            nans_before = _sum_nans(outputs.logits)
        likeliest = None
        if apply_grammar is None and self._conditional_rates is None:
            uses = self.sampler.find_uses(rows.idx_mapping_np)
            likeliest = self.sampler.maybe_take_likeliest(outputs, rows, uses)
        if likeliest is None:
            sampled, num_sampled, logprobs_tensors = self._verify_rows(
                outputs.logits, rows, draft_logits, apply_grammar
            )
        else:
            # Drafted or not, what a greedy row emits is its likeliest token.
            sampled, num_sampled = verify_greedy(
                likeliest.token_ids, rows, self._max_rows_per_req
            )
            logprobs_tensors = likeliest.scores
            others = likeliest.others
            if others is not None:
                theirs, num_theirs, scores = self._verify_rows(
                    likeliest.logits, others.rows, draft_logits, None
                )
                sampled[others.is_kept] = theirs[others.is_kept]
                num_sampled[others.is_kept] = num_theirs[others.is_kept]
                logprobs_tensors = self.sampler.join_scores(likeliest, scores, rows)
        num_nans = None
        if nans_before is not None:
            # What stands behind a rejected draft is no word of the model's.
            first = rows.layout.cu_num_logits[:-1].long()
            num_nans = nans_before[first + num_sampled] - nans_before[first]
        return SamplerOutput(sampled, num_sampled, logprobs_tensors, num_nans)

    def _verify_rows(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        draft_logits: torch.Tensor | None,
        apply_grammar: GrammarMask | None,
    ) -> tuple[torch.Tensor, torch.Tensor, LogprobsTensors | None]:
        """Return `rejection_sample`'s, and the log-probabilities that are wanted."""
        logprob_rows = self.sampler.find_logprob_rows(rows)
        sampled, num_sampled = self._rejection_sample(
            logits, rows, draft_logits, apply_grammar, logprob_rows is not None
        )
        if logprob_rows is None:
            return sampled, num_sampled, None
        scores = self._get_logprobs_tensors(sampled, logits, rows, logprob_rows)
        return sampled, num_sampled, scores

    def _rejection_sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        draft_logits: torch.Tensor | None,
        apply_grammar: GrammarMask | None,
        has_reader: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        judged_rows = rows
        if self._conditional_rates is not None and apply_grammar is not None:
            judged_rows = forget_forbidden_drafts(rows, logits, apply_grammar)
        # An unknown draft must not be used as an index.
        known_rows = replace(rows, input_ids=rows.input_ids.clamp(min=0))
        return rejection_sample(
            partial(self._process_rows, logits, known_rows, apply_grammar, has_reader),
            draft_logits,
            judged_rows,
            self.sampler.states,
            self._max_rows_per_req,
            self._conditional_rates,
        )

    def _process_rows(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        apply_grammar: GrammarMask | None,
        has_reader: bool,
        start: int,
        end: int,
    ) -> torch.Tensor:
        mask = None
        if apply_grammar is not None:
            mask = partial(apply_grammar, first_logit_idx=start)
        processed = self.sampler.apply_sampling_params(
            logits[start:end],
            rows.chunk(start, end),
            mask,
            in_place=not (has_reader and self.sampler.is_raw_mode),
        )
        # The residual must not be taken for what a token was drawn from.
        if has_reader and not self.sampler.is_raw_mode:
            return processed.clone()
        return processed

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        logits: torch.Tensor,
        rows: SamplingRows,
        logprob_rows: LogprobRows,
    ) -> LogprobsTensors:
        token_ids = flatten_sampled(sampled, rows.layout.cu_num_logits, len(logits))
        chosen = self.sampler.states.chosen_token_ids
        has_chosen = chosen.lengths.np[rows.idx_mapping_np].any()
        wanted, boundaries = logprob_rows.logit_idx, logprob_rows.cu_num_rows
        num_rows = len(logits) if wanted is None else len(wanted)
        chunk_size = get_max_chunk_logits(logits.shape[1])
        parts = []
        for start in range(0, num_rows, chunk_size):
            chunk: slice | torch.Tensor = slice(start, start + chunk_size)
            if wanted is not None:
                chunk = wanted[chunk]
            scores = compute_topk_scores(
                logits[chunk],
                logprob_rows.num_logprobs,
                token_ids[chunk],
                logits_mode=self.sampler.logits_mode,
                chosen_token_ids=chosen if has_chosen else None,
                expanded_idx_mapping=rows.expanded_idx_mapping[chunk],
            )
            parts.append(scores)
        joined = LogprobsTensors.cat(parts)
        if isinstance(boundaries, torch.Tensor):
            # The buffer is rewritten by the next step.
            return joined._replace(cu_num_generated_tokens_tensor=boundaries.clone())
        return joined._replace(cu_num_generated_tokens=boundaries)


def verify_greedy(
    token_ids: torch.Tensor, rows: SamplingRows, max_rows_per_req: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Judge drafts by the likeliest tokens, as `rejection_sample` does greedy ones.

    Args:
        token_ids: [num_logits] int64, the likeliest of each row.
        rows: of the step.
        max_rows_per_req: drafts + bonus rows.

    Returns:
        As `rejection_sample`.
    """
    cu_num_logits = rows.layout.cu_num_logits
    native = ops.maybe_step_ops()
    if native is not None and not token_ids.is_cuda:
        return native.verify_greedy(
            token_ids, rows.input_ids, cu_num_logits, max_rows_per_req
        )
    drafts = _drafts_behind(rows)
    is_accepted = (drafts >= 0) & (drafts == token_ids)
    return take_accepted_prefix(is_accepted, token_ids, cu_num_logits, max_rows_per_req)


def compute_conditional_rates(rates: Sequence[float]) -> list[float]:
    """Return the probability that a draft passes if those before it have passed.

    Args:
        rates: the share of steps in which the draft at a place passes, non-increasing.
    """
    before = [1.0, *rates[:-1]]
    return [
        rate / previous if previous > 0 else 0.0
        for rate, previous in zip(rates, before, strict=True)
    ]


def forget_forbidden_drafts(
    rows: SamplingRows, logits: torch.Tensor, apply_grammar: GrammarMask
) -> SamplingRows:
    """Replace the drafts that a grammar forbids by the placeholder -1.

    For drafts that are accepted by chance: wherever the target has a say, it gives a
    forbidden draft no probability.

    Args:
        rows: of the step.
        logits: [num_logits, vocab_size], for its shape.
        apply_grammar: of the step.
    """
    drafts = _drafts_behind(rows)
    chunk_size = get_max_chunk_logits(logits.shape[1])
    is_forbidden = torch.zeros_like(drafts, dtype=torch.bool)
    for start in range(0, len(drafts), chunk_size):
        chunk = drafts[start : start + chunk_size]
        mask = torch.zeros_like(logits[start : start + chunk_size])
        apply_grammar(mask, first_logit_idx=start)
        masked = mask.gather(1, chunk.clamp(min=0).unsqueeze(1)).squeeze(1)
        is_forbidden[start : start + chunk_size] = (chunk >= 0) & (masked < 0)
    # The draft that a row judges is the input of the next one.
    input_ids = rows.input_ids.masked_fill(is_forbidden.roll(1), -1)
    return replace(rows, input_ids=input_ids)


def flatten_sampled(
    sampled: torch.Tensor, cu_num_logits: torch.Tensor, num_logits: int
) -> torch.Tensor:
    """Lay the tokens of the requests on their logit rows.

    Args:
        sampled: [num_reqs, max_rows_per_req] int64, -1 past a request's last token.
        cu_num_logits: [num_reqs + 1] int32, prefix sum of logit rows per request.
        num_logits: cu_num_logits[-1], known to the host.

    Returns:
        [num_logits] int64; 0, a token like any other, on rows that emit none.

    Twin: _flatten_sampled_torch.
    """
    impl = _flatten_sampled_triton if sampled.is_cuda else _flatten_sampled_torch
    return impl(sampled, cu_num_logits, num_logits)


def _drafts_behind(rows: SamplingRows) -> torch.Tensor:
    """Return the draft that each row judges: the next row's input, or -1.

    [num_logits] int64; -1 at the last row of a request.
    """
    native = ops.maybe_step_ops()
    if native is not None and not rows.input_ids.is_cuda:
        return native.drafts_behind(rows.input_ids, rows.expanded_local_pos)
    # The last row's neighbour is row 0, which never has a draft for input.
    is_draft = rows.expanded_local_pos.roll(-1) > 0
    return torch.where(is_draft, rows.input_ids.roll(-1), -1)


def _judge_rows(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    rows: SamplingRows,
    states: SamplingStates,
    conditional_rates: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say of each row whether its draft is accepted, and which token it emits.

    Args:
        logits: of the chunk, processed; changed in place.
        draft_logits: as in `rejection_sample`.
        draft_token_ids: [num_logits] int64, of the chunk; -1: no draft.
        rows: the chunk.
        states: temperatures and seeds.
        conditional_rates: as in `rejection_sample`.

    Returns:
        is_accepted: [num_logits] bool.
        token_ids: [num_logits] int64.
    """
    mapping, positions = rows.expanded_idx_mapping, rows.positions
    has_draft = draft_token_ids >= 0
    if conditional_rates is None and states.is_all_greedy(rows.idx_mapping_np):
        # A draft is what the row says itself, or is rejected.
        token_ids = greedy_argmax(logits)
        return has_draft & (token_ids == draft_token_ids), token_ids
    seeds = states.seeds.gpu[mapping]
    is_greedy = states.temperature.gpu[mapping] == 0
    keys = noise_keys(seeds, positions, Purpose.TARGET)
    if conditional_rates is not None:
        rates = conditional_rates[rows.expanded_local_pos]
        is_accepted = has_draft & (_accept_noise(seeds, positions) < rates)
        by_equality = torch.zeros_like(has_draft)
    elif states.uses_standard_verification(rows.idx_mapping_np):
        by_equality = has_draft & (is_greedy | states.is_seeded.gpu[mapping])
        by_chance = has_draft & ~by_equality
        places = mapping, rows.expanded_local_pos
        drawn = torch.where(by_chance, draft_token_ids, -1)
        uniform = _accept_noise(seeds, positions)
        is_accepted = accept_drafts(logits, draft_logits, drawn, uniform, *places)
        is_rejected = by_chance & ~is_accepted
        write_residual_logits(logits, draft_logits, drawn, is_rejected, *places)
        residual_keys = noise_keys(seeds, positions, Purpose.RESIDUAL)
        keys = torch.where(is_rejected, residual_keys, keys)
    else:
        is_accepted = torch.zeros_like(has_draft)
        by_equality = has_draft
    # The noise is most of the work, and the draw of an accepted row is not used.
    skips_noise = (is_greedy | is_accepted).to(torch.uint8)
    token_ids = gumbel_argmax(logits, keys, skips_noise)
    is_accepted |= by_equality & (token_ids == draft_token_ids)
    return is_accepted, torch.where(is_accepted, draft_token_ids, token_ids)


def _accept_noise(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return philox_uniform(noise_keys(seeds, positions, Purpose.ACCEPT), 1).squeeze(1)


def _sum_nans(logits: torch.Tensor) -> torch.Tensor:
    """Return how many NaN stand before each row, [num_logits + 1] int32."""
    chunks = logits.split(get_max_chunk_logits(logits.shape[1]))
    counts = torch.cat([rows.isnan().sum(dim=-1) for rows in chunks])
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _flatten_sampled_torch(
    sampled: torch.Tensor, cu_num_logits: torch.Tensor, num_logits: int
) -> torch.Tensor:
    batch_idx = find_owners(cu_num_logits[1:], num_logits)
    logit_idx = torch.arange(num_logits, device=sampled.device)
    return sampled[batch_idx, logit_idx - cu_num_logits[batch_idx]].clamp(min=0)


def _flatten_sampled_triton(
    sampled: torch.Tensor, cu_num_logits: torch.Tensor, num_logits: int
) -> torch.Tensor:
    flat = torch.empty(num_logits, dtype=torch.int64, device=sampled.device)
    num_reqs, width = sampled.shape
    _flatten_sampled_kernel[(num_reqs,)](
        sampled,
        sampled.stride(0),
        cu_num_logits,
        flat,
        BLOCK_SIZE=triton.next_power_of_2(width),
    )
    return flat


@triton.jit
def _flatten_sampled_kernel(
    sampled_ptr,  # [num_reqs, max_rows_per_req]
    sampled_stride,
    cu_num_logits_ptr,  # [num_reqs + 1]
    flat_ptr,  # [num_logits]
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + batch_idx)
    num_rows = tl.load(cu_num_logits_ptr + batch_idx + 1) - first
    column = tl.arange(0, BLOCK_SIZE)
    mask = column < num_rows
    token_ids = tl.load(
        sampled_ptr + batch_idx * sampled_stride + column, mask=mask, other=0
    )
    tl.store(flat_ptr + first + column, tl.maximum(token_ids, 0), mask=mask)
