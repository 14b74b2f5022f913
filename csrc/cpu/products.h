// Products of rows with packed weights, whatever their kind.
#pragma once

#include "api.h"
#include "parallel.h"
#include "rows.h"
#include "softmax.h"

namespace vllm {

// Takes products a segment of the columns at a time, in place of memory for all of them.
class SegmentReader {
 public:
  virtual ~SegmentReader() = default;

  // The columns come in so many parts, each of whole segments in their order; parts may
  // come at once. Called before the first of them.
  virtual void begin(int64_t num_parts) = 0;
  // Products of one segment, or, at the end, of less: those of row `first_row` at
  // `products`, of the next ones `stride` behind one another.
  virtual void read(int64_t part, int64_t first_row, int64_t end_row, int64_t first_column,
                    int64_t end_column, const float* products, int64_t stride) = 0;
};

// Where a product goes; columns stand side by side.
struct Output {
  float* data;
  int64_t stride;
  // The product is added to what is there.
  bool adds = false;
  // In place of data.
  SegmentReader* reader = nullptr;
  // Of what is at data.
  int64_t first_row = 0, first_column = 0;

  void write(int64_t row, int64_t column, Vec sums, const float* bias,
             int64_t num_columns) const {
    if (bias != nullptr) sums = sums + load_at(bias, column, num_columns, 0.0f);
    float* out = data + (row - first_row) * stride;
    column -= first_column;
    num_columns -= first_column;
    if (adds) sums = load_at(out, column, num_columns, 0.0f) + sums;
    store_at(out, sums, column, num_columns);
  }

  // Columns that a thread takes are a multiple of this, but for the last.
  int64_t grain() const { return reader == nullptr ? 1 : kSegment; }

  // Calls compute(output, first, end), which computes these rows of the columns from
  // first to before end and writes them to `output`.
  template <typename Compute>
  void fill(int64_t part, int64_t first_row, int64_t end_row, int64_t first, int64_t end,
            const Compute& compute) const {
    if (reader == nullptr) return compute(*this, first, end);
    // Rows that are a power of two apart would share few lines of the first cache.
    constexpr int64_t kStride = kSegment + kLanes;
    thread_local Scratch memory;
    float* products = memory.floats(static_cast<size_t>((end_row - first_row) * kStride));
    for (int64_t start = first; start < end; start += kSegment) {
      const int64_t segment_end = start + kSegment < end ? start + kSegment : end;
      compute({products, kStride, false, nullptr, first_row, start}, start, segment_end);
      reader->read(part, first_row, end_row, start, segment_end, products, kStride);
    }
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
