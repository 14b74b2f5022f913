// Counter-based random numbers: Philox 4x32-10 with counter (offset, 0, 0, 0), first word,
// bit for bit what Triton's tl.rand(key, offset) gives.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once

#include "vec.h"

namespace vllm {

constexpr uint32_t kPhiloxA = 0xD2511F53u;
constexpr uint32_t kPhiloxB = 0xCD9E8D57u;
constexpr int kPhiloxRounds = 10;

// The key of every round.
struct PhiloxKey {
  explicit PhiloxKey(int64_t key) {
    uint32_t low = static_cast<uint32_t>(key);
    uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      lows[round] = low;
      highs[round] = high;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }
  uint32_t lows[kPhiloxRounds];
  uint32_t highs[kPhiloxRounds];
};

// 31 bits as a float in [0, 1): negative words are folded onto the positive ones.
constexpr float kUniformScale = 4.6566127342e-10f;

inline float philox_uniform(const PhiloxKey& key, uint32_t offset) {
  uint32_t c0 = offset, c1 = 0, c2 = 0, c3 = 0;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxA} * c0;
    const uint64_t b = uint64_t{kPhiloxB} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key.lows[round];
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key.highs[round];
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
  }
  const int32_t word = static_cast<int32_t>(c0);
  return static_cast<float>(word < 0 ? ~word : word) * kUniformScale;
}

inline WideVec philox_words(const PhiloxKey& key, WideVec c0) {
  const WideVec factor_a = broadcast_word(kPhiloxA), factor_b = broadcast_word(kPhiloxB);
  WideVec c1 = broadcast_word(0), c2 = c1, c3 = c1;
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const WideVec a = multiply_words(c0, factor_a);
    const WideVec b = multiply_words(c2, factor_b);
    c0 = high_words(b) ^ c1 ^ broadcast_word(key.lows[round]);
    c2 = high_words(a) ^ c3 ^ broadcast_word(key.highs[round]);
    c1 = b;
    c3 = a;
  }
  return c0;
}

// The sixteen draws at offset, offset + 1, ...
inline Vec philox_uniform16(const PhiloxKey& key, uint32_t offset) {
  const IntVec counter = count_from(offset);
  const IntVec words = interleave(philox_words(key, even_lanes(counter)),
                                  philox_words(key, odd_lanes(counter)));
  return to_float(fold_negative(words)) * broadcast(kUniformScale);
}

}  // namespace vllm
