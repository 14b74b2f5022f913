// Decoder layers: pre-norm attention and gated feed-forward on a residual stream.
//
// Nothing is computed here that the single operators do not compute, in the same order of
// operations; what is saved is the way to Python and back, and the passes over memory for
// norms, gates and sums of the stream.
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

class DecoderLayer {
 public:
  DecoderLayer(const VllmDecoderLayer& layer, const VllmStep& step, float* stream,
               int64_t stream_stride, void* kv_cache)
      : layer_(layer),
        step_(step),
        stream_(stream),
        stream_stride_(stream_stride),
        cache_{kv_cache,           step.is_half != 0, step.num_blocks,
               layer.num_kv_heads, step.block_size,   layer.head_size} {}

  // `memory` has scratch_floats() of what is between.
  void run(float* memory) const {
    float* attended = memory;
    float* qkv = attended + step_.num_tokens * q_size();
    multiply(normed(layer_.qkv, layer_.input_norm), layer_.qkv, {qkv, qkv_size()});
    rotate_and_store(qkv);
    attend(attention(qkv, attended));
    multiply({attended, q_size(), step_.num_tokens, layer_.o.size}, layer_.o, sum());

    float* gate_up = memory;
    const int64_t inner = layer_.down.size;
    multiply(normed(layer_.gate_up, layer_.post_norm), layer_.gate_up,
             {gate_up, 2 * inner});
    multiply({gate_up, 2 * inner, step_.num_tokens, inner, Rows::Kind::kGated},
             layer_.down, sum());
  }

  int64_t scratch_floats() const {
    const int64_t attention = q_size() + qkv_size();
    const int64_t feed_forward = 2 * layer_.down.size;
    return step_.num_tokens * (attention > feed_forward ? attention : feed_forward);
  }

  Attention attention(const float* qkv, float* out) const {
    return {qkv,
            qkv_size(),
            cache_,
            step_.block_table,
            step_.block_table_stride,
            step_.max_blocks,
            step_.query_start_loc,
            step_.seq_lens,
            out,
            q_size(),
            step_.num_tokens,
            step_.num_reqs,
            layer_.num_heads,
            layer_.scale,
            step_.is_causal != 0};
  }

 private:
  int64_t q_size() const { return layer_.num_heads * layer_.head_size; }
  int64_t kv_size() const { return layer_.num_kv_heads * layer_.head_size; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }

  Rows normed(const VllmLinear& linear, const float* weight) const {
    return {stream_,     stream_stride_,      step_.num_tokens,
            linear.size, Rows::Kind::kNormed, weight,
            layer_.eps};
  }

  Output sum() const { return {stream_, stream_stride_, true}; }

  void rotate_and_store(float* qkv) const {
    const int64_t half = layer_.rotary_dim / 2;
    parallel_for(step_.num_tokens, grain_for(qkv_size(), kMinElements), [&](int64_t token) {
      float* q = qkv + token * qkv_size();
      float* k = q + q_size();
      norm_heads(q, layer_.num_heads, layer_.q_norm);
      norm_heads(k, layer_.num_kv_heads, layer_.k_norm);
      const float* cos = layer_.cos_sin_cache + step_.positions[token] * layer_.rotary_dim;
      rotate_heads(q, layer_.num_heads, layer_.head_size, cos, cos + half, half);
      rotate_heads(k, layer_.num_kv_heads, layer_.head_size, cos, cos + half, half);
      cache_.write(step_.slot_mapping[token], k, k + kv_size());
    });
  }

  void norm_heads(float* heads, int64_t num_heads, const float* weight) const {
    if (weight == nullptr) return;
    const int64_t size = layer_.head_size;
    for (int64_t head = 0; head < num_heads; ++head)
      norm_row(heads + head * size, weight, layer_.eps, heads + head * size, size);
  }

  const VllmDecoderLayer& layer_;
  const VllmStep& step_;
  float* const stream_;
  const int64_t stream_stride_;
  const KVCache cache_;
};

// Copies the stream as it enters layer `layer_idx` to the taps of that layer.
void tap(const VllmStep& step, int64_t layer_idx, const float* stream,
         int64_t stream_stride, int64_t hidden_size) {
  for (int64_t i = 0; i < step.num_taps; ++i) {
    if (step.tap_layer_ids[i] != layer_idx) continue;
    float* out = step.taps + i * step.num_tokens * hidden_size;
    parallel_for(step.num_tokens, grain_for(hidden_size, kMinCopied), [&](int64_t token) {
      std::memcpy(out + token * hidden_size, stream + token * stream_stride,
                  static_cast<size_t>(hidden_size) * sizeof(float));
    });
  }
}

int64_t find_invalid_index(const VllmDecoderLayer& layer, const VllmStep& step,
                           const Attention& attention) {
  for (int64_t token = 0; token < step.num_tokens; ++token) {
    const int64_t position = step.positions[token];
    if (position < 0 || position >= layer.num_positions) return 1;
    if (step.slot_mapping[token] >= step.num_blocks * step.block_size) return 2;
  }
  return has_valid_indices(attention) ? 0 : 3;
}

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_decoder_layers(const VllmDecoderLayer* layers, int64_t num_layers,
                                     const VllmStep* step, float* stream,
                                     int64_t stream_stride, void* const* kv_caches) {
  using namespace vllm;
  if (num_layers == 0 || step->num_tokens == 0) return 0;
  thread_local Scratch scratch;
  float* memory = nullptr;
  for (int64_t i = 0; i < num_layers; ++i) {
    const DecoderLayer layer(layers[i], *step, stream, stream_stride, kv_caches[i]);
    if (i == 0) {
      const Attention attention = layer.attention(nullptr, nullptr);
      if (const int64_t code = find_invalid_index(layers[0], *step, attention)) return code;
      memory = scratch.floats(static_cast<size_t>(layer.scratch_floats()));
    }
    tap(*step, i, stream, stream_stride, layers[i].qkv.size);
    layer.run(memory);
  }
  tap(*step, num_layers, stream, stream_stride, layers[0].qkv.size);
  return 0;
}
