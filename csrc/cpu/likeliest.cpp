// The tokens with the largest logits, in order; of equal ones the lower id first.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "parallel.h"
#include "softmax.h"

namespace vllm {
namespace {

// Up to so many, a sorted list that tokens are put into beats sorting all of them.
constexpr int64_t kMostInList = 64;

struct Token {
  float logit;
  int32_t id;

  bool operator<(const Token& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

void find_few(const float* logits, int64_t size, size_t count, std::vector<Token>& best) {
  float least = -kInfinity;
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec values = load_at(logits, start, size, -kInfinity);
    for (uint32_t bits = greater(values, broadcast(least)); bits != 0; bits &= bits - 1) {
      const int64_t id = start + __builtin_ctz(bits);
      if (!(logits[id] > least)) continue;
      const Token token{logits[id], static_cast<int32_t>(id)};
      best.insert(std::upper_bound(best.begin(), best.end(), token), token);
      if (best.size() > count) best.pop_back();
      if (best.size() == count) least = best.back().logit;
    }
  }
}

void find_many(const float* logits, int64_t size, size_t count, std::vector<Token>& best) {
  for (int64_t id = 0; id < size; ++id)
    if (logits[id] > -kInfinity) best.push_back({logits[id], static_cast<int32_t>(id)});
  count = std::min(count, best.size());
  std::partial_sort(best.begin(), best.begin() + static_cast<int64_t>(count), best.end());
  best.resize(count);
}

void find_likeliest(const float* logits, int64_t size, int64_t count, int64_t* ids) {
  thread_local std::vector<Token> best;
  best.clear();
  const auto find = count <= kMostInList ? find_few : find_many;
  find(logits, size, static_cast<size_t>(count), best);
  int64_t place = 0;
  for (const Token& token : best) ids[place++] = token.id;
  // What has no chance stands behind, NaN last.
  for (int64_t id = 0; place < count && id < size; ++id)
    if (logits[id] == -kInfinity) ids[place++] = id;
  for (int64_t id = 0; place < count && id < size; ++id)
    if (std::isnan(logits[id])) ids[place++] = id;
}

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_likeliest_tokens(const float* logits, int64_t stride, int64_t num_rows,
                                       int64_t vocab_size, int64_t count, int64_t* ids) {
  using namespace vllm;
  if (count < 0 || count > vocab_size) return 1;
  if (count == 0) return 0;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    find_likeliest(logits + row * stride, vocab_size, count, ids + row * count);
  });
  return 0;
}
