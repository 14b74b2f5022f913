"""What quantised weights change: logits, the likeliest token, and perplexity.

    .venv/bin/python benchmarks/quantization_error.py

A model's own float32 weights are the reference, with a KV cache in float32: of a GGUF
file, its dequantised ones.
All predictions are of the text's own tokens before them, in windows.

With `--llama-perplexity`, llama.cpp's program of this name, its figures stand beside
ours. It predicts the second half of each full window only, and tells no logit that is
below the likeliest by more than 16; so all figures are then of such predictions.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from llama_perplexity import MAX_BELOW, run_llama_perplexity

from vllm.config import VllmConfig
from vllm.config.cache import CACHE_DTYPES
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.interfaces import CausalLM
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.worker.gpu.attn_utils import choose_kv_cache_dtype

REPOSITORY = Path(__file__).resolve().parent.parent
TEXTS = (REPOSITORY / "benchmarks/chat_prompts.jsonl", REPOSITORY / "LICENSE")
CPU = torch.device("cpu")
BLOCK_SIZE = 16
WINDOW = 256


@dataclass
class Error:
    """Sums over the predictions of a text."""

    num_tokens: int = 0
    squared_error: float = 0.0
    squared_spread: float = 0.0
    num_agreeing: int = 0
    divergence: float = 0.0
    loss: float = 0.0
    reference_loss: float = 0.0

    def add(
        self, logits: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Add the predictions [n, vocab_size] of tokens [n]."""
        self.num_tokens += len(ids)
        # A constant added to all logits of a row changes nothing.
        centred = reference - reference.mean(-1, keepdim=True)
        difference = logits - logits.mean(-1, keepdim=True) - centred
        self.squared_error += float(difference.square().mean(-1).sum())
        self.squared_spread += float(centred.square().mean(-1).sum())
        agreeing = logits.argmax(-1) == reference.argmax(-1)
        self.num_agreeing += int(agreeing.sum())
        log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum())
        self.loss -= float(log_q.gather(1, ids[:, None]).sum())
        self.reference_loss -= float(log_p.gather(1, ids[:, None]).sum())

    def __str__(self) -> str:
        """The figures of the text in one line."""
        error = math.sqrt(self.squared_error / self.squared_spread)
        perplexity = math.exp(self.loss / self.num_tokens)
        reference = math.exp(self.reference_loss / self.num_tokens)
        agreement = self.num_agreeing / self.num_tokens
        divergence = self.divergence / self.num_tokens
        return (
            f"{self.num_tokens} tokens: logit error {error:.2%} of their spread, same "
            f"likeliest token {agreement:.2%}, divergence {divergence:.5f} nats, "
            f"perplexity {perplexity:.3f} against {reference:.3f} "
            f"({perplexity / reference - 1:+.2%})"
        )


def compute_logits(
    model: CausalLM, token_ids: torch.Tensor, cache_dtype: str
) -> torch.Tensor:
    """Return [n, vocab_size] of one sequence [n]."""
    dtype = choose_kv_cache_dtype(cache_dtype, torch.float32)
    specs = model.get_kv_cache_specs(BLOCK_SIZE, dtype)
    spec = next(iter(specs.values()))
    num_tokens = len(token_ids)
    # Block 0 is the null block.
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    shape = get_attn_backend(CPU, torch.float32).get_kv_cache_shape(
        num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_size
    )
    kv_caches = {name: torch.zeros(shape, dtype=spec.dtype) for name in specs}
    positions = torch.arange(num_tokens)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.arange(1, num_blocks, dtype=torch.int32)[None],
        slot_mapping=positions + BLOCK_SIZE,
        num_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        block_size=BLOCK_SIZE,
    )
    context = ForwardContext(metadata, kv_caches)
    with torch.inference_mode(), set_forward_context(context):
        hidden = model(token_ids, positions)
        assert isinstance(hidden, torch.Tensor), "nothing is tapped"
        return model.compute_logits(hidden)


def read_text(path: Path) -> str:
    """Return a file's text; of lines of JSON, their prompts and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    pieces = []
    for line in map(json.loads, text.splitlines()):
        messages = line.get("messages", [])
        pieces += [line["prompt"]] if not messages else [m["content"] for m in messages]
    return "\n".join(pieces)


def load(config: VllmConfig, quantization: str) -> CausalLM:
    """Return the model with its weights in one form."""
    model_config = replace(config.model_config, quantization=quantization)
    return load_model(replace(config, model_config=model_config), CPU)


@dataclass(frozen=True)
class Scope:
    """Which predictions are compared, and how far down.

    Args:
        windows: tokens; none sees what is in another.
        first: index of the first prediction of a window.
        max_below: a logit further below its row's largest counts as if it were there.
    """

    windows: tuple[torch.Tensor, ...]
    first: int = 0
    max_below: float = math.inf

    def predict(
        self, model: CausalLM, cache_dtype: str = "auto"
    ) -> Iterator[torch.Tensor]:
        """Yield the logits of each window."""
        for window in self.windows:
            yield compute_logits(model, window, cache_dtype)[self.first : -1]

    def predict_llama_cpp(
        self, program: str, model: str, text: str
    ) -> Iterator[torch.Tensor]:
        """Yield llama.cpp's logits of each window."""
        found = run_llama_perplexity(program, model, text, WINDOW)
        for window, (token_ids, log_probs) in zip(self.windows, found, strict=True):
            assert torch.equal(window, token_ids), "it reads other tokens in the text"
            yield log_probs

    def compare(
        self, predictions: Iterable[torch.Tensor], reference: CausalLM
    ) -> Error:
        """Return the error of the logits of each window."""
        error = Error()
        expected = self.predict(reference)
        for window, logits, exact in zip(
            self.windows, predictions, expected, strict=True
        ):
            ids = window[self.first + 1 :]
            error.add(self._clip(logits), self._clip(exact), ids)
        return error

    def _clip(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.maximum(logits.amax(-1, keepdim=True) - self.max_below)


def make_scope(token_ids: torch.Tensor, is_beside_llama_cpp: bool) -> Scope:
    """Return what is compared of a text."""
    windows = token_ids.split(WINDOW)
    if not is_beside_llama_cpp:
        return Scope(windows)
    full = tuple(window for window in windows if len(window) == WINDOW)
    return Scope(full, WINDOW // 2, MAX_BELOW)


def main() -> None:
    """Print a line a text and quantisation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the embedded one by default")
    parser.add_argument("--text", type=Path, nargs="+", default=list(TEXTS))
    parser.add_argument("--quantization", nargs="+", default=["gguf", "int8"])
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto")
    parser.add_argument("--llama-perplexity", help="llama.cpp's program: beside it")
    args = parser.parse_args()
    config = EngineArgs(
        model=args.model, speculative_config=None, use_tqdm_on_load=False
    ).create_engine_config()
    tokenizer = Tokenizer.from_path(config.model_config.tokenizer)
    texts = {path.name: read_text(path) for path in args.text}
    scopes = {
        name: make_scope(
            torch.tensor(tokenizer.encode(text)), bool(args.llama_perplexity)
        )
        for name, text in texts.items()
    }
    reference = load(config, "none")
    for quantization in args.quantization:
        model = load(config, quantization)
        for name, scope in scopes.items():
            error = scope.compare(scope.predict(model, args.kv_cache_dtype), reference)
            print(f"{quantization}, {name}, {error}", flush=True)
    if args.llama_perplexity:
        program = args.llama_perplexity, config.model_config.model
        for name, scope in scopes.items():
            predictions = scope.predict_llama_cpp(*program, texts[name])
            error = scope.compare(predictions, reference)
            print(f"llama.cpp, {name}, {error}", flush=True)


if __name__ == "__main__":
    main()
