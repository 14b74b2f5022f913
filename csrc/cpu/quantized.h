// Quantized weights and activations, as the product reads them.
//
// Weight: columns in panels of 16, a panel being one record for each block of 32 inputs.
// A record holds the values, four neighbours of a column in a 4-byte lane and the lanes
// of the 16 columns side by side, then the columns' scales (and minima) in half
// precision. 4-bit values: lane group g has the inputs 4g.. in the low and 16 + 4g.. in
// the high halves of its bytes. 8-bit values are stored plus 128. Int8 with one scale a
// column has it, in float32, behind the panel's last record.
//
// Activations: rows in tiles, a tile being one record for each block: 32 bytes a row, a
// scale a row and a number made of the sum a row.
#pragma once

#include <cstdint>

#include "vec.h"

namespace vllm {

constexpr int64_t kBlock = 32;
constexpr int64_t kGroupBytes = 4 * kLanes;

enum class Format : int64_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kInt8 = 3 };

constexpr bool has_nibbles(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1;
}
constexpr int64_t value_bytes(Format format) {
  return (has_nibbles(format) ? 4 : 8) * kGroupBytes;
}
constexpr int64_t record_bytes(Format format) {
  const int64_t num_halves = format == Format::kInt8 ? 0 : format == Format::kQ4_1 ? 2 : 1;
  return value_bytes(format) + num_halves * kLanes * 2;
}
inline int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }
inline int64_t panel_bytes(Format format, int64_t size) {
  const int64_t tail = format == Format::kInt8 ? kLanes * 4 : 0;
  return num_blocks(size) * record_bytes(format) + tail;
}
// What is subtracted from every stored value; Q4_1 has its minimum in place of it.
constexpr int32_t stored_offset(Format format) {
  return format == Format::kQ4_0 ? 8 : format == Format::kQ4_1 ? 0 : 128;
}
// The part of it that products leave to be subtracted. Never a function of its own: it
// differs between objects of one library.
consteval int32_t product_offset(Format format) {
  return has_nibbles(format) ? stored_offset(format) : kBytesOffset;
}

// How far 127 steps must reach; anything smaller counts as zero.
constexpr float kSmallestRange = 1e-30f;

struct Steps {
  float scale, inverse;
};

// NaN if any value is NaN or infinite, through `spoiled`, which is 0 else.
inline Steps steps_for(float range, float spoiled) {
  const bool is_zero = range < kSmallestRange;
  return {(is_zero ? 0.0f : range / 127.0f) + spoiled, is_zero ? 0.0f : 127.0f / range};
}

// The largest magnitude of some values, and whether one of them is not finite.
struct Range {
  Vec largest_lanes = broadcast(0.0f);
  Vec spoiled_lanes = broadcast(0.0f);

  void add(Vec x) {
    largest_lanes = max(max(x, broadcast(0.0f) - x), largest_lanes);
    spoiled_lanes = spoiled_lanes + (x - x);
  }
  Steps steps() const { return steps_for(largest(largest_lanes), sum(spoiled_lanes)); }
};

// Writes 16 values in -127..127 and returns them as floats; ties go to the even number.
inline Vec quantize(Vec x, Vec inverse, int8_t* out) {
  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
  const Vec rounder = broadcast(12582912.0f);
  const Vec shifted = x * inverse + rounder;
  store_low_bytes(out, shifted);
  return shifted - rounder;
}

}  // namespace vllm
