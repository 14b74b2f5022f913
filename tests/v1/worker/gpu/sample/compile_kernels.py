"""Compile every kernel of the sampler for a GPU that need not be there.

The interpreter runs what a compiler refuses: types that change in a loop, for one.
Run by test_compile.py in a process of its own, without TRITON_INTERPRET.
"""

import importlib
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PACKAGE = "vllm.v1.worker.gpu.sample"
# The types of the arguments in their order; a number is a constexpr.
KERNELS = {
    "allowed_token_ids._allowed_token_ids_kernel": (
        "*fp32 i32 *i32 *u8 *i32 i32 i32 1024"
    ),
    "bad_words._bad_words_kernel": (
        "*fp32 i32 *i32 *i32 *i64 *i64 i32 *i32 i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 "
        "*i32"
    ),
    "gumbel._gumbel_argmax_kernel": "*fp32 i32 *i64 *u8 *fp64 *i64 i32 1024",
    "gumbel._reduce_blocks_kernel": "*fp64 *i64 *i64 i32 64",
    "logit_bias._logit_bias_kernel": "*fp32 i32 *i32 *i32 *i32 *i32 *fp32 256",
    "logprob._logprob_stats_kernel": "*fp32 i32 *i64 *fp32 *i32 i32 2048",
    "logprob._place_chosen_token_ids_kernel": (
        "*i64 i32 *i32 *i32 *i32 *i32 i32 i32 128"
    ),
    "min_p._min_p_kernel": "*fp32 i32 *i32 *fp32 i32 1024",
    "min_tokens._min_tokens_kernel": "*fp32 i32 *i32 *i64 *i32 *i32 *i32 *i64 64",
    "penalties._count_sampled_tokens_kernel": "*i32 *i64 i32 *i32 *i32 i32 *u8 i32 8",
    "penalties._penalties_kernel": (
        "*fp32 i32 *i32 *i32 *i64 i32 *i32 i32 *u8 *fp32 *fp32 *fp32 i32 1024"
    ),
    "random._noise_keys_kernel": "*i64 *i64 *i64 *i64 i32 i32 128",
    "random._philox_uniform_kernel": "*i64 *fp32 i32 1024",
    "temperature._temperature_kernel": "*fp32 i32 *i32 *fp32 i32 1024",
    "top_k_top_p._top_k_top_p_kernel": "*fp32 i32 *i32 *fp32 i32 2048",
}


def compile_kernel(name: str, types: str, capability: int) -> None:
    module, function = name.split(".")
    kernel = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)
    pairs = list(zip(kernel.arg_names, types.split(), strict=True))
    constants = {arg: int(kind) for arg, kind in pairs if kind.isdigit()}
    signature = {arg: "constexpr" if arg in constants else kind for arg, kind in pairs}
    source = ASTSource(kernel, signature, constants)
    triton.compile(source, target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    for kernel_name, kernel_types in KERNELS.items():
        compile_kernel(kernel_name, kernel_types, int(sys.argv[1]))
