// The tokens with the largest logits, in order; of equal ones the lower id first.
#include <algorithm>
#include <vector>

#include "api.h"
#include "likeliest.h"
#include "parallel.h"

namespace vllm {
namespace {

void find_few(const float* logits, int64_t size, int64_t count, int64_t* ids) {
  Token tokens[kMostInList];
  Likeliest best(tokens, count);
  best.meet(logits, size, 0);
  for (const Token& token : best) *ids++ = token.id;
}

void find_many(const float* logits, int64_t size, int64_t count, int64_t* ids) {
  thread_local std::vector<Token> all;
  all.clear();
  for (int64_t id = 0; id < size; ++id)
    all.push_back({logits[id], static_cast<int32_t>(id)});
  std::partial_sort(all.begin(), all.begin() + count, all.end());
  for (int64_t place = 0; place < count; ++place)
    ids[place] = all[static_cast<size_t>(place)].id;
}

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_likeliest_tokens(const float* logits, int64_t stride, int64_t num_rows,
                                       int64_t vocab_size, int64_t count, int64_t* ids) {
  using namespace vllm;
  if (count < 0 || count > vocab_size) return 1;
  if (count == 0) return 0;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    const auto find = count <= kMostInList ? find_few : find_many;
    find(logits + row * stride, vocab_size, count, ids + row * count);
  });
  return 0;
}
