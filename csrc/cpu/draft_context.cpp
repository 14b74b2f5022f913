// Keys and values that a drafter's layers have of the target's states.
//
// What is computed is what the single operators compute, in the same order of operations.
#include <algorithm>
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

// Where a token is, and where it goes.
struct Token {
  int64_t piece, place;
  int64_t position, slot;
};

// Finds the tokens that are written: of those at one slot the last. Returns what
// vllm_write_context does.
int64_t find_written(const VllmContextWriter& w, const VllmContext& c,
                     std::vector<Token>& written) {
  written.clear();
  for (int64_t piece = c.num_pieces - 1; piece >= 0; --piece)
    for (int64_t place = c.num_tokens[piece] - 1; place >= 0; --place) {
      const int64_t slot = c.slot_mapping[piece][place];
      if (slot < 0) continue;
      const int64_t position = c.positions[piece][place];
      if (position < 0 || position >= w.num_positions) return 1;
      if (slot >= c.num_blocks * c.block_size) return 2;
      written.push_back({piece, place, position, slot});
    }
  // The last token of a slot is in front of the others.
  std::stable_sort(written.begin(), written.end(),
                   [](const Token& a, const Token& b) { return a.slot < b.slot; });
  const auto end =
      std::unique(written.begin(), written.end(),
                  [](const Token& a, const Token& b) { return a.slot == b.slot; });
  written.erase(end, written.end());
  return 0;
}

struct Writer {
  const VllmContextWriter& w;
  const VllmContext& c;
  const std::vector<Token>& written;
  void* const* kv_caches;

  int64_t num_written() const { return static_cast<int64_t>(written.size()); }
  int64_t kv_size() const { return w.num_kv_heads * w.head_size; }
  int64_t width() const { return 2 * w.num_layers * kv_size(); }

  void run(float* memory) const {
    const int64_t hidden_size = w.kv.size;
    float* taps = memory;
    float* fused = taps + num_written() * w.fc.size;
    float* kv = fused + num_written() * hidden_size;
    gather_taps(taps);
    multiply({taps, w.fc.size, num_written(), w.fc.size}, w.fc, {fused, hidden_size});
    multiply({fused, hidden_size, num_written(), hidden_size, Rows::Kind::kNormed,
              w.hidden_norm, w.eps},
             w.kv, {kv, width()});
    store(kv);
  }

  int64_t scratch_floats() const {
    return num_written() * (w.fc.size + w.kv.size + width());
  }

 private:
  void gather_taps(float* out) const {
    const int64_t size = w.fc.size / c.num_taps;
    parallel_for(num_written(), grain_for(w.fc.size, kMinCopied), [&](int64_t i) {
      const float* const* taps = c.taps + written[i].piece * c.num_taps;
      for (int64_t tap = 0; tap < c.num_taps; ++tap)
        std::memcpy(out + i * w.fc.size + tap * size, taps[tap] + written[i].place * size,
                    static_cast<size_t>(size) * sizeof(float));
    });
  }

  // kv [num_written]: the keys of all layers, then the values of all.
  void store(float* kv) const {
    const int64_t half = w.rotary_dim / 2;
    parallel_for(num_written(), grain_for(width(), kMinElements), [&](int64_t i) {
      float* keys = kv + i * width();
      const float* values = keys + width() / 2;
      const float* cos = w.cos_sin_cache + written[i].position * w.rotary_dim;
      for (int64_t layer = 0; layer < w.num_layers; ++layer) {
        float* k = keys + layer * kv_size();
        if (const float* weight = w.k_norms[layer])
          for (int64_t head = 0; head < w.num_kv_heads; ++head)
            norm_row(k + head * w.head_size, weight, w.eps, k + head * w.head_size,
                     w.head_size);
        rotate_heads(k, w.num_kv_heads, w.head_size, cos, cos + half, half);
        const KVCache cache{kv_caches[layer], c.is_half != 0, c.num_blocks,
                            w.num_kv_heads,   c.block_size,   w.head_size};
        cache.write(written[i].slot, k, values + layer * kv_size());
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
  thread_local std::vector<Token> written;
  if (const int64_t outside = find_written(*writer, *context, written)) return outside;
  if (written.empty()) return 0;
  const Writer w{*writer, *context, written, kv_caches};
  thread_local Scratch scratch;
  w.run(scratch.floats(static_cast<size_t>(w.scratch_floats())));
  return 0;
}
