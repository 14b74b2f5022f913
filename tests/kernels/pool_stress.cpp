// Jobs of few and of many pieces in turn: a helper that was put aside while it claimed a
// piece of the last job must not run this one's.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "parallel.h"

// From the header it would not go with the weak declaration of its sister.
extern "C" void omp_set_num_threads(int);

int main(int argc, char** argv) {
  const int num_jobs = argc > 1 ? std::atoi(argv[1]) : 0;
  // More threads than cores, so that the system puts some of them aside.
  omp_set_num_threads(8);
  int64_t num_wrong = 0;
  for (int job = 0; job < num_jobs; ++job) {
    const int64_t count = job % 2 ? 3 : 64;
    std::vector<std::atomic<int>> runs(count);
    vllm::parallel_for(count, 1, [&](int64_t item) {
      if (item < count) {
        runs[item].fetch_add(1);
      } else {
        std::abort();
      }
    });
    for (const auto& number : runs) num_wrong += number.load() != 1;
  }
  std::printf("%lld\n", static_cast<long long>(num_wrong));
  return 0;
}
