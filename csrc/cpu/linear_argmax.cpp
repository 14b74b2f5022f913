// The likeliest tokens of an output layer, whose logits are never written.
#include <vector>

#include "api.h"
#include "products.h"

VLLM_API void vllm_linear_argmax(const float* x, int64_t x_stride, const void* packed,
                                 int64_t format, const float* bias, int64_t num_rows,
                                 int64_t num_columns, int64_t size, int64_t* out) {
  using namespace vllm;
  std::vector<Leader> leaders(static_cast<size_t>(num_rows));
  const VllmWeight weight{format, packed, bias, num_columns};
  multiply({x, x_stride, num_rows, size}, VllmLinear{&weight, 1, size},
           {nullptr, 0, false, leaders.data()});
  for (const Leader& leader : leaders) *out++ = leader.column;
}
