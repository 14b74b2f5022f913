// Keys and values that a drafter's layers have of the target's states.
//
// What is computed is what the single operators compute, in the same order of operations.
#include <vector>

#include "api.h"
#include "attention.h"
#include "parallel.h"
#include "products.h"
#include "rotary.h"

namespace vllm {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinElements = 4096;
// The same of numbers that are copied only.
constexpr int64_t kMinCopied = 65536;

struct Writer {
  const VllmContextWriter& w;
  const VllmContext& c;
  const std::vector<int64_t>& kept;  // the tokens that are written
  void* const* kv_caches;

  int64_t num_kept() const { return static_cast<int64_t>(kept.size()); }
  int64_t kv_size() const { return w.num_kv_heads * w.head_size; }
  int64_t width() const { return 2 * w.num_layers * kv_size(); }

  void run(float* memory) const {
    const int64_t hidden_size = w.kv.size;
    float* taps = memory;
    float* fused = taps + num_kept() * w.fc.size;
    float* kv = fused + num_kept() * hidden_size;
    gather_taps(taps);
    multiply({taps, w.fc.size, num_kept(), w.fc.size}, w.fc, {fused, hidden_size});
    multiply({fused, hidden_size, num_kept(), hidden_size, Rows::Kind::kNormed,
              w.hidden_norm, w.eps},
             w.kv, {kv, width()});
    store(kv);
  }

  int64_t scratch_floats() const {
    return num_kept() * (w.fc.size + w.kv.size + width());
  }

 private:
  void gather_taps(float* out) const {
    const int64_t size = w.fc.size / c.num_taps;
    parallel_for(num_kept(), grain_for(w.fc.size, kMinCopied), [&](int64_t i) {
      for (int64_t tap = 0; tap < c.num_taps; ++tap)
        std::memcpy(out + i * w.fc.size + tap * size, c.taps[tap] + kept[i] * size,
                    static_cast<size_t>(size) * sizeof(float));
    });
  }

  // kv [num_kept]: the keys of all layers, then the values of all.
  void store(float* kv) const {
    const int64_t half = w.rotary_dim / 2;
    parallel_for(num_kept(), grain_for(width(), kMinElements), [&](int64_t i) {
      float* keys = kv + i * width();
      const float* values = keys + width() / 2;
      const float* cos = w.cos_sin_cache + c.positions[kept[i]] * w.rotary_dim;
      for (int64_t layer = 0; layer < w.num_layers; ++layer) {
        float* k = keys + layer * kv_size();
        if (const float* weight = w.k_norms[layer])
          for (int64_t head = 0; head < w.num_kv_heads; ++head)
            norm_row(k + head * w.head_size, weight, w.eps, k + head * w.head_size,
                     w.head_size);
        rotate_heads(k, w.num_kv_heads, w.head_size, cos, cos + half, half);
        const KVCache cache{kv_caches[layer], c.is_half != 0, c.num_blocks,
                            w.num_kv_heads,   c.block_size,   w.head_size};
        cache.write(c.slot_mapping[kept[i]], k, values + layer * kv_size());
      }
    });
  }
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_write_context(const VllmContextWriter* writer,
                                    const VllmContext* context, void* const* kv_caches) {
  using namespace vllm;
  // What is not written is not computed either: no row depends on another.
  thread_local std::vector<int64_t> kept;
  kept.clear();
  for (int64_t token = 0; token < context->num_tokens; ++token) {
    const int64_t slot = context->slot_mapping[token];
    if (slot < 0) continue;
    const int64_t position = context->positions[token];
    if (position < 0 || position >= writer->num_positions) return 1;
    if (slot >= context->num_blocks * context->block_size) return 2;
    kept.push_back(token);
  }
  if (kept.empty()) return 0;
  const Writer w{*writer, *context, kept, kv_caches};
  thread_local Scratch scratch;
  w.run(scratch.floats(static_cast<size_t>(w.scratch_floats())));
  return 0;
}
