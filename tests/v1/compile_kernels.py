"""Compile every kernel for a GPU that need not be there.

The interpreter runs what a compiler refuses: types that change in a loop, for one.
Run by test_compile.py in a process of its own, without TRITON_INTERPRET.
"""

import importlib
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PACKAGE = "vllm.v1"
# The types of the arguments in their order; a number is a constexpr.
KERNELS = {
    "attention.backends.triton_attn._paged_attention_kernel": (
        "*fp32 *fp32 *fp32 *i32 *i32 *i32 fp32 i64 i64 i64 i64 i64 i64 i64 i64 i64 "
        "3 64 64 16 5 16 64 1"
    ),
    "attention.backends.triton_attn._write_kv_cache_kernel": (
        "*fp32 *fp32 *fp32 *i64 i32 i32 i32 i32 i64 i32 64 4 64"
    ),
    "worker.gpu.block_table._compute_slot_mapping_kernel": (
        "*i32 i32 *i32 *i64 *i64 i32 1024"
    ),
    "worker.gpu.input_batch._expand_logit_rows_kernel": (
        "*i32 *i32 *i32 *i64 *i64 *i32 *i32 *i64 8"
    ),
    "worker.gpu.input_batch._gather_inputs_kernel": (
        "*i32 i32 *i32 *i64 i32 *i32 *i32 *i32 *i64 *i64 *i32 1024"
    ),
    "worker.gpu.input_batch._post_update_kernel": (
        "*i64 i32 *i32 *i32 *i32 *i32 *i32 i32 i32 *i32 *i32 8"
    ),
    "worker.gpu.sample.allowed_token_ids._allowed_token_ids_kernel": (
        "*fp32 i32 *i32 *u8 *i32 i32 i32 1024"
    ),
    "worker.gpu.sample.bad_words._bad_words_kernel": (
        "*fp32 i32 *i32 *i32 *i64 *i64 i32 *i32 i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 "
        "*i32"
    ),
    "worker.gpu.sample.gumbel._gumbel_argmax_kernel": (
        "*fp32 i32 *i64 *u8 *fp64 *i64 i32 1024"
    ),
    "worker.gpu.sample.gumbel._reduce_blocks_kernel": "*fp64 *i64 *i64 i32 64",
    "worker.gpu.sample.logit_bias._logit_bias_kernel": (
        "*fp32 i32 *i32 *i32 *i32 *i32 *fp32 256"
    ),
    "worker.gpu.sample.logprob._logprob_stats_kernel": (
        "*fp32 i32 *i64 *fp32 *i32 i32 2048"
    ),
    "worker.gpu.sample.logprob._place_chosen_token_ids_kernel": (
        "*i64 i32 *i32 *i32 *i32 *i32 i32 i32 128"
    ),
    "worker.gpu.sample.min_p._min_p_kernel": "*fp32 i32 *i32 *fp32 i32 1024",
    "worker.gpu.sample.min_tokens._min_tokens_kernel": (
        "*fp32 i32 *i32 *i64 *i32 *i32 *i32 *i64 64"
    ),
    "worker.gpu.sample.penalties._count_sampled_tokens_kernel": (
        "*i32 *i64 i32 *i32 *i32 i32 *u8 i32 8"
    ),
    "worker.gpu.sample.penalties._penalties_kernel": (
        "*fp32 i32 *i32 *i32 *i64 i32 *i32 i32 *u8 *fp32 *fp32 *fp32 i32 1024"
    ),
    "worker.gpu.sample.random._noise_keys_kernel": "*i64 *i64 *i64 *i64 i32 i32 128",
    "worker.gpu.sample.random._philox_uniform_kernel": "*i64 *fp32 i32 1024",
    "worker.gpu.sample.temperature._temperature_kernel": (
        "*fp32 i32 *i32 *fp32 i32 1024"
    ),
    "worker.gpu.sample.top_k_top_p._top_k_top_p_kernel": (
        "*fp32 i32 *i32 *fp32 i32 2048"
    ),
    "worker.gpu.spec_decode.accept_drafts._accept_drafts_kernel": (
        "*fp32 i32 *fp32 i32 i32 *i64 *fp32 *i32 *i32 *i1 i32 1 2048"
    ),
    "worker.gpu.spec_decode.accepted_prefix._take_accepted_prefix_kernel": (
        "*i1 *i64 *i32 *i64 *i32 i32 8"
    ),
    "worker.gpu.spec_decode.admitted_drafts._admit_drafts_kernel": (
        "*fp32 *i32 *i32 i32 i32 i32 8 256"
    ),
    "worker.gpu.spec_decode.admitted_drafts._compute_survivals_kernel": (
        "*fp32 i32 *i32 *i32 *fp32 i32"
    ),
    "worker.gpu.spec_decode.confidence.certainty._compute_certainty_kernel": (
        "*fp32 i32 *i32 *fp32 *fp32 i32 fp32 2048"
    ),
    "worker.gpu.spec_decode.confidence.curves._read_curves_kernel": (
        "*fp32 *fp32 i32 i32 *i32 *i32 *fp32 *i1 *i1 *fp32 *i32 i32 fp32 fp32 17 256 3 "
        "8"
    ),
    "worker.gpu.spec_decode.confidence.outcomes._count_outcomes_kernel": (
        "*i32 *i32 *i32 *i32 *i32 i32 i32 256 8"
    ),
    "worker.gpu.spec_decode.draft_model.inputs._gather_committed_inputs_kernel": (
        "*i32 i32 *i32 *i32 *i64 *i32 *i32 i32 i32 i32 *i64 *i64 *i64 *i32 *i64 256"
    ),
    "worker.gpu.spec_decode.draft_model.inputs._gather_draft_inputs_kernel": (
        "*i64 *i32 i32 i32 i32 i32 *i64 *i64 *i32 64"
    ),
    "worker.gpu.spec_decode.dspark.inputs._find_context_slots_kernel": (
        "*i32 i32 *i32 *i32 *i64 *i32 *i64 i32 i32 1024"
    ),
    "worker.gpu.spec_decode.dspark.inputs._lay_out_blocks_kernel": (
        "*i32 i32 *i32 *i32 i32 *i32 i32 i32 i32 i32 i32 i32 i32 *i64 *i64 *i64 *i64 "
        "*i64 *i32 *i32 *i32 *i32 8 256"
    ),
    "worker.gpu.spec_decode.ngram.lookup._propose_ngram_kernel": (
        "*i32 i32 *i32 *i32 *i64 *i32 *i32 i32 i32 i32 5 32 1024 4"
    ),
    "worker.gpu.spec_decode.rejection_sampler._flatten_sampled_kernel": (
        "*i64 i32 *i32 *i64 8"
    ),
    "worker.gpu.spec_decode.residual._write_residual_logits_kernel": (
        "*fp32 i32 *fp32 i32 i32 *i1 *i32 *i32 i32 2048"
    ),
    "worker.gpu.spec_decode.verified_layout._add_and_sum_kernel": (
        "*i32 *i32 *i32 *i32 i32 1024"
    ),
    "worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": (
        "*fp32 i32 *i32 i32 *i32 *i32 i32 i32 i32 i32 8192"
    ),
}


def compile_kernel(name: str, types: str, capability: int) -> None:
    module, function = name.rsplit(".", 1)
    kernel = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)
    pairs = list(zip(kernel.arg_names, types.split(), strict=True))
    constants = {arg: int(kind) for arg, kind in pairs if kind.isdigit()}
    signature = {arg: "constexpr" if arg in constants else kind for arg, kind in pairs}
    source = ASTSource(kernel, signature, constants)
    triton.compile(source, target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    for kernel_name, kernel_types in KERNELS.items():
        compile_kernel(kernel_name, kernel_types, int(sys.argv[1]))
