// What the system is told about memory that is read in every step.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace vllm {

// Huge pages save the misses in the translation buffer that one pass a step causes.
inline void advise_huge_pages(void* data, size_t num_bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2u << 20;
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (start + num_bytes) / kHuge * kHuge;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data;
  (void)num_bytes;
#endif
}

}  // namespace vllm
