"""Small GGUF files, written by the gguf package."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_tokenizer(
    path: Path,
    kind: str,
    tokens: Sequence[str],
    *,
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    types: Sequence[int] = (),
    pre: str | None = None,
    **numbers: int | bool,
) -> str:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges:
        writer.add_token_merges(list(merges))
    if scores:
        writer.add_token_scores(list(scores))
    if types:
        writer.add_token_types(list(types))
    for name, value in numbers.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
