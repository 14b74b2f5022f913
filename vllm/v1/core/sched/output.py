"""Messages from the scheduler to the worker: plain Python and NumPy, no behaviour."""

from dataclasses import dataclass, field

import numpy as np

from vllm.sampling_params import SamplingParams


@dataclass
class NewRequestData:
    """A request that takes a row in the worker: new, or resumed after preemption.

    Args:
        prefill_token_ids: every token known so far; beyond the prompt if resumed.
        block_ids: one list a KV-cache group.
        num_computed_tokens: tokens whose KV is already in the blocks (prefix cache).
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    """Requests that the worker has a row for, as parallel lists.

    Args:
        new_block_ids: blocks to append, one list a KV-cache group; None for none.
        num_computed_tokens: before this step; an upper bound under speculation.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """One step: who runs, with how many tokens, and what has ended.

    Args:
        num_scheduled_tokens: tokens of the step for each request, drafts included.
        scheduled_spec_decode_tokens: drafts among them; requests without are absent.
        finished_req_ids: rows to free.
        preempted_req_ids: rows to free whose requests will come back as new ones.
        structured_output_request_ids: the sampling requests that a grammar constrains.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    structured_output_request_ids: list[str] = field(default_factory=list)


@dataclass
class GrammarOutput:
    """The grammar bitmask of a step, in the scheduled layout of logit rows.

    Args:
        structured_output_request_ids: the requests whose rows follow each other.
        grammar_bitmask: [rows, ceil(vocab_size / 32)] int32; a set bit allows a token.
            Each request owns its scheduled drafts + bonus rows, packed.
        num_acceptable_drafts: for each of the requests, how many leading drafts the
            grammar has seen and allowed; None when no drafts are scheduled.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray
    num_acceptable_drafts: list[int] | None = None
