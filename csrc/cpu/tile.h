// The inner product that everything dense is made of.
#pragma once

#include "vec.h"

namespace vllm {

// Rows and 16-column groups whose sums fit in the registers.
constexpr bool kHasManyRegisters = kRegisters >= 32;
constexpr int kMaxRows = kHasManyRegisters ? 12 : 6;
constexpr int kMaxQuantizedRows = kHasManyRegisters ? 12 : 4;
template <int ROWS>
constexpr int kGroups = kHasManyRegisters || ROWS <= 3 ? 2 : 1;

// For operands that nobody fetches ahead of their use.
struct NoFetch {
  void operator()(int, int64_t) const {}
};

// acc[i][g] += sum over k of a[i * ROW_STEP + k * K_STEP] * b[g][k * ldb + 0..15], one
// fused multiply-add after the other in the order of k: the bits of a result depend on
// its own row and column only. T is float, or uint16_t for halves. fetch(g, k) asks for
// what is needed after b[g] + k * ldb.
template <int ROWS, int GROUPS, int ROW_STEP, int K_STEP, typename T,
          typename Fetch = NoFetch>
inline __attribute__((always_inline)) void accumulate(Vec (&acc)[ROWS][GROUPS],
                                                      const float* a,
                                                      const T* const (&b)[GROUPS],
                                                      int64_t ldb, int64_t size,
                                                      const Fetch& fetch = {}) {
  for (int64_t k = 0; k < size; ++k) {
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) fetch(g, k);
    // Whichever needs fewer registers besides the sums.
    if constexpr (ROWS <= 3) {
      Vec values[ROWS];
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) values[i] = broadcast(a[i * ROW_STEP + k * K_STEP]);
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) add_column(acc, g, values, b[g] + k * ldb);
    } else {
      Vec column[GROUPS];
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) column[g] = load_elements(b[g] + k * ldb);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const Vec value = broadcast(a[i * ROW_STEP + k * K_STEP]);
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) acc[i][g] = fma(value, column[g], acc[i][g]);
      }
    }
  }
}

// Calls body.template operator()<ROWS>() for a number of rows known at run time only.
template <int ROWS, typename Body>
inline void with_rows(int num_rows, const Body& body) {
  if (num_rows == ROWS)
    body.template operator()<ROWS>();
  else if constexpr (ROWS > 1)
    with_rows<ROWS - 1>(num_rows, body);
}

}  // namespace vllm
