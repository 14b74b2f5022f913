// Threads: a pool that hands out work items, as wide as the caller's OpenMP says.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>

// Of the runtime that torch has loaded, so that both count the same threads, whichever
// compiler this is; null where there is none.
extern "C" __attribute__((weak)) int omp_get_max_threads();

namespace vllm {

// Only asks for the width that torch was set to: its own team is not used, because the
// join of an OpenMP region waits for every thread, also for one that the system has put
// aside and that has no work. With more processes than cores that costs a time slice a
// region, hundreds of times a step.
inline int num_threads() {
  return omp_get_max_threads == nullptr ? 1 : omp_get_max_threads();
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For waits that are over soon, unless the system has put the other thread aside.
template <typename Condition>
inline void spin_until(const Condition& is_over) {
  constexpr int kSpinsBeforeYield = 1000;
  for (int spins = 0; !is_over(); ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause_briefly();
    } else {
      sched_yield();
    }
  }
}

// One job at a time. Whoever is awake claims pieces of it; the caller works too, and in
// the end waits only for pieces that somebody has claimed. A helper that is asleep, put
// aside by the system or lost in a fork is never waited for.
class Pool {
 public:
  using Piece = void (*)(const void* body, int64_t index);

  static Pool& instance() {
    // Never destroyed: helpers may outlive the statics.
    static Pool* pool = new Pool();
    return *pool;
  }

  // Calls piece(body, index) for every index in [0, count), on at most `width` threads.
  void run(int64_t count, int width, Piece piece, const void* body) {
    // A second caller, and a piece that calls again, do their work alone.
    if (is_busy_.test_and_set(std::memory_order_acquire)) {
      for (int64_t index = 0; index < count; ++index) piece(body, index);
      return;
    }
    for (; num_helpers_ < width - 1; ++num_helpers_) {
      std::thread([this, number = num_helpers_] { help(number); }).detach();
    }
    // A new epoch, closed before a field changes: a helper that was put aside between
    // its look at the old claims and at the fields must not claim by a mix of both.
    const uint64_t epoch = (claims_.load(std::memory_order_relaxed) >> 32) + 1;
    claims_.store(epoch << 32 | kClosed, std::memory_order_relaxed);
    piece_.store(piece, std::memory_order_release);
    body_.store(body, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    width_.store(width, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    // Open: from here on the fields belong together. They change again only when no
    // piece of this epoch is left to claim and all claimed ones are done.
    claims_.store(epoch << 32, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) claims_.notify_all();
    while (claim_and_run()) {
    }
    spin_until([&] { return num_done_.load(std::memory_order_acquire) == count; });
    is_busy_.clear(std::memory_order_release);
  }

 private:
  // In the place of the pieces claimed: more than any job has.
  static constexpr uint64_t kClosed = 0xFFFFFFFFu;
  // Longer than the gaps between the operators of a layer.
  static constexpr std::chrono::microseconds kSpinTime{100};
  // Longer than the host's work between two parts of a step: to wake a thread takes as
  // long as a small product. Others that want the core have it meanwhile.
  static constexpr std::chrono::microseconds kYieldTime{1000};

  // A claim succeeds only if the epoch has not changed since the fields were read: who
  // sees a field of the next epoch also sees that this one is closed.
  bool claim_and_run() {
    uint64_t claims = claims_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t count = count_.load(std::memory_order_acquire);
      const Piece piece = piece_.load(std::memory_order_acquire);
      const void* body = body_.load(std::memory_order_acquire);
      const int64_t index = static_cast<int64_t>(claims & 0xFFFFFFFFu);
      if (index >= count) return false;
      if (claims_.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        piece(body, index);
        num_done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void help(int number) {
    for (;;) {
      while (number < width_.load(std::memory_order_relaxed) - 1 && claim_and_run()) {
      }
      const uint64_t seen = claims_.load(std::memory_order_acquire);
      if (has_changed_soon(seen)) continue;
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      claims_.wait(seen, std::memory_order_seq_cst);
      num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  bool has_changed_soon(uint64_t seen) const {
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      for (int spins = 0; spins < 64; ++spins) {
        if (claims_.load(std::memory_order_acquire) != seen) return true;
        pause_briefly();
      }
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited > kYieldTime) return false;
      if (waited > kSpinTime) sched_yield();
    }
  }

  std::atomic_flag is_busy_ = ATOMIC_FLAG_INIT;
  int num_helpers_ = 0;
  std::atomic<Piece> piece_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<int64_t> count_{0};
  std::atomic<int> width_{0};
  std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<uint64_t> claims_{0};  // epoch << 32 | pieces claimed
  alignas(64) std::atomic<int64_t> num_done_{0};
};

// Calls body(item) for every item in [0, count), `grain` neighbours to one thread at a
// time, handed out in order. What an item computes must not depend on the thread that
// gets it.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  const int64_t num_grains = (count + grain - 1) / grain;
  const int64_t width = num_grains < num_threads() ? num_grains : num_threads();
  const auto run_grain = [&](int64_t index) {
    const int64_t start = index * grain;
    const int64_t end = start + grain < count ? start + grain : count;
    for (int64_t item = start; item < end; ++item) body(item);
  };
  if (width <= 1) {
    for (int64_t index = 0; index < num_grains; ++index) run_grain(index);
    return;
  }
  Pool::instance().run(
      num_grains, static_cast<int>(width),
      [](const void* context, int64_t index) {
        (*static_cast<const decltype(run_grain)*>(context))(index);
      },
      &run_grain);
}

// Items of a parallel_for that later items of the same one need. They have been handed
// out before, so whoever waits for them waits for threads that are at work.
class Countdown {
 public:
  explicit Countdown(int64_t num_items) : num_left_(num_items) {}

  void finish_item() { num_left_.fetch_sub(1, std::memory_order_release); }
  bool is_over() const { return num_left_.load(std::memory_order_acquire) == 0; }

 private:
  std::atomic<int64_t> num_left_;
};

inline int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
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
