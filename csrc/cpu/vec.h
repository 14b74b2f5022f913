// Sixteen lanes of floats, integers or four bytes on every instruction set.
//
// All arithmetic below is the same sequence of IEEE operations whatever the
// registers are, so the AVX2, AVX-512 and portable builds give equal bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vllm {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};

// How many Vecs the processor's registers hold.
constexpr int kRegisters = 32;

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec broadcast(float a) { return {_mm512_set1_ps(a)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// NOTE: where either is NaN the result is b.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

// Bit i says a[i] > b[i]; false where either is NaN.
inline uint32_t greater(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
}
inline uint32_t greater_equal(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}
// Lane i of a where bit i is set, else of b.
inline Vec select(uint32_t bits, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.v, a.v)};
}
// 2^n, for the integer n in -126..127 that the low bits of t hold.
inline Vec power_of_two(Vec t) {
  const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}
// The float's bit pattern, read as an integer and rounded to float.
inline Vec pattern_as_float(Vec a) {
  return {_mm512_cvtepi32_ps(_mm512_castps_si512(a.v))};
}

inline __m256 fold_half(Vec a) {
  const __m256 high =
      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
}
inline __m256 max_half(Vec a) {
  const __m256 high =
      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  return _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
}

struct IntVec {
  __m512i v;
};

inline IntVec broadcast_int(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline IntVec operator+(IntVec a, IntVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Vec to_float(IntVec a) { return {_mm512_cvtepi32_ps(a.v)}; }
// start, start + 1, ...
inline IntVec count_from(uint32_t start) {
  const __m512i lane =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(start)), lane)};
}
// ~a where a is negative.
inline IntVec fold_negative(IntVec a) {
  return {_mm512_xor_si512(a.v, _mm512_srai_epi32(a.v, 31))};
}

// Every second lane of an IntVec, with room for a product of two of them. Only the low
// word of a lane counts; a product's high word is had by `high_words`.
struct WideVec {
  __m512i v;
};

inline WideVec even_lanes(IntVec a) { return {a.v}; }
inline WideVec odd_lanes(IntVec a) { return {_mm512_srli_epi64(a.v, 32)}; }
inline IntVec interleave(WideVec even, WideVec odd) {
  return {_mm512_mask_blend_epi32(0xAAAA, even.v, _mm512_slli_epi64(odd.v, 32))};
}
inline WideVec broadcast_word(uint32_t a) {
  return {_mm512_set1_epi32(static_cast<int>(a))};
}
inline WideVec operator^(WideVec a, WideVec b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline WideVec multiply_words(WideVec a, WideVec b) { return {_mm512_mul_epu32(a.v, b.v)}; }
inline WideVec high_words(WideVec a) { return {_mm512_srli_epi64(a.v, 32)}; }

inline Vec load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// To nearest, ties to even.
inline void store_half(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// The lowest byte of each lane's bit pattern.
inline void store_low_bytes(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtepi32_epi8(_mm512_castps_si512(a.v)));
}

// Four bytes in each lane.
struct Bytes {
  __m512i v;
};

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))};
}
inline Bytes high_nibbles(Bytes a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }

// NibbleSums: sums of products of nibbles, four in each lane, and four values in
// -127..127 that all lanes share; exact for eight additions.
//
// SignedBytes: four values in each lane, of which p has value + 128; their products are
// summed in an IntVec, any number of them. What is multiplied is value + kBytesOffset.
//
// The names differ between the two ways: a library has objects of both, and the linker
// keeps one of the inline functions of a name. All else here is the same in both.
#if defined(__AVX512VNNI__)
inline namespace with_vnni {

using NibbleSums = IntVec;

inline NibbleSums no_products() { return broadcast_int(0); }
inline void add_products(NibbleSums& sums, Bytes a, int32_t four) {
  sums.v = _mm512_dpbusd_epi32(sums.v, a.v, _mm512_set1_epi32(four));
}
inline IntVec total(NibbleSums sums) { return sums; }

constexpr int32_t kBytesOffset = 128;
using SignedBytes = Bytes;

inline SignedBytes load_signed(const uint8_t* p) { return load_bytes(p); }
inline void add_signed_products(IntVec& sums, SignedBytes a, int32_t four) {
  add_products(sums, a, four);
}

}  // namespace with_vnni
#else
inline namespace without_vnni {

struct NibbleSums {
  __m512i pairs;
};

inline NibbleSums no_products() { return {_mm512_setzero_si512()}; }
inline void add_products(NibbleSums& sums, Bytes a, int32_t four) {
  const __m512i pairs = _mm512_maddubs_epi16(a.v, _mm512_set1_epi32(four));
  sums.pairs = _mm512_add_epi16(sums.pairs, pairs);
  // Else the compiler adds in a tree, for which the registers are too few.
  asm("" : "+v"(sums.pairs));
}
inline IntVec total(NibbleSums sums) {
  return {_mm512_madd_epi16(sums.pairs, _mm512_set1_epi16(1))};
}

constexpr int32_t kBytesOffset = 0;

// Products take a magnitude, and the other factor with its sign: two of them fit in 16
// bits, as 128 * 127 * 2 < 2^15.
struct SignedBytes {
  __m512i magnitudes;
  __mmask64 negative;
};

inline SignedBytes load_signed(const uint8_t* p) {
  const __m512i values =
      _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  return {_mm512_abs_epi8(values), _mm512_movepi8_mask(values)};
}
inline void add_signed_products(IntVec& sums, SignedBytes a, int32_t four) {
  const __m512i all = _mm512_set1_epi32(four);
  const __m512i x = _mm512_mask_sub_epi8(all, a.negative, _mm512_setzero_si512(), all);
  const __m512i pairs = _mm512_maddubs_epi16(a.magnitudes, x);
  const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  sums.v = _mm512_add_epi32(sums.v, fours);
  asm("" : "+v"(sums.v));
}

}  // namespace without_vnni
#endif

#elif defined(__AVX2__)

struct Vec {
  __m256 lo, hi;
};

constexpr int kRegisters = 8;

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec broadcast(float a) {
  const __m256 v = _mm256_set1_ps(a);
  return {v, v};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline uint32_t greater(Vec a, Vec b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
  return static_cast<uint32_t>(lo | (hi << 8));
}
inline uint32_t greater_equal(Vec a, Vec b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
  return static_cast<uint32_t>(lo | (hi << 8));
}
inline __m256 spread_bits(uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane));
}
inline Vec select(uint32_t bits, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, spread_bits(bits)),
          _mm256_blendv_ps(b.hi, a.hi, spread_bits(bits >> 8))};
}
inline __m256 power_of_two_half(__m256 t) {
  const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline Vec power_of_two(Vec t) {
  return {power_of_two_half(t.lo), power_of_two_half(t.hi)};
}
inline Vec pattern_as_float(Vec a) {
  return {_mm256_cvtepi32_ps(_mm256_castps_si256(a.lo)),
          _mm256_cvtepi32_ps(_mm256_castps_si256(a.hi))};
}
inline __m256 fold_half(Vec a) { return _mm256_add_ps(a.lo, a.hi); }
inline __m256 max_half(Vec a) { return _mm256_max_ps(a.lo, a.hi); }

struct IntVec {
  __m256i lo, hi;
};

inline IntVec broadcast_int(int32_t a) {
  const __m256i v = _mm256_set1_epi32(a);
  return {v, v};
}
inline IntVec operator+(IntVec a, IntVec b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline Vec to_float(IntVec a) {
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
inline IntVec count_from(uint32_t start) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(start));
  return {_mm256_add_epi32(all, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_add_epi32(all, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
inline IntVec fold_negative(IntVec a) {
  return {_mm256_xor_si256(a.lo, _mm256_srai_epi32(a.lo, 31)),
          _mm256_xor_si256(a.hi, _mm256_srai_epi32(a.hi, 31))};
}

struct WideVec {
  __m256i lo, hi;
};

inline WideVec even_lanes(IntVec a) { return {a.lo, a.hi}; }
inline WideVec high_words(WideVec a) {
  return {_mm256_srli_epi64(a.lo, 32), _mm256_srli_epi64(a.hi, 32)};
}
inline WideVec odd_lanes(IntVec a) { return high_words({a.lo, a.hi}); }
inline IntVec interleave(WideVec even, WideVec odd) {
  return {_mm256_blend_epi32(even.lo, _mm256_slli_epi64(odd.lo, 32), 0xAA),
          _mm256_blend_epi32(even.hi, _mm256_slli_epi64(odd.hi, 32), 0xAA)};
}
inline WideVec broadcast_word(uint32_t a) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(a));
  return {v, v};
}
inline WideVec operator^(WideVec a, WideVec b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
inline WideVec multiply_words(WideVec a, WideVec b) {
  return {_mm256_mul_epu32(a.lo, b.lo), _mm256_mul_epu32(a.hi, b.hi)};
}

inline Vec load_half(const uint16_t* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)),
          _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline __m256 load_eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load_eight(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_half(uint16_t* p, Vec a) {
  auto* halves = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_low_bytes(int8_t* p, Vec a) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i words = _mm256_packus_epi32(
      _mm256_and_si256(_mm256_castps_si256(a.lo), low),
      _mm256_and_si256(_mm256_castps_si256(a.hi), low));
  // Packing keeps the halves of the registers apart: 0-3 8-11 4-7 12-15.
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered),
                                    _mm256_extracti128_si256(ordered, 1)));
}

struct Bytes {
  __m256i lo, hi;
};

inline Bytes load_bytes(const uint8_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Bytes low_nibbles(Bytes a) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low)};
}
inline Bytes high_nibbles(Bytes a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}

struct NibbleSums {
  __m256i lo, hi;
};

inline NibbleSums no_products() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
inline void add_products(NibbleSums& sums, Bytes a, int32_t four) {
  const __m256i all = _mm256_set1_epi32(four);
  sums.lo = _mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(a.lo, all));
  sums.hi = _mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(a.hi, all));
  // Else the compiler adds in a tree, for which the registers are too few.
  asm("" : "+x"(sums.lo), "+x"(sums.hi));
}
inline IntVec total(NibbleSums sums) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.lo, one), _mm256_madd_epi16(sums.hi, one)};
}

constexpr int32_t kBytesOffset = 0;

// Products take a magnitude, and the other factor with its sign: two of them fit in 16
// bits, as 128 * 127 * 2 < 2^15.
struct SignedBytes {
  __m256i lo, hi, low_magnitudes, high_magnitudes;
};

inline SignedBytes load_signed(const uint8_t* p) {
  const Bytes stored = load_bytes(p);
  const __m256i offset = _mm256_set1_epi8(-128);
  const __m256i lo = _mm256_xor_si256(stored.lo, offset);
  const __m256i hi = _mm256_xor_si256(stored.hi, offset);
  return {lo, hi, _mm256_abs_epi8(lo), _mm256_abs_epi8(hi)};
}
inline __m256i sums_of_fours(__m256i magnitudes, __m256i signs, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, signs));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline void add_signed_products(IntVec& sums, const SignedBytes& a, int32_t four) {
  const __m256i all = _mm256_set1_epi32(four);
  sums.lo = _mm256_add_epi32(sums.lo, sums_of_fours(a.low_magnitudes, a.lo, all));
  sums.hi = _mm256_add_epi32(sums.hi, sums_of_fours(a.high_magnitudes, a.hi, all));
  asm("" : "+x"(sums.lo), "+x"(sums.hi));
}

#else

// Four lanes each, as the registers of most processors are. The compiler knows how to
// do arithmetic on them everywhere; words of memory are little-endian.
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
using LongWords = uint64_t __attribute__((vector_size(16)));

struct Vec {
  Floats v[4];
};

// Few processors have more, and smaller tiles are right everywhere.
constexpr int kRegisters = 8;

// {f(0), ..., f(3)}: a loop would keep the lanes in memory.
template <typename V, typename F>
inline __attribute__((always_inline)) V each_part(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vec load(const float* p) {
  Vec r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline Vec broadcast(float a) {
  const Floats v = {a, a, a, a};
  return {{v, v, v, v}};
}
#if defined(__FP_FAST_FMAF)
inline Vec fma(Vec a, Vec b, Vec c) {
  return each_part<Vec>([&](int i) {
    Floats r;
    for (int j = 0; j < 4; ++j) r[j] = std::fmaf(a.v[i][j], b.v[i][j], c.v[i][j]);
    return r;
  });
}
#else
// Much faster than the library's, one lane at a time. The product is exact in double
// precision; the sum is rounded to an odd number where it is not exact, after which
// rounding to single precision gives what rounding once would.
// Source: Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums", 2008.
inline Floats fma_part(Floats a, Floats b, Floats c) {
  using Pair = float __attribute__((vector_size(8)));
  using Doubles = double __attribute__((vector_size(16)));
  using Bits = int64_t __attribute__((vector_size(16)));
  Floats r;
  for (int half = 0; half < 4; half += 2) {
    const Doubles product = Doubles{a[half], a[half + 1]} * Doubles{b[half], b[half + 1]};
    const Doubles addend = {c[half], c[half + 1]};
    Doubles sum = product + addend;
    const Doubles part = sum - product;
    const Doubles error = (product - (sum - part)) + (addend - part);
    // One step away from or towards zero; a NaN is neither above nor below it.
    const Bits is_above = error > 0.0, is_inexact = is_above | (error < 0.0);
    const Bits step = is_inexact & ((is_above ^ (sum > 0.0)) | 1);
    Bits bits = reinterpret_cast<Bits>(sum);
    bits += step & ((bits & 1) - 1);
    sum = reinterpret_cast<Doubles>(bits);
    const Pair rounded = __builtin_convertvector(sum, Pair);
    r[half] = rounded[0];
    r[half + 1] = rounded[1];
  }
  return r;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return each_part<Vec>([&](int i) { return fma_part(a.v[i], b.v[i], c.v[i]); });
}
#endif
inline Vec operator+(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec max(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// The bits of part i of the lanes.
inline Ints lane_bits(int i) { return Ints{1, 2, 4, 8} << (4 * i); }
template <typename F>
inline uint32_t gather_bits(F f) {
  const Ints all = (f(0) & lane_bits(0)) | (f(1) & lane_bits(1)) | (f(2) & lane_bits(2)) |
                   (f(3) & lane_bits(3));
  return static_cast<uint32_t>(all[0] | all[1] | all[2] | all[3]);
}
inline uint32_t greater(Vec a, Vec b) {
  return gather_bits([&](int i) { return a.v[i] > b.v[i]; });
}
inline uint32_t greater_equal(Vec a, Vec b) {
  return gather_bits([&](int i) { return a.v[i] >= b.v[i]; });
}
inline Vec select(uint32_t bits, Vec a, Vec b) {
  const int32_t all = static_cast<int32_t>(bits);
  return each_part<Vec>([&](int i) {
    return (lane_bits(i) & all) != 0 ? a.v[i] : b.v[i];
  });
}
inline Vec power_of_two(Vec t) {
  return each_part<Vec>([&](int i) {
    return reinterpret_cast<Floats>((reinterpret_cast<Words>(t.v[i]) + 127) << 23);
  });
}
inline Vec pattern_as_float(Vec a) {
  return each_part<Vec>([&](int i) {
    return __builtin_convertvector(reinterpret_cast<Ints>(a.v[i]), Floats);
  });
}

struct IntVec {
  Ints v[4];
};

inline IntVec broadcast_int(int32_t a) {
  const Ints v = {a, a, a, a};
  return {{v, v, v, v}};
}
inline IntVec operator+(IntVec a, IntVec b) {
  return each_part<IntVec>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec to_float(IntVec a) {
  return each_part<Vec>([&](int i) { return __builtin_convertvector(a.v[i], Floats); });
}
inline IntVec count_from(uint32_t start) {
  return each_part<IntVec>([&](int i) {
    const Words lane = {0, 1, 2, 3};
    return reinterpret_cast<Ints>(lane + (start + static_cast<uint32_t>(4 * i)));
  });
}
inline IntVec fold_negative(IntVec a) {
  return each_part<IntVec>([&](int i) { return a.v[i] ^ (a.v[i] >> 31); });
}

struct WideVec {
  LongWords v[4];
};

constexpr uint64_t kLowWord = 0xFFFFFFFF;

inline WideVec even_lanes(IntVec a) {
  return each_part<WideVec>([&](int i) { return reinterpret_cast<LongWords>(a.v[i]); });
}
inline WideVec high_words(WideVec a) {
  return each_part<WideVec>([&](int i) { return a.v[i] >> 32; });
}
inline WideVec odd_lanes(IntVec a) { return high_words(even_lanes(a)); }
inline IntVec interleave(WideVec even, WideVec odd) {
  return each_part<IntVec>([&](int i) {
    return reinterpret_cast<Ints>((even.v[i] & kLowWord) | (odd.v[i] << 32));
  });
}
inline WideVec broadcast_word(uint32_t a) {
  const LongWords v = {a, a};
  return {{v, v, v, v}};
}
inline WideVec operator^(WideVec a, WideVec b) {
  return each_part<WideVec>([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline WideVec multiply_words(WideVec a, WideVec b) {
  return each_part<WideVec>([&](int i) {
    return (a.v[i] & kLowWord) * (b.v[i] & kLowWord);
  });
}

inline float half_to_float(uint16_t half) {
  // The exponent and mantissa in a float's place are the value times 2^-112.
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t size = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  float value;
  std::memcpy(&value, &size, 4);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  // Infinity and NaN keep the largest exponent.
  if ((half & 0x7C00u) == 0x7C00u) bits = 0x7F800000u | size;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline Vec load_half(const uint16_t* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(p[i]);
  return load(lanes);
}
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t size = bits & 0x7FFFFFFFu;
  // A NaN is made quiet and keeps the high bits that tell it from others.
  if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (size >> 13 & 0x3FFu));
  if (size < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24, as floats from 0.5 on are.
    float sum;
    std::memcpy(&sum, &size, 4);
    sum += 0.5f;
    std::memcpy(&size, &sum, 4);
    return static_cast<uint16_t>(sign | (size - 0x3F000000u));
  }
  // A carry out of the mantissa is the next exponent's first value.
  const uint32_t half = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13;
  return static_cast<uint16_t>(sign | (half < 0x7C00u ? half : 0x7C00u));
}
inline void store_half(uint16_t* p, Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(lanes[i]);
}
inline void store_low_bytes(int8_t* p, Vec a) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, a.v, sizeof(lanes));
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}

struct Bytes {
  Words v[4];
};

inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline Bytes low_nibbles(Bytes a) {
  return each_part<Bytes>([&](int i) { return a.v[i] & 0x0F0F0F0F; });
}
inline Bytes high_nibbles(Bytes a) {
  return each_part<Bytes>([&](int i) { return a.v[i] >> 4 & 0x0F0F0F0F; });
}

using NibbleSums = IntVec;

inline NibbleSums no_products() { return broadcast_int(0); }
// The sum of the products of the lowest and the third byte of each lane: a product fits
// in 16 bits, as 255 * 127 < 2^15.
inline Ints sum_of_two(Words a, Words four) {
  using Shorts = int16_t __attribute__((vector_size(16)));
  const Shorts x = (reinterpret_cast<Shorts>(four) << 8) >> 8;
  const Shorts values = reinterpret_cast<Shorts>(a & 0x00FF00FF);
  const Shorts products = values * x;
  const Ints low = reinterpret_cast<Ints>(reinterpret_cast<Words>(products) << 16) >> 16;
  return (reinterpret_cast<Ints>(products) >> 16) + low;
}
inline void add_products(NibbleSums& sums, Bytes a, int32_t four) {
  const uint32_t word = static_cast<uint32_t>(four);
  const Words all = {word, word, word, word};
  sums = sums + each_part<IntVec>([&](int i) {
    return sum_of_two(a.v[i], all) + sum_of_two(a.v[i] >> 8, all >> 8);
  });
}
inline IntVec total(NibbleSums sums) { return sums; }

constexpr int32_t kBytesOffset = 128;
using SignedBytes = Bytes;

inline SignedBytes load_signed(const uint8_t* p) { return load_bytes(p); }
inline void add_signed_products(IntVec& sums, const SignedBytes& a, int32_t four) {
  add_products(sums, a, four);
}

#endif

// Sums and maxima over lanes, always folded 16 -> 8 -> 4 -> 2 -> 1.
#if defined(__AVX2__)
inline float sum(Vec a) {
  const __m256 h = fold_half(a);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float largest(Vec a) {
  const __m256 h = max_half(a);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
#else
inline float sum(Vec a) {
  const Floats q = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
inline float largest(Vec a) {
  const auto larger = [](auto x, auto y) { return x > y ? x : y; };
  const Floats q = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
  return larger(larger(q[0], q[2]), larger(q[1], q[3]));
}
#endif

inline Vec load_first(const float* p, int64_t count, float fill) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}

inline void store_first(float* p, Vec a, int64_t count) {
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(float));
}

// One group of lanes of a row. The last, shorter group goes through the same arithmetic,
// so an element's result does not depend on its place.
inline Vec load_at(const float* p, int64_t start, int64_t size, float fill) {
  return start + kLanes <= size ? load(p + start)
                                : load_first(p + start, size - start, fill);
}

inline void store_at(float* p, Vec a, int64_t start, int64_t size) {
  if (start + kLanes <= size)
    store(p + start, a);
  else
    store_first(p + start, a, size - start);
}

// What is beyond the largest finite half becomes that, not infinite; NaN stays NaN.
inline void store_half_saturated(uint16_t* p, Vec a) {
  constexpr float kLargest = 65504.0f;
  store_half(p, max(broadcast(-kLargest), min(broadcast(kLargest), a)));
}

// Sixteen elements of an array of floats or of halves.
inline Vec load_elements(const float* p) { return load(p); }
inline Vec load_elements(const uint16_t* p) { return load_half(p); }

// acc[i][g] += values[i] * the 16 elements at p. One register holds elements at a time
// where a vector is two: of 3 x 2 sums no more is free.
template <int ROWS, int GROUPS, typename T>
inline void add_column(Vec (&acc)[ROWS][GROUPS], int g, const Vec (&values)[ROWS],
                       const T* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Loaded once: the compiler would name the memory in each multiply-add, and so many
  // loads leave the queue no room for the lines that come later.
  __m256 lo = load_eight(p);
  asm("" : "+x"(lo));
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
    acc[i][g].lo = _mm256_fmadd_ps(values[i].lo, lo, acc[i][g].lo);
  __m256 hi = load_eight(p + 8);
  asm("" : "+x"(hi));
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
    acc[i][g].hi = _mm256_fmadd_ps(values[i].hi, hi, acc[i][g].hi);
#else
  const Vec column = load_elements(p);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) acc[i][g] = fma(values[i], column, acc[i][g]);
#endif
}

// e^x to about one unit in the last place; 0 below -87.3, infinite above 88.02, and NaN
// stays NaN. Chebyshev interpolation of degree 6 on |r| <= ln(2) / 2.
inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.33654f);
  const Vec high = broadcast(88.02f);
  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
  const Vec rounder = broadcast(12582912.0f);
  const Vec c = min(high, max(low, x));
  const Vec t = fma(c, broadcast(1.44269504f), rounder);
  const Vec n = t - rounder;
  Vec r = fma(n, broadcast(-0.693359375f), c);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(0.0013942159712314606f);
  p = fma(p, r, broadcast(0.008375967852771282f));
  p = fma(p, r, broadcast(0.041666340082883835f));
  p = fma(p, r, broadcast(0.16666404902935028f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  const Vec result = select(greater(low, x), broadcast(0.0f), p * power_of_two(t));
  return select(greater(x, high), broadcast(HUGE_VALF), result);
}

}  // namespace vllm
