// Products of rows with packed weights, whatever their kind.
#pragma once

#include <limits>
#include <vector>

#include "api.h"
#include "rows.h"

namespace vllm {

// The first of a row's largest products so far; NaN and -inf are none.
struct Leader {
  float value = -std::numeric_limits<float>::infinity();
  int32_t column = -1;

  // Columns are met in their order, so an equal one that comes later does not lead.
  void meet(int64_t start, Vec products, int64_t num_columns) {
    const uint32_t bits = greater(products, broadcast(value));
    // Few groups of a row have a new leader: about the logarithm of their number.
    if (bits != 0) find_new(start, products, num_columns, bits);
  }
  void meet(const Leader& later) {
    if (later.value > value) *this = later;
  }

 private:
  __attribute__((noinline)) void find_new(int64_t start, Vec products, int64_t num_columns,
                                          uint32_t bits) {
    // Beyond the last column stand products with nothing.
    if (start + kLanes > num_columns) bits &= (1u << (num_columns - start)) - 1;
    if (bits == 0) return;
    const Vec greater_ones = select(bits, products, broadcast(value));
    value = largest(greater_ones);
    const uint32_t largest_ones = greater_equal(greater_ones, broadcast(value));
    column = static_cast<int32_t>(start + __builtin_ctz(largest_ones));
  }
};

// Where a product goes; columns stand side by side.
struct Output {
  float* data;
  int64_t stride;
  // The product is added to what is there.
  bool adds = false;
  // [num_rows] or null; where they are, nothing is written.
  Leader* leaders = nullptr;

  void write(int64_t row, int64_t column, Vec sums, const float* bias,
             int64_t num_columns) const {
    if (bias != nullptr) sums = sums + load_at(bias, column, num_columns, 0.0f);
    if (leaders != nullptr) return leaders[row].meet(column, sums, num_columns);
    float* out = data + row * stride;
    if (adds) sums = load_at(out, column, num_columns, 0.0f) + sums;
    store_at(out, sums, column, num_columns);
  }
};

// The output of a product whose columns are computed in parts, at once.
class PartedOutput {
 public:
  PartedOutput(const Output& whole, int64_t num_rows, int64_t num_parts)
      : whole_(whole), num_rows_(num_rows), num_parts_(num_parts) {
    if (whole.leaders != nullptr)
      leaders_.resize(static_cast<size_t>(num_rows * num_parts));
  }

  Output part(int64_t index) {
    Output out = whole_;
    if (out.leaders != nullptr) out.leaders = leaders_.data() + index * num_rows_;
    return out;
  }
  // Parts are in the order of their columns.
  void join() const {
    if (whole_.leaders == nullptr) return;
    for (int64_t part = 0; part < num_parts_; ++part)
      for (int64_t row = 0; row < num_rows_; ++row)
        whole_.leaders[row].meet(leaders_[static_cast<size_t>(part * num_rows_ + row)]);
  }

 private:
  const Output whole_;
  const int64_t num_rows_, num_parts_;
  std::vector<Leader> leaders_;
};

void multiply_dense(const Rows& rows, const VllmWeight& weight, const Output& out);
void multiply_quantized(const Rows& rows, const VllmWeight& weight, const Output& out);

inline void multiply(const Rows& rows, const VllmLinear& linear, Output out) {
  for (int64_t i = 0; i < linear.num_parts; ++i) {
    const VllmWeight& part = linear.parts[i];
    if (part.format == kVllmFloat32)
      multiply_dense(rows, part, out);
    else
      multiply_quantized(rows, part, out);
    out.data += part.num_columns;
  }
}

}  // namespace vllm
