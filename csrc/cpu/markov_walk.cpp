// Drafts of a drafter that adds what the token before says to its logits.
#include <limits>

#include "api.h"
#include "parallel.h"
#include "vec.h"

namespace vllm {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinElements = 16384;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The first of the largest sums, NaN left out; 0 if none is above -inf.
int64_t argmax_of_sum(const float* a, const float* b, int64_t size) {
  const auto sum_at = [&](int64_t start) {
    return load_at(a, start, size, -kInfinity) + load_at(b, start, size, 0.0f);
  };
  Vec top = broadcast(-kInfinity);
  for (int64_t start = 0; start < size; start += kLanes) top = max(sum_at(start), top);
  const float best = largest(top);
  if (best == -kInfinity) return 0;
  const Vec wanted = broadcast(best);
  for (int64_t start = 0; start < size; start += kLanes) {
    const uint32_t bits = greater_equal(sum_at(start), wanted);
    if (bits != 0) return start + __builtin_ctz(bits);
  }
  return 0;
}

struct Walk {
  const float* logits;  // [num_steps][num_rows][num_columns]
  const float* table;   // [num_ids][rank]
  int64_t num_ids;
  const uint8_t* packed;
  int64_t format;
  const int64_t* column_ids;
  int64_t num_steps, num_rows, num_columns, rank;
  float* embeddings;  // [num_rows][num_steps][rank]
  int64_t* out;       // [num_rows][num_steps]

  // False if a token has no row in the table.
  bool embed(int64_t step, const int64_t* first_ids, float* x) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t place = row * num_steps + step;
      const int64_t id = step == 0 ? first_ids[row] : out[place - 1];
      if (id < 0 || id >= num_ids) return false;
      const size_t bytes = static_cast<size_t>(rank) * sizeof(float);
      std::memcpy(x + row * rank, table + id * rank, bytes);
      std::memcpy(embeddings + place * rank, table + id * rank, bytes);
    }
    return true;
  }

  void choose(int64_t step, const float* bias) const {
    parallel_for(num_rows, grain_for(num_columns, kMinElements), [&](int64_t row) {
      const float* values = logits + (step * num_rows + row) * num_columns;
      const int64_t column = argmax_of_sum(values, bias + row * num_columns, num_columns);
      out[row * num_steps + step] = column_ids == nullptr ? column : column_ids[column];
    });
  }
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_likeliest_walk(const float* logits, const float* table,
                                     int64_t num_ids, const uint8_t* packed,
                                     int64_t format, const int64_t* first_ids,
                                     const int64_t* column_ids, int64_t num_steps,
                                     int64_t num_rows, int64_t num_columns, int64_t rank,
                                     float* embeddings, int64_t* out) {
  using namespace vllm;
  thread_local Scratch memory;
  float* x = memory.floats(static_cast<size_t>(num_rows * (rank + num_columns)));
  float* bias = x + num_rows * rank;
  const Walk walk{logits,    table,    num_ids,     packed, format,     column_ids,
                  num_steps, num_rows, num_columns, rank,   embeddings, out};
  for (int64_t step = 0; step < num_steps; ++step) {
    if (!walk.embed(step, first_ids, x)) return 1;
    vllm_quantized_linear(x, rank, packed, format, nullptr, bias, num_rows, num_columns,
                          rank);
    walk.choose(step, bias);
  }
  return 0;
}
