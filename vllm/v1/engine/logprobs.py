"""Rows of log-probabilities into what the caller receives, with each token's text."""

from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.token_texts import TokenTable, TokenTexts
from vllm.v1.logprobs_lists import LogprobsLists


class LogprobsProcessor:
    """Collects the log-probabilities of one sequence.

    Args:
        logprobs: one dict a generated token, the sampled token first in each; None if
            they were not asked for.
        prompt_logprobs: one dict a prompt token, None for the first; None if they were
            not asked for or are not complete yet.
        cumulative_logprob: the sum over the sampled tokens.
    """

    def __init__(
        self,
        token_table: TokenTable,
        params: SamplingParams,
        prompt_token_ids: list[int],
    ) -> None:
        self._token_table = token_table
        self._texts = TokenTexts(token_table)
        self._prompt_token_ids = prompt_token_ids
        self._num_logprobs = params.num_logprobs
        # Columns of chosen ids are in the caller's order, so they have no rank.
        self._has_chosen_ids = bool(params.logprob_token_ids)
        self._num_prompt_logprobs = params.prompt_logprobs
        self.logprobs: SampleLogprobs | None = None
        self.cumulative_logprob: float | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        if self._num_logprobs is not None:
            self.logprobs = []
            self.cumulative_logprob = 0.0
        if params.prompt_logprobs is not None and len(prompt_token_ids) == 1:
            # The worker sends no rows for it.
            self.prompt_logprobs = [None]

    def update(self, rows: LogprobsLists | None, num_tokens: int) -> None:
        """Append the first `num_tokens` rows.

        Args:
            rows: one row a new token; None if the worker sent none.
        """
        if self.logprobs is None or rows is None:
            return
        assert self.cumulative_logprob is not None
        positions = make_positions(
            self._texts, rows, num_tokens, self._num_logprobs, self._has_chosen_ids
        )
        self.logprobs += positions
        sampled = rows.logprobs[:num_tokens, 0].tolist()
        self.cumulative_logprob += sum(sampled)

    def update_prompt(self, rows: LogprobsLists | None) -> None:
        """Take the rows of prompt tokens 1 to the last.

        Args:
            rows: [num_prompt_tokens - 1] rows; None if the worker sent none.
        """
        if self._num_prompt_logprobs is None or rows is None:
            return
        texts = TokenTexts(self._token_table)
        texts.advance(self._prompt_token_ids[0])
        num_rows = len(rows.sampled_token_ranks)
        self.prompt_logprobs = [
            None,
            *make_positions(texts, rows, num_rows, self._num_prompt_logprobs, False),
        ]

    def take_logprobs(self, start: int) -> SampleLogprobs | None:
        """Return the positions from `start` on."""
        return None if self.logprobs is None else self.logprobs[start:]


def make_positions(
    texts: TokenTexts,
    rows: LogprobsLists,
    num_rows: int,
    num_logprobs: int | None,
    has_chosen_ids: bool,
) -> SampleLogprobs:
    """Turn rows into dicts of token id -> Logprob, the token of the position first.

    Args:
        texts: moved forward over the tokens of the rows.
        num_logprobs: columns to keep beside the first, for a batch is as wide as its
            widest request; -1 or None keeps all.
        has_chosen_ids: the columns are chosen ids, not the most likely ones.
    """
    end = None if num_logprobs is None or num_logprobs < 0 else 1 + num_logprobs
    ids = rows.logprob_token_ids[:num_rows, :end].tolist()
    values = rows.logprobs[:num_rows, :end].tolist()
    ranks = rows.sampled_token_ranks[:num_rows].tolist()
    positions: SampleLogprobs = []
    for row_ids, row_values, token_rank in zip(ids, values, ranks, strict=True):
        token_id = row_ids[0]
        position = {token_id: Logprob(row_values[0], token_rank, texts.get(token_id))}
        rank = 1
        for column in range(1, len(row_ids)):
            candidate = row_ids[column]
            # Equal candidates share the best rank, as the token of the position does.
            if row_values[column] != row_values[column - 1] or column == 1:
                rank = column
            # Negative ids fill up rows of a batch that is wider than this request.
            if candidate in position or candidate < 0:
                continue
            position[candidate] = Logprob(
                row_values[column],
                None if has_chosen_ids else rank,
                texts.get(candidate),
            )
        positions.append(position)
        texts.advance(token_id)
    return positions
