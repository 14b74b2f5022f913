// Threads: one team, handed out work items in order, as wide as the caller's OpenMP says.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace vllm {

inline int num_threads() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

// Calls body(item) for every item in [0, count), `grain` neighbours to one thread at a
// time. What an item computes must not depend on the thread that gets it.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  const int64_t num_grains = (count + grain - 1) / grain;
#ifdef _OPENMP
  const int64_t team = num_grains < num_threads() ? num_grains : num_threads();
  if (team > 1) {
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(team))
    for (;;) {
      const int64_t start = next.fetch_add(grain, std::memory_order_relaxed);
      if (start >= count) break;
      const int64_t end = start + grain < count ? start + grain : count;
      for (int64_t item = start; item < end; ++item) body(item);
    }
    return;
  }
#endif
  for (int64_t item = 0; item < count; ++item) body(item);
}

// The grain at which one hand-out is worth at least `minimum` units of work.
inline int64_t grain_for(int64_t work_per_item, int64_t minimum) {
  const int64_t items = minimum / (work_per_item > 0 ? work_per_item : 1);
  return items > 1 ? items : 1;
}

// Memory that a thread keeps between calls; grows, is never shared, holds no state.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `size` bytes on a cache line; contents are undefined.
  void* get(size_t size) {
    if (size > capacity_) {
      std::free(data_);
      capacity_ = (size + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, capacity_);
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }

  float* floats(size_t count) { return static_cast<float*>(get(count * sizeof(float))); }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace vllm
