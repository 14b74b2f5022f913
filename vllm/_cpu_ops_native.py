"""Load the compiled CPU operators and call them over data pointers.

Each method has the meaning of the function of its name in `_custom_ops`. Tensors are
float32 on the CPU where nothing else is said, and their last dimension is contiguous;
checked here is what would read or write outside a tensor.
"""

import ctypes
import platform
from ctypes import c_double, c_float, c_int64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm import envs
from vllm._cpu_ops_budget import BudgetOps
from vllm._cpu_ops_checks import check_rows, check_vector
from vllm._cpu_ops_quantized import QUANTIZED_FORMATS, QuantizedOps
from vllm._cpu_ops_step import StepOps
from vllm._cpu_ops_torch import LinearStatistics
from vllm.logger import init_logger

logger = init_logger(__name__)

LANES = 16

# Build -> the level of the processor that it needs, the best last.
ISAS = {"portable": 0, "base": 1, "avx512": 2, "avx512_vnni": 3}

# What says which level the processor has: a library that runs on all of its kind. Off
# x86 the base build does.
_IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}
_RUNS_EVERYWHERE = "portable" if _IS_X86 else "base"

_DIRECTORY = Path(__file__).resolve().parent

# Beside QUANTIZED_FORMATS.
_FLOAT32_FORMAT = -1

_TYPES = {"p": c_void_p, "i": c_int64, "f": c_float, "d": c_double}

# name -> argument types (pointer, integer, float, double) and, after a colon, the
# result's.
# Short functions keep Python's lock: giving it away could cost a switch interval.
_SHORT = {
    "vllm_packed_size": "ii:i",
    "vllm_quantized_size": "iii:i",
    "vllm_quantized_rows": "piiipip:i",
    "vllm_rms_norm": "piipfpiiiii:",
    "vllm_silu_and_mul": "pipii:",
    "vllm_rotary_embedding": "ppiipiipiiii:i",
    "vllm_reshape_and_cache": "pipipipiiiii:i",
    "vllm_context_slots": "piippppiiiip:i",
    "vllm_lay_out_blocks": "ppppiiiiiiiiiiippppppppp:i",
    "vllm_lay_out_step": "piippippiipipipipppipppppp:i",
    "vllm_gather_rows": "piipiip:i",
    "vllm_scatter_rows": "pipipi:i",
    "vllm_compute_slot_mapping": "piipipiip:i",
    "vllm_add_and_sum": "ppipp:",
    "vllm_drafts_behind": "ppip:",
    "vllm_verify_greedy": "ppipiipp:i",
    "vllm_take_accepted_prefix": "ppipiipp:i",
    "vllm_post_update": "pippppipiipp:i",
    "vllm_admit_drafts": "piippiip:i",
    "vllm_read_curves": "ppiippiipppiiffiipp:i",
    "vllm_count_outcomes": "pipiipppiii:i",
    "vllm_record_round": "pppiiippiipp:i",
    "vllm_read_rounds": "ppipipipipip:i",
    "vllm_count_round": "ppiipiipiipp:i",
    "vllm_expected_gains": "piiipip:i",
    "vllm_correct_costs": "ppppiidddddd:d",
    "vllm_noise_keys": "pppiip:",
    "vllm_block_noise_keys": "ppippiiiip:i",
}
_LONG = {
    "vllm_pack_weight": "piiip:",
    "vllm_packed_linear": "pipppiii:",
    "vllm_pack_blocks": "piiiip:",
    "vllm_pack_int8": "piiip:",
    "vllm_quantized_select": "piiipip:i",
    "vllm_quantized_linear": "pipippiii:",
    "vllm_linear_statistics": "pipipiiippiippppip:i",
    "vllm_paged_attention": "pipipipppiiiiiiiiifi:i",
    "vllm_decoder_layers": "pippip:i",
    "vllm_write_context": "ppp:i",
    "vllm_draft_blocks": "pppp:i",
    "vllm_philox_uniform": "piip:",
    "vllm_greedy_argmax": "piiip:",
    "vllm_gumbel_argmax": "pippiip:",
    "vllm_likeliest_tokens": "piiiip:i",
    "vllm_accept_drafts": "pipiiiippppiip:i",
    "vllm_write_residual_logits": "pipiiiipppii:i",
    "vllm_apply_temperature": "pippiii:i",
    "vllm_top_k_top_p": "pippii:",
    "vllm_logprob_stats": "pipiipp:i",
    "vllm_apply_bitmask": "pipipiii:i",
}


def load_native_ops(isa: str = "", directory: Path = _DIRECTORY) -> "NativeOps | None":
    """Return the operators for this processor, or None if they cannot run.

    Args:
        isa: one of ISAS forces a build; empty takes the best that can be loaded.
        directory: where the libraries are.
    """
    everywhere = directory / library_name(_RUNS_EVERYWHERE)
    if not everywhere.exists():
        return None
    _preload_openmp()
    level = read_isa_level(everywhere)
    for name, needed in reversed(ISAS.items()):
        library = directory / library_name(name)
        if isa in ("", name) and level >= needed and library.exists():
            try:
                return NativeOps(library)
            except (OSError, AttributeError) as error:
                _warn_of(library, error)
    return None


def library_name(isa: str) -> str:
    """Return the name of the file of one of ISAS."""
    return "_C_cpu.so" if isa == "base" else f"_C_cpu_{isa}.so"


def read_isa_level(library: Path) -> int:
    """Return the best level of ISAS that the processor has; -1 if it cannot be told.

    Args:
        library: one that every processor of this kind runs.
    """
    try:
        read_level = ctypes.CDLL(str(library)).vllm_isa_level
    except (OSError, AttributeError) as error:
        _warn_of(library, error)
        return -1
    read_level.restype = c_int64
    return int(read_level())


def _warn_of(library: Path, error: Exception) -> None:
    logger.warning(
        "The compiled CPU operators in %s cannot be loaded: %s", library.name, error
    )


def maybe_load_native_ops() -> "NativeOps | None":
    """Load what the environment asks for."""
    if envs.VLLM_CPU_DISABLE_OPS:
        return None
    return load_native_ops(envs.VLLM_CPU_ISA)


def _preload_openmp() -> None:
    """Make torch's OpenMP runtime, already loaded, visible to the operators."""
    bundled = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    try:
        ctypes.CDLL(
            str(bundled) if bundled.exists() else "libgomp.so.1", ctypes.RTLD_GLOBAL
        )
    except OSError as error:
        logger.warning("torch's OpenMP runtime was not found: %s", error)


class NativeOps(QuantizedOps, StepOps, BudgetOps):
    """The compiled operators of one library.

    Args:
        library: path of the shared library.
    """

    def __init__(self, library: Path) -> None:
        super().__init__()
        self.library = library
        functions: dict[str, Any] = {}
        for handle, signatures in (
            (ctypes.PyDLL(str(library)), _SHORT),
            (ctypes.CDLL(str(library)), _LONG),
        ):
            for name, signature in signatures.items():
                arguments, _, result = signature.partition(":")
                function = getattr(handle, name)
                function.argtypes = [_TYPES[kind] for kind in arguments]
                function.restype = _TYPES[result] if result else None
                functions[name.removeprefix("vllm_")] = function
        # Any: the C functions by name; ctypes checks their arguments.
        self._c: Any = SimpleNamespace(**functions)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        num_columns, size = weight.shape
        check_rows(weight)
        packed = torch.empty(self._c.packed_size(num_columns, size))
        self._c.pack_weight(
            weight.data_ptr(), weight.stride()[0], num_columns, size, packed.data_ptr()
        )
        return packed

    def packed_linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        num_columns: int,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, size = x.shape
        check_rows(x)
        self._check_dense(packed, num_columns, size)
        if bias is not None:
            check_vector(bias, num_columns)
        out = torch.empty((num_rows, num_columns))
        self._c.packed_linear(
            x.data_ptr(),
            x.stride()[0],
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_columns,
            size,
        )
        return out

    def linear_argmax(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        quant_type: str,
        num_columns: int,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        product = self._product(x, packed, quant_type, num_columns, bias)
        argmax = torch.empty(x.shape[0], dtype=torch.int64)
        nothing = None, 0, 1, None, None, None, None, 0, None
        self._c.linear_statistics(*product, argmax.data_ptr(), *nothing)
        return argmax

    def linear_statistics(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        quant_type: str,
        num_columns: int,
        bias: torch.Tensor | None,
        listed_rows: torch.Tensor,
        count: int,
        written_rows: torch.Tensor,
    ) -> LinearStatistics:
        num_rows = x.shape[0]
        product = self._product(x, packed, quant_type, num_columns, bias)
        (num_listed,), (num_written,) = listed_rows.shape, written_rows.shape
        check_vector(listed_rows, num_listed, torch.int64)
        check_vector(written_rows, num_written, torch.int64)
        statistics = LinearStatistics(
            torch.empty(num_rows, dtype=torch.int64),
            torch.empty((num_listed, count), dtype=torch.int64),
            torch.empty((num_listed, count)),
            torch.empty(num_listed),
            torch.empty((num_written, num_columns)),
        )
        failed = self._c.linear_statistics(
            *product,
            statistics.argmax.data_ptr(),
            listed_rows.data_ptr(),
            num_listed,
            count,
            statistics.ids.data_ptr(),
            statistics.products.data_ptr(),
            statistics.logsumexp.data_ptr(),
            written_rows.data_ptr(),
            num_written,
            statistics.written.data_ptr(),
        )
        if failed:
            raise IndexError(
                f"{count} of {num_columns} columns, of rows that are not increasing or "
                f"not in [0, {num_rows})"
            )
        return statistics

    def _product(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        quant_type: str,
        num_columns: int,
        bias: torch.Tensor | None,
    ) -> tuple[int | None, ...]:
        """Return how the C side is told of a product that it does not write."""
        num_rows, size = x.shape
        check_rows(x)
        quant_format = self.check_packed(packed, quant_type, num_columns, size)
        if bias is not None:
            check_vector(bias, num_columns)
        return (
            x.data_ptr(),
            x.stride()[0],
            packed.data_ptr(),
            quant_format,
            None if bias is None else bias.data_ptr(),
            num_rows,
            num_columns,
            size,
        )

    def _check_dense(self, packed: torch.Tensor, num_columns: int, size: int) -> None:
        if packed.numel() != -(-num_columns // LANES) * LANES * size:
            raise ValueError(
                f"the packed weight has {packed.numel()} elements, which is not "
                f"{num_columns} columns of {size}"
            )

    def check_packed(
        self, packed: torch.Tensor, quant_type: str, num_columns: int, size: int
    ) -> int:
        """Return the number of a packed weight's format; float32 has one too.

        Raises:
            ValueError: the weight has other sizes.
        """
        if quant_type != "float32":
            self._check_quantized(packed, quant_type, num_columns, size)
            return QUANTIZED_FORMATS[quant_type]
        self._check_dense(packed, num_columns, size)
        return _FLOAT32_FORMAT

    def decoder_layers(
        self,
        layers: int,
        num_layers: int,
        step: int,
        stream: int,
        stream_stride: int,
        kv_caches: int,
    ) -> int:
        """Run what the addresses are of; 0, or which index is outside."""
        return int(
            self._c.decoder_layers(
                layers, num_layers, step, stream, stream_stride, kv_caches
            )
        )

    def write_context(self, writer: int, context: int, kv_caches: int) -> int:
        """Run what the addresses are of; 0, or which index is outside."""
        return int(self._c.write_context(writer, context, kv_caches))

    def draft_blocks(self, drafter: int, step: int, kv_caches: int, drafts: int) -> int:
        """Run what the addresses are of; 0, or which index is outside."""
        return int(self._c.draft_blocks(drafter, step, kv_caches, drafts))

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        size = x.shape[-1]
        check_vector(weight, size)
        if out is None:
            out = torch.empty(x.shape)
        num_outer, num_inner, outer_stride, inner_stride = _row_grid(x)
        out_outer, out_inner, out_outer_stride, out_inner_stride = _row_grid(out)
        if (out_outer, out_inner, out.shape[-1]) != (num_outer, num_inner, size):
            raise ValueError(f"out has shape {tuple(out.shape)}, x {tuple(x.shape)}")
        self._c.rms_norm(
            x.data_ptr(),
            outer_stride,
            inner_stride,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            out_outer_stride,
            out_inner_stride,
            num_outer,
            num_inner,
            size,
        )
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, double_size = x.shape
        check_rows(x)
        out = torch.empty((num_rows, double_size // 2))
        self._c.silu_and_mul(
            x.data_ptr(), x.stride()[0], out.data_ptr(), num_rows, double_size // 2
        )
        return out

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        head_dim: int,
    ) -> None:
        num_tokens = positions.shape[0]
        num_positions, rotary_dim = cos_sin_cache.shape
        q_heads, q_stride = _heads(q, num_tokens, head_dim)
        k_heads, k_stride = _heads(k, num_tokens, head_dim)
        check_vector(positions, num_tokens, torch.int64)
        check_vector(cos_sin_cache, num_positions)
        if rotary_dim > head_dim:
            raise ValueError(f"cannot rotate {rotary_dim} of {head_dim} dimensions")
        failed = self._c.rotary_embedding(
            positions.data_ptr(),
            q.data_ptr(),
            q_stride,
            q_heads,
            k.data_ptr(),
            k_stride,
            k_heads,
            cos_sin_cache.data_ptr(),
            num_positions,
            rotary_dim,
            head_dim,
            num_tokens,
        )
        if failed:
            raise IndexError(f"a position is not in [0, {num_positions})")

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_tokens = slot_mapping.shape[0]
        num_blocks, _, num_kv_heads, block_size, width = kv_cache.shape
        head_size = _cached_head_size(key, width)
        key_heads, key_stride = _heads(key, num_tokens, head_size)
        value_heads, value_stride = _heads(value, num_tokens, head_size)
        if not key_heads == value_heads == num_kv_heads:
            raise ValueError(
                f"{key_heads} key and {value_heads} value heads for a cache of "
                f"{num_kv_heads}"
            )
        check_vector(slot_mapping, num_tokens, torch.int64)
        is_half = _is_half_cache(kv_cache)
        failed = self._c.reshape_and_cache(
            key.data_ptr(),
            key_stride,
            value.data_ptr(),
            value_stride,
            kv_cache.data_ptr(),
            is_half,
            slot_mapping.data_ptr(),
            num_tokens,
            num_blocks,
            num_kv_heads,
            block_size,
            head_size,
        )
        if failed:
            raise IndexError(f"a slot is not below {num_blocks * block_size}")

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        is_causal: bool,
    ) -> None:
        num_tokens, num_heads, head_size = query.shape
        num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
        num_reqs = seq_lens.shape[0]
        if out.shape != query.shape or block_table.shape[0] < num_reqs:
            raise ValueError("out must have the query's shape, each request its blocks")
        _heads(query, num_tokens, head_size)
        _heads(out, num_tokens, head_size)
        is_half = _is_half_cache(kv_cache)
        check_rows(block_table, torch.int32)
        check_vector(query_start_loc, num_reqs + 1, torch.int32)
        check_vector(seq_lens, num_reqs, torch.int32)
        failed = self._c.paged_attention(
            query.data_ptr(),
            query.stride()[0],
            kv_cache.data_ptr(),
            is_half,
            block_table.data_ptr(),
            block_table.stride()[0],
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            out.data_ptr(),
            out.stride()[0],
            num_tokens,
            num_reqs,
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
            num_blocks,
            block_table.shape[1],
            scale,
            is_causal,
        )
        if failed:
            raise IndexError(
                "the query or the blocks of a request are outside the arrays"
            )

    def philox_uniform(self, keys: torch.Tensor, num: int) -> torch.Tensor:
        check_vector(keys, keys.shape[0], torch.int64)
        out = torch.empty((keys.shape[0], num))
        self._c.philox_uniform(keys.data_ptr(), keys.shape[0], num, out.data_ptr())
        return out

    def gumbel_argmax(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        is_greedy: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, vocab_size = logits.shape
        check_rows(logits)
        check_vector(keys, num_rows, torch.int64)
        if is_greedy is not None:
            check_vector(is_greedy.view(torch.uint8), num_rows, torch.uint8)
        out = torch.empty(num_rows, dtype=torch.int64)
        self._c.gumbel_argmax(
            logits.data_ptr(),
            logits.stride()[0],
            keys.data_ptr(),
            None if is_greedy is None else is_greedy.data_ptr(),
            num_rows,
            vocab_size,
            out.data_ptr(),
        )
        return out

    def top_k_top_p(
        self, logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor
    ) -> None:
        num_rows, vocab_size = logits.shape
        check_rows(logits)
        check_vector(k, num_rows, torch.int32)
        check_vector(p, num_rows)
        self._c.top_k_top_p(
            logits.data_ptr(),
            logits.stride()[0],
            k.data_ptr(),
            p.data_ptr(),
            num_rows,
            vocab_size,
        )

    def logprob_stats(
        self, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, vocab_size = logits.shape
        check_rows(logits)
        check_vector(token_ids, num_rows, torch.int64)
        logsumexp = torch.empty(num_rows)
        rank = torch.empty(num_rows, dtype=torch.int32)
        failed = self._c.logprob_stats(
            logits.data_ptr(),
            logits.stride()[0],
            token_ids.data_ptr(),
            num_rows,
            vocab_size,
            logsumexp.data_ptr(),
            rank.data_ptr(),
        )
        if failed:
            raise IndexError(f"a token id is not in [0, {vocab_size})")
        return logsumexp, rank

    def apply_bitmask(
        self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor
    ) -> None:
        num_rows, vocab_size = logits.shape
        check_rows(logits)
        check_rows(bitmask, torch.int32)
        num_masks = bitmask.shape[0]
        check_vector(rows, num_masks, torch.int32)
        if bitmask.shape[1] * 32 < vocab_size:
            raise ValueError(
                f"the bitmask has {bitmask.shape[1]} words for {vocab_size} tokens"
            )
        failed = self._c.apply_bitmask(
            logits.data_ptr(),
            logits.stride()[0],
            bitmask.data_ptr(),
            bitmask.stride()[0],
            rows.data_ptr(),
            num_masks,
            num_rows,
            vocab_size,
        )
        if failed:
            raise IndexError(f"a mask's row is not below {num_rows}")


def _row_grid(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the outer and inner number of rows of a 2D or 3D tensor, and strides."""
    check_rows(x)
    shape, strides = x.shape, x.stride()
    if len(shape) == 3:
        return shape[0], shape[1], strides[0], strides[1]
    return shape[0], 1, strides[0], 0


def _heads(x: torch.Tensor, num_tokens: int, head_dim: int) -> tuple[int, int]:
    """Return the number of heads of [T, H * D] or [T, H, D], and the token stride."""
    check_rows(x)
    shape, strides = x.shape, x.stride()
    width = shape[1] if len(shape) == 2 else shape[1] * shape[2]
    if len(shape) == 3 and shape[1] > 1 and strides[1] != shape[2]:
        raise ValueError(f"heads must stand side by side, got strides {strides}")
    if shape[0] < num_tokens or width % head_dim:
        raise ValueError(
            f"shape {tuple(shape)} for {num_tokens} tokens and heads of {head_dim}"
        )
    return width // head_dim, strides[0]


def _is_half_cache(kv_cache: torch.Tensor) -> bool:
    is_half = kv_cache.dtype is torch.float16
    if kv_cache.shape[1] != 2:
        raise ValueError(f"a cache of shape {tuple(kv_cache.shape)} has no two halves")
    check_vector(kv_cache, len(kv_cache), torch.float16 if is_half else torch.float32)
    return is_half


def _cached_head_size(key: torch.Tensor, width: int) -> int:
    head_size = key.shape[-1]
    if key.dim() != 3 or -(-head_size // LANES) * LANES != width:
        raise ValueError(
            f"keys of shape {tuple(key.shape)} in a cache of width {width}"
        )
    return head_size
