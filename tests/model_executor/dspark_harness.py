"""A tiny target, drafters for it, and a cache to run them over."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.model_executor.harness import BLOCK_SIZE, Session, load
from tests.model_executor.hf_reference import TINY, tiny_model
from vllm._cpu_ops_drafter import ContextPiece
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.model_executor.layers.quantization.methods import (
    UNQUANTIZED,
    QuantizationMethod,
)
from vllm.model_executor.model_loader.dspark_loader import load_dspark_model
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.speculator_training.checkpoint import Verifier, save_speculator
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.transformers_utils.configs.dspark import (
    DSparkConfig,
    load_dspark_config,
    parse_dspark_config,
)
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.selector import get_attn_backend

NUM_POSITIONS = 256
MASK = 95
CPU = torch.device("cpu")
VERIFIER = Verifier("tiny", "Qwen3ForCausalLM")


def make_target(folder: Path, **options: object) -> DenseCausalLM:
    tiny_model("qwen3", num_hidden_layers=4, **options).save_pretrained(folder)
    return load(str(folder))


def make_config(**changes: object) -> DSparkConfig:
    raw = {
        **{name: value for name, value in TINY.items() if name != "pad_token_id"},
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_target_layers": 4,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 0, 2],
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 8,
    }
    return parse_dspark_config(raw | changes, "config.json")


def make_drafter(
    config: DSparkConfig,
    target: DenseCausalLM,
    draft_token_ids: torch.Tensor | None = None,
    seed: int = 0,
) -> DSparkTrainingModel:
    """Return a random drafter in which no weight is a special case such as 0 or 1."""
    embedding = target.model.embed_tokens.weight
    head = target.lm_head.unpack()
    if draft_token_ids is not None:
        head = head[draft_token_ids]
    model = DSparkTrainingModel(config, NUM_POSITIONS, embedding, head)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    return model


def load_drafter(
    folder: Path, target: DenseCausalLM, method: QuantizationMethod = UNQUANTIZED
) -> DSparkModel:
    config = load_dspark_config(str(folder))
    return load_dspark_model(str(folder), config, target, NUM_POSITIONS, CPU, method)


def save_and_load(
    folder: Path,
    model: DSparkTrainingModel,
    target: DenseCausalLM,
    draft_token_ids: torch.Tensor | None = None,
    method: QuantizationMethod = UNQUANTIZED,
) -> DSparkModel:
    save_speculator(str(folder), model, VERIFIER, draft_token_ids)
    return load_drafter(folder, target, method)


def write_deepspec_config(folder: Path) -> None:
    """Turn the config.json of a saved drafter into the other published form."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    names = (
        *("block_size", "mask_token_id", "markov_rank", "markov_head_type"),
        *("enable_confidence_head", "confidence_head_with_markov"),
        "num_target_layers",
    )
    deepspec = saved["transformer_layer_config"] | {
        "architectures": ["Qwen3DSparkModel"],
        # A tap is named by the layer that it enters, or by the one that it leaves.
        "target_layer_ids": [i - 1 for i in saved["aux_hidden_state_layer_ids"]],
        **{name: saved[name] for name in names},
    }
    path.write_text(json.dumps(deepspec))


def target_taps(
    target: DenseCausalLM, config: DSparkConfig, token_ids: Sequence[int]
) -> list[torch.Tensor]:
    """Return the taps of every token, [T, hidden_size] each."""
    target.set_aux_hidden_state_layers(config.aux_hidden_state_layer_ids)
    _, taps = Session(target).forward(token_ids)
    target.set_aux_hidden_state_layers(())
    return taps


@dataclass(frozen=True)
class Block:
    """One request's part of a draft pass."""

    req: int
    anchor_id: int
    position: int


class DraftSession:
    """Requests on a drafter, each with cache blocks of its own."""

    def __init__(self, model: DSparkModel, num_reqs: int = 1) -> None:
        self.model = model
        specs = model.get_kv_cache_specs(BLOCK_SIZE, model.dtype)
        spec = next(iter(specs.values()))
        backend = get_attn_backend(CPU, model.dtype)
        per_req = NUM_POSITIONS // BLOCK_SIZE
        shape = backend.get_kv_cache_shape(
            per_req * num_reqs + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_size
        )
        self.kv_caches = {name: torch.zeros(shape, dtype=spec.dtype) for name in specs}
        # Block 0 is the null block.
        ids = torch.arange(1, per_req * num_reqs + 1, dtype=torch.int32)
        self.block_table = ids.view(num_reqs, per_req)

    def write(
        self,
        taps: list[torch.Tensor],
        start: int,
        end: int,
        req: int = 0,
        position_shift: int = 0,
    ) -> None:
        """Append the tokens at start .. end - 1 to a request's context.

        Args:
            position_shift: what they are rotated by too much.
        """
        slots = torch.arange(start, end)
        metadata = self._metadata([req], [slots], is_causal=True)
        context = ForwardContext(metadata, self.kv_caches)
        with torch.inference_mode(), set_forward_context(context):
            piece = ContextPiece(
                [tap[start:end] for tap in taps],
                slots + position_shift,
                metadata.slot_mapping,
            )
            self.model.write_context([piece])

    def draft(self, *blocks: Block, mask_token_id: int = MASK) -> torch.Tensor:
        """Return the states of one pass over a block of each request."""
        return self.run(*self._lay_out(blocks, mask_token_id))

    def maybe_draft(
        self, *blocks: Block, num_drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the likeliest drafts, all that there can be, and their scores."""
        input_ids, slots, reqs = self._lay_out(blocks, MASK)
        metadata = self._metadata(reqs, slots, is_causal=False)
        context = ForwardContext(metadata, self.kv_caches)
        num_steps = self.model.config.num_draft_tokens
        with torch.inference_mode(), set_forward_context(context):
            return self.model.maybe_draft(
                input_ids, torch.cat(slots), num_drafts, num_steps, 2, None
            )

    def _lay_out(
        self, blocks: tuple[Block, ...], mask_token_id: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        size = self.model.config.block_size
        steps = torch.arange(size)
        positions = [block.position + steps for block in blocks]
        input_ids = torch.full((len(blocks), size), mask_token_id)
        input_ids[:, 0] = torch.tensor([block.anchor_id for block in blocks])
        return input_ids.flatten(), positions, [block.req for block in blocks]

    def run(
        self, input_ids: torch.Tensor, slots: list[torch.Tensor], reqs: list[int]
    ) -> torch.Tensor:
        metadata = self._metadata(reqs, slots, is_causal=False)
        context = ForwardContext(metadata, self.kv_caches)
        with torch.inference_mode(), set_forward_context(context):
            return self.model(input_ids, torch.cat(slots))

    def _metadata(
        self, reqs: list[int], slots: list[torch.Tensor], is_causal: bool
    ) -> AttentionMetadata:
        lengths = [len(one) for one in slots]
        first_slots = [int(self.block_table[req, 0]) * BLOCK_SIZE for req in reqs]
        slot_mapping = torch.cat(
            [first + one for first, one in zip(first_slots, slots, strict=True)]
        )
        ends = [int(one[-1]) + 1 for one in slots]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return AttentionMetadata(
            query_start_loc=starts,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=self.block_table[reqs],
            slot_mapping=slot_mapping,
            num_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(ends),
            block_size=BLOCK_SIZE,
            is_causal=is_causal,
        )


def step_logits(
    model: DSparkModel, hidden: torch.Tensor, predecessors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [R, K, V_d] and confidences [R, K], one draft at a time.

    Args:
        hidden: [R, K, hidden_size].
        predecessors: [R, K] int64.
    """
    state = model.initial_markov_state(hidden.shape[0], hidden)
    logits, embeddings = [], []
    for k in range(hidden.shape[1]):
        embedding = model.markov_embed(predecessors[:, k])
        bias, state = model.markov_bias(embedding, hidden[:, k], state)
        base = model.compute_base_logits(hidden[:, k])
        logits.append(base if bias is None else base + bias)
        embeddings.append(embedding)
    stacked = None if embeddings[0] is None else torch.stack(embeddings, 1)
    return torch.stack(logits, 1), model.compute_confidence(hidden, stacked)
