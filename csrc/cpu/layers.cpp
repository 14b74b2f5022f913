// Norms, rotary embedding and the gated activation.
#include "api.h"
#include "parallel.h"
#include "rotary.h"
#include "rows.h"

namespace vllm {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinElements = 16384;

}  // namespace
}  // namespace vllm

VLLM_API void vllm_rms_norm(const float* x, int64_t outer_stride, int64_t inner_stride,
                            const float* weight, float eps, float* out,
                            int64_t out_outer_stride, int64_t out_inner_stride,
                            int64_t num_outer, int64_t num_inner, int64_t size) {
  using namespace vllm;
  parallel_for(num_outer, grain_for(num_inner * size, kMinElements), [&](int64_t outer) {
    for (int64_t inner = 0; inner < num_inner; ++inner) {
      const float* row = x + outer * outer_stride + inner * inner_stride;
      float* target = out + outer * out_outer_stride + inner * out_inner_stride;
      norm_row(row, weight, eps, target, size);
    }
  });
}

VLLM_API void vllm_silu_and_mul(const float* x, int64_t x_stride, float* out,
                                int64_t num_rows, int64_t size) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(size, kMinElements), [&](int64_t row) {
    gate_row(x + row * x_stride, out + row * size, size);
  });
}

VLLM_API int64_t vllm_rotary_embedding(const int64_t* positions, float* q, int64_t q_stride,
                                       int64_t num_q_heads, float* k, int64_t k_stride,
                                       int64_t num_k_heads, const float* cos_sin_cache,
                                       int64_t num_positions, int64_t rotary_dim,
                                       int64_t head_dim, int64_t num_tokens) {
  using namespace vllm;
  for (int64_t token = 0; token < num_tokens; ++token)
    if (positions[token] < 0 || positions[token] >= num_positions) return 1;
  const int64_t half = rotary_dim / 2;
  const int64_t work = (num_q_heads + num_k_heads) * head_dim;
  parallel_for(num_tokens, grain_for(work, kMinElements), [&](int64_t token) {
    const float* cos = cos_sin_cache + positions[token] * rotary_dim;
    rotate_heads(q + token * q_stride, num_q_heads, head_dim, cos, cos + half, half);
    rotate_heads(k + token * k_stride, num_k_heads, head_dim, cos, cos + half, half);
  });
  return 0;
}
