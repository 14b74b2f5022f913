"""Who drafts, how much, and how drafts are verified."""

from dataclasses import dataclass, field

from vllm.config.cost_profile import CostProfile
from vllm.transformers_utils.config import HfConfig
from vllm.transformers_utils.configs.dspark import DSparkConfig

# Drafters of whole blocks, which read the target's inner states.
BLOCK_METHODS = ("dspark", "dflash")
SPECULATIVE_METHODS = ("ngram", "draft_model", *BLOCK_METHODS)
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
REJECTION_SAMPLE_METHODS = ("standard", "synthetic")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding, resolved.

    Args:
        method: one of SPECULATIVE_METHODS.
        num_speculative_tokens: drafts that a request can have in one step.
        model: the drafter's checkpoint, as a path; None for ngram.
        draft_hf_config: the numbers of a draft_model, else None.
        dspark_config: those of a drafter of blocks, else None.
        max_model_len: positions up to which the drafter drafts.
        draft_sample_method: greedy drafts are the drafter's argmax; probabilistic ones
            are drawn from its distribution.
        rejection_sample_method: standard keeps the target's distribution; synthetic
            accepts by given rates, whatever the target says.
        synthetic_acceptance_rates: for each position, the share of steps in which the
            draft there is accepted; non-increasing.
        prompt_lookup_min: shortest suffix that ngram looks for.
        prompt_lookup_max: longest one; longer matches win.
        enable_adaptive_verification: each step verifies the number of drafts with most
            tokens a second, and none are proposed where that pays more; otherwise every
            draft is verified.
        cost_profile: what steps cost, by a file of the user; None: it is measured.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    draft_hf_config: HfConfig | None = None
    dspark_config: DSparkConfig | None = None
    max_model_len: int = 0
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] = field(default=())
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    enable_adaptive_verification: bool = False
    cost_profile: CostProfile | None = None

    @property
    def has_draft_distributions(self) -> bool:
        """Whether a draft is drawn, so that its distribution decides about it."""
        return self.method != "ngram" and self.draft_sample_method == "probabilistic"

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots behind a request's tokens that the drafter writes."""
        if self.method == "ngram":
            return 0
        if self.dspark_config is not None:
            return self.dspark_config.num_lookahead_slots
        return self.num_speculative_tokens
