// The choice of a token from a row of logits.
#pragma once

#include <cstdint>

namespace vllm {

// The first of the largest logits, NaN left out; -1 if none is above -inf.
int64_t argmax(const float* logits, int64_t size);

// The first of the largest logits with the noise of this key; -1 as above.
int64_t gumbel_argmax(const float* logits, int64_t size, int64_t key);

}  // namespace vllm
