"""From the logits of a step to its tokens: the effects in their order, and the draw."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.allowed_token_ids import (
    AllowedTokenIdsState,
    apply_allowed_token_ids,
)
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState, apply_bad_words
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState, apply_logit_bias
from vllm.v1.worker.gpu.sample.logprob import (
    compute_topk_scores,
    join_scores,
    listed_scores,
)
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.min_tokens import MinTokensState, apply_min_tokens
from vllm.v1.worker.gpu.sample.output import no_samples, spread_rows
from vllm.v1.worker.gpu.sample.output_rows import OutputRows
from vllm.v1.worker.gpu.sample.penalties import (
    PenaltiesState,
    apply_penalties,
    count_sampled_tokens,
)
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates
from vllm.v1.worker.gpu.sample.temperature import apply_temperature
from vllm.v1.worker.gpu.sample.top_k_top_p import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.uses import Uses

# Changes logits in place.
Effect = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class SamplingRows:
    """Which logit rows a step has, and what each of them may know of the past.

    A chunk of a step is the same with fewer logit rows; what is a request's stays.

    Args:
        idx_mapping_np: [num_reqs] int32, batch_idx -> request state row, host.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        expanded_local_pos: [num_logits] int32, place of the row within its request: how
            many drafts of this step stand before it.
        positions: [num_logits] int64, absolute position of the token to sample.
        input_ids: of all rows of the step, int64, the token that the model read at the
            row; where the local position is above 0, the draft just before the token to
            sample. A chunk keeps them all: the drafts before a row may lie outside.
        all_token_ids: [max_num_reqs, max_model_len] int32, the committed tokens.
        layout: of the step's logit rows.
        first_logit_idx: which row of the step the chunk begins with.
    """

    idx_mapping_np: np.ndarray
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor
    all_token_ids: torch.Tensor
    layout: BatchLayout
    first_logit_idx: int = 0

    @property
    def num_reqs(self) -> int:
        """Requests in the step, those without a row included."""
        return len(self.idx_mapping_np)

    @classmethod
    def from_batch(
        cls, batch: InputBatch, all_token_ids: torch.Tensor
    ) -> "SamplingRows":
        """Take the rows of a step.

        Args:
            batch: of the step.
            all_token_ids: [max_num_reqs, max_model_len] int32, the committed tokens.
        """
        return cls(
            batch.idx_mapping_np,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            batch.sample_positions,
            batch.take_logit_rows(batch.input_ids),
            all_token_ids,
            batch.layout,
        )

    def chunk(self, start: int, end: int) -> "SamplingRows":
        """Take the logit rows from `start` to before `end`."""
        return replace(
            self,
            expanded_idx_mapping=self.expanded_idx_mapping[start:end],
            expanded_local_pos=self.expanded_local_pos[start:end],
            positions=self.positions[start:end],
            first_logit_idx=self.first_logit_idx + start,
        )

    def keep(self, is_kept: np.ndarray) -> "KeptRows":
        """Take the rows of some requests; the others then own none.

        The host knows whose the rows are.

        Args:
            is_kept: [num_reqs] bool.
        """
        num_rows = np.diff(self.layout.verified_cu_num_logits_np)
        device = self.expanded_idx_mapping.device
        logit_idx = to_device(np.flatnonzero(np.repeat(is_kept, num_rows)), device)
        cu_num_logits_np = prefix_sum(num_rows * is_kept)
        layout = replace(
            self.layout,
            cu_num_logits_np=cu_num_logits_np,
            cu_num_logits=to_device(cu_num_logits_np, device),
            num_draft_tokens_per_req=None,
            draft_budget=0,
        )
        rows = replace(
            self,
            expanded_idx_mapping=self.expanded_idx_mapping[logit_idx],
            expanded_local_pos=self.expanded_local_pos[logit_idx],
            positions=self.positions[logit_idx],
            # A request's drafts are the inputs of its own rows.
            input_ids=self.input_ids[logit_idx],
            layout=layout,
        )
        return KeptRows(rows, logit_idx, to_device(is_kept, device))


@dataclass(frozen=True)
class KeptRows:
    """The rows of some requests of a step.

    Args:
        rows: of these, in a layout of their own.
        logit_idx: [n] int64, which rows of the step they are.
        is_kept: [num_reqs] bool, whose they are.
    """

    rows: SamplingRows
    logit_idx: torch.Tensor
    is_kept: torch.Tensor


@dataclass(frozen=True)
class Likeliest:
    """What one pass over the output layer says of a step.

    Args:
        token_ids: [num_logits] int64, each row's likeliest token.
        scores: log-probabilities of the rows that emit it and want them; None: of none.
        scored_idx: [n] int64, which rows of the step these are.
        others: the rows that may emit another token, or of which more is to be said;
            None: there are none.
        logits: [number of others, vocab_size] float32; the reader may change them.
    """

    token_ids: torch.Tensor
    scores: LogprobsTensors | None
    scored_idx: torch.Tensor
    others: KeptRows | None
    logits: torch.Tensor


@dataclass(frozen=True)
class LogprobRows:
    """The logit rows whose log-probabilities are wanted.

    Args:
        num_logprobs: candidates beside the sampled token, of the request with most.
        logit_idx: [n] int64, the rows; None: all of them.
        cu_num_rows: [num_reqs + 1] boundaries of the requests among these rows, where
            they are known; None: one row a request.
    """

    num_logprobs: int
    logit_idx: torch.Tensor | None
    cu_num_rows: list[int] | torch.Tensor | None

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Return the wanted rows of `values` [num_logits, ...]."""
        return values if self.logit_idx is None else values[self.logit_idx]


class Sampler:
    """Samples one token for each logit row of a step.

    The effects work in this order: grammar mask, logit_bias, allowed_token_ids,
    min_tokens, penalties, bad_words, temperature, min_p, top_k and top_p. An effect
    that no request of the step uses is not run, and one that runs leaves the rows of
    other requests as they are.

    Args:
        max_num_reqs: rows.
        vocab_size: width of the logits.
        device: where the model runs.
        logprobs_mode: one of vllm.config.model.LOGPROBS_MODES. Raw modes show the
            model's own distribution, before all effects; processed modes what the token
            was drawn from.
        seed: from which requests without a seed get theirs; None draws one.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        *,
        seed: int | None = None,
    ) -> None:
        self.is_raw_mode = logprobs_mode.startswith("raw_")
        self.logits_mode = logprobs_mode.endswith("_logits")
        self.states = SamplingStates(max_num_reqs, vocab_size, device, seed)
        self.logit_bias = LogitBiasState(max_num_reqs, device)
        self.allowed_token_ids = AllowedTokenIdsState(max_num_reqs, vocab_size, device)
        self.min_tokens = MinTokensState(max_num_reqs, device)
        self.penalties = PenaltiesState(max_num_reqs, vocab_size, device)
        self.bad_words = BadWordsState(max_num_reqs, device)
        # [max_num_reqs] int32: what each request owns where all sample; not written to.
        self._one_row = torch.ones(max_num_reqs, dtype=torch.int32, device=device)
        # [max_num_reqs] bits of Uses.
        self._uses_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.counts_nans = envs.VLLM_COMPUTE_NANS_IN_LOGITS
        self._device = device

    def add_request(
        self,
        req_state_idx: int,
        req_id: str,
        sampling_params: SamplingParams,
        prompt_token_ids: list[int],
        prefill_token_ids: list[int],
    ) -> None:
        """Fill the request's row.

        Args:
            prefill_token_ids: every token known so far; beyond the prompt if the
                request was preempted.
        """
        prompt_len = len(prompt_token_ids)
        self.states.add_request(req_state_idx, req_id, sampling_params)
        self.logit_bias.add_request(req_state_idx, sampling_params)
        self.allowed_token_ids.add_request(req_state_idx, sampling_params)
        self.min_tokens.add_request(req_state_idx, sampling_params, prompt_len)
        self.penalties.add_request(
            req_state_idx, sampling_params, prompt_token_ids, prefill_token_ids
        )
        self.bad_words.add_request(req_state_idx, sampling_params, prompt_len)
        uses = self.states.find_uses(req_state_idx)
        for bit, state in (
            (Uses.LOGIT_BIAS, self.logit_bias),
            (Uses.ALLOWED_TOKEN_IDS, self.allowed_token_ids),
            (Uses.MIN_TOKENS, self.min_tokens),
            (Uses.PENALTIES, self.penalties),
            (Uses.BAD_WORDS, self.bad_words),
        ):
            uses |= bit if state.is_used_np[req_state_idx] else 0
        self._uses_np[req_state_idx] = uses

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        self.states.remove_request(req_state_idx)
        self.logit_bias.remove_request(req_state_idx)
        self.allowed_token_ids.remove_request(req_state_idx)
        self.min_tokens.remove_request(req_state_idx)
        self.penalties.remove_request(req_state_idx)
        self.bad_words.remove_request(req_state_idx)

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        self.states.apply_staged_writes()
        self.logit_bias.apply_staged_writes()
        self.allowed_token_ids.apply_staged_writes()
        self.min_tokens.apply_staged_writes()
        self.penalties.apply_staged_writes()
        self.bad_words.apply_staged_writes()

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        apply_grammar: Effect | None = None,
        *,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the logits after every effect, ready for softmax and draw.

        Args:
            logits: [num_logits, vocab_size] float32.
            rows: of the step, or a chunk of it; a request may own several.
            apply_grammar: masks what the grammars forbid, in place; None: no grammar.
            in_place: whether to change `logits` instead of a copy.
        """
        processed = logits if in_place else logits.clone()
        uses = self.find_uses(rows.idx_mapping_np)
        for effect in self._effects(rows, apply_grammar, uses):
            effect(processed)
        return processed

    def __call__(
        self,
        outputs: OutputRows,
        rows: SamplingRows,
        apply_grammar: Effect | None = None,
    ) -> SamplerOutput:
        """Sample a token for each request that owns a row.

        Args:
            outputs: of the step. Their logits are changed in place where nobody reads
                them afterwards.
            rows: of the step; no request owns more than one.
            apply_grammar: masks what the grammars forbid, in place; None: no grammar.

        Returns:
            One token a request, -1 where its row has nothing to choose from.
        """
        assert len(outputs) <= rows.num_reqs, "a request owns several logit rows"
        if len(outputs) == 0:
            return no_samples(rows.num_reqs, self._device)
        num_nans = None
        if self.counts_nans:
            num_nans = spread_rows(
                outputs.logits.isnan().sum(dim=-1, dtype=torch.int32),
                rows.layout,
                fill=0,
            )
        uses = self.find_uses(rows.idx_mapping_np)
        likeliest = None
        if apply_grammar is None:
            likeliest = self.maybe_take_likeliest(outputs, rows, uses)
        if likeliest is None:
            sampled, logprobs_tensors = self._sample_rows(
                outputs.logits, rows, apply_grammar, uses
            )
        else:
            sampled, logprobs_tensors = likeliest.token_ids, likeliest.scores
            others = likeliest.others
            if others is not None:
                token_ids, scores = self._sample_rows(
                    likeliest.logits, others.rows, None, uses
                )
                sampled[others.logit_idx] = token_ids
                logprobs_tensors = self.join_scores(likeliest, scores, rows)
        num_rows = self._one_row[: len(outputs)]
        if len(outputs) < rows.num_reqs:
            num_rows = torch.diff(rows.layout.cu_num_logits)
        return SamplerOutput(
            spread_rows(sampled, rows.layout, fill=-1).unsqueeze(1),
            num_rows,
            logprobs_tensors,
            num_nans,
        )

    def maybe_take_likeliest(
        self, outputs: OutputRows, rows: SamplingRows, uses: int
    ) -> Likeliest | None:
        """Return what the output layer says of greedy rows, and the logits of others.

        None where it takes the logits of all rows: these may be sampled as any others,
        with the same result.

        Args:
            outputs: of the step.
            rows: of the step, which no grammar masks.
            uses: of all their requests.
        """
        no_rows = outputs.no_rows
        if not uses:
            return Likeliest(outputs.argmax(), None, no_rows, None, no_rows)
        layout = rows.layout
        needs_logits = (self._uses_np[rows.idx_mapping_np] & ~Uses.LOGPROBS) != 0
        needs_logits &= layout.is_sampling_np
        others, greedy = None, None
        if needs_logits.any():
            is_divisible = layout.is_exact_on_host and outputs.device.type != "cuda"
            if not is_divisible or not (layout.is_sampling_np & ~needs_logits).any():
                return None
            others, greedy = rows.keep(needs_logits), rows.keep(~needs_logits)
        scored = self.find_logprob_rows(rows if greedy is None else greedy.rows)
        if others is None and scored is None:
            return Likeliest(outputs.argmax(), None, no_rows, None, no_rows)
        written_idx = no_rows if others is None else others.logit_idx
        scored_idx = no_rows
        if scored is not None:
            all_idx = outputs.all_rows if greedy is None else greedy.logit_idx
            scored_idx = scored.select(all_idx)
        num_logprobs = 0 if scored is None else scored.num_logprobs
        statistics = outputs.maybe_statistics(
            scored_idx, max(num_logprobs, 1), written_idx
        )
        if statistics is None:
            return None
        scores = None
        if scored is not None:
            scores = listed_scores(
                statistics,
                num_logprobs,
                scored.cu_num_rows,
                logits_mode=self.logits_mode,
            )
        return Likeliest(
            statistics.argmax, scores, scored_idx, others, statistics.written
        )

    def join_scores(
        self,
        likeliest: Likeliest,
        other_scores: LogprobsTensors | None,
        rows: SamplingRows,
    ) -> LogprobsTensors | None:
        """Return the log-probabilities of all rows of a step.

        Args:
            likeliest: of the step, with others.
            other_scores: of the others.
            rows: of the step.
        """
        if other_scores is None or likeliest.scores is None:
            return other_scores or likeliest.scores
        others, wanted = likeliest.others, self.find_logprob_rows(rows)
        assert others is not None, "a part has no rows"
        assert wanted is not None, "nobody wants scores"
        scored = self.find_logprob_rows(others.rows)
        assert scored is not None, "the others have scores"
        return join_scores(
            (likeliest.scores, other_scores),
            (likeliest.scored_idx, scored.select(others.logit_idx)),
            wanted.cu_num_rows,
        )

    def find_uses(self, idx_mapping_np: np.ndarray) -> int:
        """Return the bits of `Uses` of which one of these requests has need."""
        uses = 0
        for bits in self._uses_np[idx_mapping_np].tolist():
            uses |= bits
        return uses

    def find_logprob_rows(self, rows: SamplingRows) -> LogprobRows | None:
        """Return the rows whose log-probabilities somebody wants, None if nobody does.

        Where only the device knows whose the rows are, all of them.
        """
        if not self.find_uses(rows.idx_mapping_np) & Uses.LOGPROBS:
            return None
        layout = rows.layout
        num_logprobs = self.states.num_logprobs_np[rows.idx_mapping_np]
        is_wanted = num_logprobs != NO_LOGPROBS
        is_wanted &= layout.is_sampling_np
        if not is_wanted.any():
            return None
        widest = int(num_logprobs[is_wanted].max())
        if not layout.is_exact_on_host:
            return LogprobRows(widest, None, layout.cu_num_logits)
        num_rows = np.diff(layout.verified_cu_num_logits_np)
        boundaries = prefix_sum(num_rows * is_wanted).tolist()
        if is_wanted.all():
            has_one_row = layout.has_one_row_per_req
            return LogprobRows(widest, None, None if has_one_row else boundaries)
        logit_idx = np.flatnonzero(np.repeat(is_wanted, num_rows))
        return LogprobRows(widest, to_device(logit_idx, self._device), boundaries)

    def post_update(
        self, idx_mapping: torch.Tensor, sampler_output: SamplerOutput
    ) -> None:
        """Count a step's committed tokens.

        Args:
            idx_mapping: [num_reqs] int32, batch_idx -> request state row.
            sampler_output: of the step.
        """
        # No request uses penalties. Skip the launch.
        if self.penalties.num_used > 0:
            count_sampled_tokens(
                idx_mapping,
                sampler_output.sampled_token_ids,
                sampler_output.num_sampled,
                self.penalties,
            )

    def _sample_rows(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        apply_grammar: Effect | None,
        uses: int,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Return a token a row, and the log-probabilities that are wanted."""
        logprob_rows = self.find_logprob_rows(rows) if uses & Uses.LOGPROBS else None
        effects = self._effects(rows, apply_grammar, uses)
        scored = None
        if logprob_rows is not None and self.is_raw_mode:
            scored = logprob_rows.select(logits)
            if effects and scored is logits:
                scored = logits.clone()
        for effect in effects:
            effect(logits)
        sampled = gumbel_sample(
            logits,
            rows.expanded_idx_mapping,
            self.states.temperature.gpu,
            self.states.seeds.gpu,
            rows.positions,
            is_all_greedy=not uses & Uses.NOISE,
        )
        if logprob_rows is None:
            return sampled, None
        if scored is None:
            scored = logprob_rows.select(logits)
        return sampled, self._compute_logprobs(scored, sampled, rows, logprob_rows)

    def _effects(
        self, rows: SamplingRows, apply_grammar: Effect | None, uses: int
    ) -> list[Effect]:
        mapping = rows.expanded_idx_mapping
        states = self.states
        effects = [] if apply_grammar is None else [apply_grammar]
        if uses & Uses.LOGIT_BIAS:
            effects.append(
                partial(
                    apply_logit_bias,
                    expanded_idx_mapping=mapping,
                    biases=self.logit_bias.biases,
                )
            )
        if uses & Uses.ALLOWED_TOKEN_IDS:
            effects.append(
                partial(
                    apply_allowed_token_ids,
                    expanded_idx_mapping=mapping,
                    is_used=self.allowed_token_ids.is_used.gpu,
                    bitmask=self.allowed_token_ids.bitmask,
                )
            )
        if uses & Uses.MIN_TOKENS:
            effects.append(
                partial(
                    apply_min_tokens,
                    expanded_idx_mapping=mapping,
                    positions=rows.positions,
                    stop_token_ids=self.min_tokens.stop_token_ids,
                    min_stop_position=self.min_tokens.min_stop_position.gpu,
                )
            )
        effects += self._history_effects(rows, uses)
        if uses & Uses.TEMPERATURE:
            effects.append(
                partial(
                    apply_temperature,
                    expanded_idx_mapping=mapping,
                    temperature=states.temperature.gpu,
                )
            )
        if uses & Uses.MIN_P:
            effects.append(
                partial(
                    apply_min_p, expanded_idx_mapping=mapping, min_p=states.min_p.gpu
                )
            )
        if uses & Uses.TOP_K_TOP_P:
            effects.append(
                partial(
                    apply_top_k_top_p,
                    expanded_idx_mapping=mapping,
                    top_k=states.top_k.gpu,
                    top_p=states.top_p.gpu,
                )
            )
        return effects

    def _history_effects(self, rows: SamplingRows, uses: int) -> list[Effect]:
        effects: list[Effect] = []
        if uses & Uses.PENALTIES:
            effects.append(
                partial(
                    apply_penalties,
                    expanded_idx_mapping=rows.expanded_idx_mapping,
                    expanded_local_pos=rows.expanded_local_pos,
                    positions=rows.positions,
                    input_ids=rows.input_ids,
                    all_token_ids=rows.all_token_ids,
                    state=self.penalties,
                    first_logit_idx=rows.first_logit_idx,
                )
            )
        if uses & Uses.BAD_WORDS:
            effects.append(
                partial(
                    apply_bad_words,
                    expanded_idx_mapping=rows.expanded_idx_mapping,
                    expanded_local_pos=rows.expanded_local_pos,
                    positions=rows.positions,
                    input_ids=rows.input_ids,
                    all_token_ids=rows.all_token_ids,
                    state=self.bad_words,
                    first_logit_idx=rows.first_logit_idx,
                )
            )
        return effects

    def _compute_logprobs(
        self,
        logits: torch.Tensor,
        sampled: torch.Tensor,
        rows: SamplingRows,
        logprob_rows: LogprobRows,
    ) -> LogprobsTensors:
        chosen = self.states.chosen_token_ids
        has_chosen = chosen.lengths.np[rows.idx_mapping_np].any()
        return compute_topk_scores(
            logits,
            logprob_rows.num_logprobs,
            logprob_rows.select(sampled),
            logprob_rows.cu_num_rows,
            logits_mode=self.logits_mode,
            chosen_token_ids=chosen if has_chosen else None,
            expanded_idx_mapping=logprob_rows.select(rows.expanded_idx_mapping),
        )
