"""What llama.cpp predicts in a text, as its program `llama-perplexity` tells it."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

# Log-probabilities further below a row's largest are told as if they were here.
MAX_BELOW = 16.0
Window = tuple[torch.Tensor, torch.Tensor]


def run_llama_perplexity(
    program: str, model: str, text: str, window: int
) -> Iterator[Window]:
    """Yield the full windows of a text, as `read_log_probs` does.

    Args:
        program: path of `llama-perplexity`.
        model: a GGUF file.
        text: of at least two windows.
        window: tokens; each begins without what was before it.
    """
    with tempfile.TemporaryDirectory() as folder:
        text_path, output_path = Path(folder) / "text", Path(folder) / "log_probs"
        text_path.write_text(text, encoding="utf-8")
        command = [program, "--model", model, "--file", text_path, "--no-escape"]
        command += ["--ctx-size", str(window), "--save-all-logits", output_path]
        # In place of a window's first token there would be one that begins a text.
        command += ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode or not output_path.exists():
            raise SystemExit(f"llama-perplexity failed:\n{run.stderr[-4000:]}")
        yield from read_log_probs(output_path)


def read_log_probs(path: Path) -> Iterator[Window]:
    """Yield the windows of a file of `llama-perplexity --save-all-logits`.

    Yields:
        The n tokens of a window, and [n - n // 2 - 1, vocab_size] log-probabilities of
        the tokens after its first half and one.
    """
    with path.open("rb") as file:
        if file.read(8) != b"_logits_":
            raise SystemExit(f"{path} holds no log-probabilities")
        window, vocab_size, num_windows = np.fromfile(file, np.int32, 3).tolist()
        token_ids = np.fromfile(file, np.int32, num_windows * window)
        # A row: scale and smallest value as float32, then integers, an even number.
        shape = window - window // 2 - 1, 4 + (vocab_size + 1) // 2 * 2
        for ids in token_ids.astype(np.int64).reshape(num_windows, window):
            rows = np.fromfile(file, np.uint16, shape[0] * shape[1]).reshape(shape)
            scale, smallest = np.split(rows[:, :4].copy().view(np.float32), 2, axis=1)
            log_probs = rows[:, 4 : 4 + vocab_size] * scale + smallest
            yield torch.from_numpy(ids), torch.from_numpy(log_probs)
