"""The target's states that a drafter reads and learns from, computed or from disk."""

import json
import os

import torch
from tqdm.auto import tqdm

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.model_executor.model_loader import load_model
from vllm.speculator_training.dataset import Sequence
from vllm.speculator_training.settings import TrainingError
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.selector import get_attn_backend

_BLOCK_SIZE = 16
# Sequences after which the progress is noted.
_NOTE_EVERY = 64


class TargetRunner:
    """Runs whole sequences through the target, one at a time.

    Args:
        layer_ids: tapped, as `SupportsTaps` counts.
        max_tokens: of the longest sequence.
    """

    def __init__(
        self, vllm_config: VllmConfig, layer_ids: tuple[int, ...], max_tokens: int
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
        specs = target.get_kv_cache_specs(_BLOCK_SIZE)
        spec = next(iter(specs.values()))
        num_blocks = -(-max_tokens // _BLOCK_SIZE) + 1
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
        )[None]

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [S, number of taps + 1, hidden_size], the final normed state last."""
        num_tokens = len(token_ids)
        positions = torch.arange(num_tokens, device=self.device)

        def count(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        metadata = AttentionMetadata(
            query_start_loc=count(0, num_tokens),
            seq_lens=count(num_tokens),
            block_table=self._block_table,
            slot_mapping=positions + _BLOCK_SIZE,
            num_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
            block_size=_BLOCK_SIZE,
        )
        with set_forward_context(ForwardContext(metadata, self._kv_caches)):
            final, taps = self.target(token_ids.to(self.device), positions)
        return torch.stack([*taps, final], dim=1)

    @torch.no_grad()
    def compute_logits(self, final: torch.Tensor) -> torch.Tensor:
        """Return [n, vocab_size] float32 of final states [n, hidden_size]."""
        return self.target.compute_logits(final.to(self.target.dtype))

    @torch.no_grad()
    def head_rows(self, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Return [n, hidden_size] float32, the output layer's rows; None for all."""
        size = self.target.model.norm.weight.shape[0]
        rows = []
        # A unit vector's logits are a column of the weight, whatever its layout.
        for units in torch.eye(size, device=self.device).split(64):
            columns = self.compute_logits(units)
            rows.append(columns if token_ids is None else columns[:, token_ids])
        return torch.cat(rows).T.contiguous()

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
            num_values = self._starts[-1] * num_features * hidden_size
            self._rows = torch.from_file(
                path, shared=True, size=num_values, dtype=dtype
            ).view(-1, num_features, hidden_size)

    def fill(self) -> None:
        """Compute what the file lacks; a killed run's part is kept.

        Raises:
            TrainingError: a state has no value in the file's dtype.
        """
        if self._rows is None:
            return
        num_done = self._read_note()
        bar = tqdm(
            range(num_done, len(self.sequences)),
            initial=num_done,
            total=len(self.sequences),
            desc="States",
            unit="seq",
        )
        for idx in bar:
            rows = self.runner.run(self.sequences[idx].token_ids).to(self._rows.dtype)
            if not rows.isfinite().all():
                raise TrainingError(
                    f"the target's states do not fit {self._rows.dtype}: choose "
                    "another --feature-dtype"
                )
            self._rows[self._starts[idx] : self._starts[idx + 1]] = rows.cpu()
            if (idx + 1) % _NOTE_EVERY == 0 or idx + 1 == len(self.sequences):
                self._write_note(idx + 1)

    def get(self, idx: int) -> torch.Tensor:
        """Return [S, number of taps + 1, hidden_size] float32 of one sequence."""
        if self._rows is None:
            return self.runner.run(self.sequences[idx].token_ids).float()
        rows = self._rows[self._starts[idx] : self._starts[idx + 1]]
        return rows.to(self.runner.device).float()

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
