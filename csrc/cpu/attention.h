// Attention over one layer's paged cache.
//
// The cache: keys [num_blocks][num_kv_heads][width][block_size], transposed so that
// sixteen keys are one vector, then values [num_blocks][num_kv_heads][block_size][width];
// width is the head size rounded up to 16, block_size a multiple of 16.
#pragma once

#include "vec.h"

namespace vllm {

struct KVCache {
  float* keys;
  int64_t num_blocks, num_kv_heads, block_size, head_size;

  int64_t width() const { return (head_size + kLanes - 1) / kLanes * kLanes; }
  int64_t block_floats() const { return width() * block_size; }
  float* values() const { return keys + num_blocks * num_kv_heads * block_floats(); }

  // Stores a token's heads, [num_kv_heads][head_size] each; a slot below 0 is none.
  void write(int64_t slot, const float* key, const float* value) const {
    if (slot < 0) return;
    const int64_t offset = slot % block_size;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const int64_t block = (slot / block_size * num_kv_heads + head) * block_floats();
      for (int64_t d = 0; d < head_size; ++d)
        keys[block + d * block_size + offset] = key[head * head_size + d];
      std::memcpy(values() + block + offset * width(), value + head * head_size,
                  static_cast<size_t>(head_size) * sizeof(float));
    }
  }
};

struct Attention {
  const float* query;  // [num_tokens][num_heads][head_size]
  int64_t query_stride;
  KVCache cache;
  const int32_t* block_table;  // [num_reqs][max_blocks]
  int64_t block_table_stride, max_blocks;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  float* out;                      // as the query
  int64_t out_stride;
  int64_t num_tokens, num_reqs, num_heads;
  float scale;
  bool is_causal;

  int64_t width() const { return cache.width(); }
  int64_t group() const { return num_heads / cache.num_kv_heads; }
};

// Whether all that the indices name is inside the query and the cache.
bool has_valid_indices(const Attention& a);

// Writes `out`; the indices are valid.
void attend(const Attention& a);

}  // namespace vllm
