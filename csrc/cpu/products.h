// Products of rows with packed weights, whatever their kind.
#pragma once

#include "api.h"
#include "rows.h"

namespace vllm {

// Where a product goes; columns stand side by side.
struct Output {
  float* data;
  int64_t stride;
  // The product is added to what is there.
  bool adds = false;

  void write(int64_t row, int64_t column, Vec sums, const float* bias,
             int64_t num_columns) const {
    if (bias != nullptr) sums = sums + load_at(bias, column, num_columns, 0.0f);
    float* out = data + row * stride;
    if (adds) sums = load_at(out, column, num_columns, 0.0f) + sums;
    store_at(out, sums, column, num_columns);
  }
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
