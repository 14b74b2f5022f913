// Attention over one layer's paged cache.
//
// What a block holds stands in a row, in the order in which a decode reads it, because
// long reads are faster than short ones: [num_blocks] times the keys
// [num_kv_heads][width][block_size], transposed so that sixteen keys are one vector, and
// the values [num_kv_heads][width / panel][block_size][panel], where a panel is the
// columns that one pass over the keys sums. The width is the head size rounded up to 16,
// block_size a multiple of 16. The elements are floats or halves.
#pragma once

#include "vec.h"

namespace vllm {

struct KVCache {
  void* data;
  bool is_half;
  int64_t num_blocks, num_kv_heads, block_size, head_size;

  int64_t width() const { return (head_size + kLanes - 1) / kLanes * kLanes; }
  int64_t panel() const { return width() % (2 * kLanes) == 0 ? 2 * kLanes : kLanes; }
  template <typename T>
  T* keys(int64_t block, int64_t head) const {
    return static_cast<T*>(data) + (2 * block * num_kv_heads + head) * head_elements();
  }
  template <typename T>
  T* values(int64_t block, int64_t head) const {
    return keys<T>(block, num_kv_heads + head);
  }
  // Where the values of a block and head have a token's column; a panel() further it is
  // the next token's.
  int64_t value_index(int64_t offset, int64_t column) const {
    return column / panel() * panel() * block_size + offset * panel() + column % panel();
  }

  // Stores a token's heads, [num_kv_heads][head_size] each; a slot below 0 is none.
  void write(int64_t slot, const float* key, const float* value) const {
    if (slot < 0) return;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const int64_t start = head * head_size;
      if (is_half)
        write_head<uint16_t>(slot, head, key + start, value + start);
      else
        write_head<float>(slot, head, key + start, value + start);
    }
  }

 private:
  // Elements of one head's keys, or of its values, in a block.
  int64_t head_elements() const { return width() * block_size; }

  template <typename T>
  void write_head(int64_t slot, int64_t head, const float* key, const float* value) const {
    const int64_t block = slot / block_size, offset = slot % block_size;
    T* key_column = keys<T>(block, head) + offset;
    T* values_of_block = values<T>(block, head);
    for (int64_t start = 0; start < head_size; start += kLanes) {
      const int64_t left = head_size - start;
      const int64_t count = left < kLanes ? left : kLanes;
      T elements[kLanes];
      store_elements(elements, load_at(key, start, head_size, 0.0f));
      for (int64_t d = 0; d < count; ++d) key_column[(start + d) * block_size] = elements[d];
      store_elements(elements, load_at(value, start, head_size, 0.0f));
      std::memcpy(values_of_block + value_index(offset, start), elements,
                  static_cast<size_t>(count) * sizeof(T));
    }
  }

  static void store_elements(float* p, Vec a) { store(p, a); }
  static void store_elements(uint16_t* p, Vec a) { store_half_saturated(p, a); }
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
