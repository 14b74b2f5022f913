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

#if defined(__AVX512F__)

// Words in the low halves of 64-bit lanes; the high halves hold anything.
inline __m512i philox_words(const PhiloxKey& key, __m512i c0) {
  const __m512i factor_a = _mm512_set1_epi64(kPhiloxA);
  const __m512i factor_b = _mm512_set1_epi64(kPhiloxB);
  __m512i c1 = _mm512_setzero_si512(), c2 = c1, c3 = c1;
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m512i a = _mm512_mul_epu32(c0, factor_a);
    const __m512i b = _mm512_mul_epu32(c2, factor_b);
    const __m512i low = _mm512_set1_epi32(static_cast<int>(key.lows[round]));
    const __m512i high = _mm512_set1_epi32(static_cast<int>(key.highs[round]));
    c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(b, 32), c1), low);
    c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(a, 32), c3), high);
    c1 = b;
    c3 = a;
  }
  return c0;
}

// The sixteen draws at offset, offset + 1, ...
inline Vec philox_uniform16(const PhiloxKey& key, uint32_t offset) {
  const __m512i lane =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i counter = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(offset)), lane);
  const __m512i even = philox_words(key, counter);
  const __m512i odd = philox_words(key, _mm512_srli_epi64(counter, 32));
  const __m512i words = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  const __m512i folded = _mm512_xor_si512(words, _mm512_srai_epi32(words, 31));
  return {_mm512_mul_ps(_mm512_cvtepi32_ps(folded), _mm512_set1_ps(kUniformScale))};
}

#elif defined(__AVX2__)

inline __m256i philox_words(const PhiloxKey& key, __m256i c0) {
  const __m256i factor_a = _mm256_set1_epi64x(kPhiloxA);
  const __m256i factor_b = _mm256_set1_epi64x(kPhiloxB);
  __m256i c1 = _mm256_setzero_si256(), c2 = c1, c3 = c1;
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i a = _mm256_mul_epu32(c0, factor_a);
    const __m256i b = _mm256_mul_epu32(c2, factor_b);
    const __m256i low = _mm256_set1_epi32(static_cast<int>(key.lows[round]));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(key.highs[round]));
    c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), c1), low);
    c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), c3), high);
    c1 = b;
    c3 = a;
  }
  return c0;
}

inline __m256 philox_uniform8(const PhiloxKey& key, uint32_t offset) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i counter = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(offset)), lane);
  const __m256i even = philox_words(key, counter);
  const __m256i odd = philox_words(key, _mm256_srli_epi64(counter, 32));
  const __m256i words = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  const __m256i folded = _mm256_xor_si256(words, _mm256_srai_epi32(words, 31));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(folded), _mm256_set1_ps(kUniformScale));
}

inline Vec philox_uniform16(const PhiloxKey& key, uint32_t offset) {
  return {philox_uniform8(key, offset), philox_uniform8(key, offset + 8)};
}

#else

inline Vec philox_uniform16(const PhiloxKey& key, uint32_t offset) {
  return each_lane([&](int i) { return philox_uniform(key, offset + static_cast<uint32_t>(i)); });
}

#endif

}  // namespace vllm
