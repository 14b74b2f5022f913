"""The target's states that a drafter reads and learns from, computed or from disk."""

import json
import os
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from tqdm.auto import tqdm

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.model_loader import load_model
from vllm.speculator_training.dataset import Sequence
from vllm.speculator_training.settings import TrainingError
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.selector import get_attn_backend

_BLOCK_SIZE = 16
# Sequences that are computed, and noted, at once.
_NUM_AT_ONCE = 8
# Rows of the whole vocabulary at once, which bounds their memory.
_NUM_LOGIT_ROWS = 64


@dataclass(frozen=True)
class Features:
    """What a drafter reads and learns from, for the S tokens of a sequence.

    Args:
        states: [S, number of taps + 1, hidden_size], the final normed state last.
        normalizers: [S] float32, the logarithm of the sum of exponentials of all of
            the target's logits; 0 before the answer.
    """

    states: torch.Tensor
    normalizers: torch.Tensor


class TargetRunner:
    """Runs whole sequences through the target.

    Args:
        layer_ids: tapped, as `SupportsTaps` counts.
        max_tokens: of the longest sequence.
        compute_dtype: of the linear layers' products.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        layer_ids: tuple[int, ...],
        max_tokens: int,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = torch.device(vllm_config.device_config.device)
        target = load_model(vllm_config, self.device)
        if not isinstance(target, DenseCausalLM):
            raise TrainingError(
                f"{vllm_config.model_config.hf_config.architecture} does not show the "
                "states of its layers, which a drafter reads"
            )
        self.target = target
        target.set_aux_hidden_state_layers(layer_ids)
        self._lm_head: nn.Module = target.lm_head
        if compute_dtype != torch.float32 and target.dtype == torch.float32:
            _replace_linears(target.model, compute_dtype)
            self._lm_head = _HalfLinear(target.lm_head, compute_dtype)
        specs = target.get_kv_cache_specs(_BLOCK_SIZE, target.dtype)
        spec = next(iter(specs.values()))
        self._blocks_a_sequence = -(-max_tokens // _BLOCK_SIZE)
        num_blocks = 1 + _NUM_AT_ONCE * self._blocks_a_sequence
        backend = get_attn_backend(self.device, target.dtype)
        shape = backend.get_kv_cache_shape(
            num_blocks, _BLOCK_SIZE, spec.num_kv_heads, spec.head_size
        )
        self._kv_caches = {
            name: torch.zeros(shape, dtype=spec.dtype, device=self.device)
            for name in specs
        }
        # Block 0 is the null block.
        self._block_table = torch.arange(
            1, num_blocks, dtype=torch.int32, device=self.device
        ).view(_NUM_AT_ONCE, -1)

    @torch.no_grad()
    def run(self, sequences: Items[Sequence]) -> list[Features]:
        """Return the features of some sequences, as many at once as there is room."""
        return [
            features
            for start in range(0, len(sequences), _NUM_AT_ONCE)
            for features in self._run(sequences[start : start + _NUM_AT_ONCE])
        ]

    def _run(self, sequences: Items[Sequence]) -> list[Features]:
        lengths = [len(sequence.token_ids) for sequence in sequences]
        positions = torch.cat([torch.arange(length) for length in lengths])
        first_blocks = 1 + torch.arange(len(lengths)) * self._blocks_a_sequence
        first_slots = first_blocks.repeat_interleave(torch.tensor(lengths))
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        metadata = AttentionMetadata(
            query_start_loc=starts.to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=self._block_table[: len(lengths)],
            slot_mapping=(positions + first_slots * _BLOCK_SIZE).to(self.device),
            num_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            block_size=_BLOCK_SIZE,
        )
        token_ids = torch.cat([sequence.token_ids for sequence in sequences])
        with set_forward_context(ForwardContext(metadata, self._kv_caches)):
            final, taps = self.target(
                token_ids.to(self.device), positions.to(self.device)
            )
        pieces = torch.stack([*taps, final], dim=1).split(lengths)
        return [
            Features(states, self._compute_normalizers(states[:, -1], sequence))
            for states, sequence in zip(pieces, sequences, strict=True)
        ]

    def _compute_normalizers(
        self, final: torch.Tensor, sequence: Sequence
    ) -> torch.Tensor:
        num_prompt_tokens = sequence.num_prompt_tokens
        rows = final[num_prompt_tokens:].split(_NUM_LOGIT_ROWS)
        before = torch.zeros(num_prompt_tokens, device=final.device)
        return torch.cat(
            [before, *(self._lm_head(part).float().logsumexp(dim=-1) for part in rows)]
        )

    @torch.no_grad()
    def compute_logits(self, final: torch.Tensor) -> torch.Tensor:
        """Return [n, vocab_size] float32 of final states [n, hidden_size]."""
        return self.target.compute_logits(final.to(self.target.dtype))

    @torch.no_grad()
    def head_rows(self, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Return [n, hidden_size] float32, the output layer's rows; None for all."""
        rows = self.target.lm_head.unpack().float()
        return rows if token_ids is None else rows[token_ids]

    def final_norm(self) -> torch.Tensor:
        """Return [hidden_size] float32, the weight of the norm before the output."""
        return self.target.model.norm.weight.detach().float()

    def embedding(self) -> torch.Tensor:
        """Return [vocab_size, hidden_size] float32."""
        return self.target.model.embed_tokens.weight.detach().float()


class FeatureStore:
    """States of all tokens of some sequences.

    Args:
        num_features: taps, plus one for the final state.
        path: of a file for them; None computes them whenever they are asked for.
        dtype: in that file.
    """

    def __init__(
        self,
        runner: TargetRunner,
        sequences: list[Sequence],
        num_features: int,
        path: str | None,
        dtype: torch.dtype,
    ) -> None:
        self.runner = runner
        self.sequences = sequences
        self._path = path
        lengths = [len(sequence.token_ids) for sequence in sequences]
        self._starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        hidden_size = runner.target.model.norm.weight.shape[0]
        self._row_shape = (num_features, hidden_size)
        self._rows: torch.Tensor | None = None
        if path is not None:
            num_tokens = self._starts[-1]
            num_values = num_tokens * num_features * hidden_size
            self._rows = torch.from_file(
                path, shared=True, size=num_values, dtype=dtype
            ).view(-1, num_features, hidden_size)
            self._normalizers = torch.from_file(
                f"{path}.normalizers", shared=True, size=num_tokens
            )

    def fill(self) -> None:
        """Compute what the file lacks; a killed run's part is kept.

        Raises:
            TrainingError: a state has no value in the file's dtype.
        """
        if self._rows is None:
            return
        num_done = self._read_note()
        total = len(self.sequences)
        with tqdm(total=total, initial=num_done, desc="States", unit="seq") as bar:
            while num_done < total:
                part = self.sequences[num_done : num_done + _NUM_AT_ONCE]
                for idx, features in enumerate(self.runner.run(part), num_done):
                    self._put(idx, features)
                num_done += len(part)
                self._write_note(num_done)
                bar.update(len(part))

    def _put(self, idx: int, features: Features) -> None:
        assert self._rows is not None, "asked for with a file only"
        rows = features.states.to(self._rows.dtype)
        if not rows.isfinite().all():
            raise TrainingError(
                f"the target's states do not fit {self._rows.dtype}: choose "
                "another --feature-dtype"
            )
        span = slice(self._starts[idx], self._starts[idx + 1])
        self._rows[span] = rows.cpu()
        self._normalizers[span] = features.normalizers.cpu()

    def get(self, indices: Items[int]) -> list[Features]:
        """Return the features of some sequences, with states in float32."""
        if self._rows is None:
            computed = self.runner.run([self.sequences[idx] for idx in indices])
            return [Features(f.states.float(), f.normalizers) for f in computed]
        device = self.runner.device
        spans = [slice(self._starts[idx], self._starts[idx + 1]) for idx in indices]
        return [
            Features(
                self._rows[span].to(device).float(), self._normalizers[span].to(device)
            )
            for span in spans
        ]

    def measure_taps(self, indices: Items[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and standard deviations of the taps of some answers' tokens.

        Both are [number of taps * hidden_size] float64; a deviation is at least a
        thousandth of all dimensions' median, for one that never changes.
        """
        count = 0
        total, squares = torch.zeros(
            2, 1, dtype=torch.float64, device=self.runner.device
        )
        for idx in indices:
            (features,) = self.get([idx])
            first = self.sequences[idx].num_prompt_tokens
            taps = features.states[first:, :-1].flatten(1).double()
            count += len(taps)
            total = total + taps.sum(dim=0)
            squares = squares + taps.square().sum(dim=0)
        means = total / count
        variances = squares / count - means.square()
        deviations = variances.clamp(min=0).sqrt()
        return means, deviations.clamp(min=max(1e-3 * float(deviations.median()), 1e-9))

    def _key(self) -> list[int]:
        return [*self._row_shape, self._starts[-1], len(self.sequences)]

    def _read_note(self) -> int:
        try:
            with open(f"{self._path}.json", encoding="utf-8") as file:
                note = json.load(file)
            return note["num_done"] if note["key"] == self._key() else 0
        except (OSError, ValueError, KeyError):
            return 0

    def _write_note(self, num_done: int) -> None:
        path = f"{self._path}.json.partial"
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"num_done": num_done, "key": self._key()}, file)
        os.replace(path, f"{self._path}.json")


class _HalfLinear(nn.Module):
    """A linear layer that multiplies in a narrow dtype, and adds up in float32."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.unpack().to(dtype), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight).float()
        return y if self.bias is None else y + self.bias

    def compiled_weights(self) -> None:
        """Return None: no compiled operator multiplies so."""


@torch.no_grad()
def _replace_linears(module: nn.Module, dtype: torch.dtype) -> None:
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, _HalfLinear(child, dtype))
        else:
            _replace_linears(child, dtype)
