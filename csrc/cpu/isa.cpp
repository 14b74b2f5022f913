// Which of the builds this processor can run.
#include "api.h"

// 0: not even the base build; 1: the base build; 2: also the AVX-512 build.
VLLM_API int64_t vllm_isa_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  return has_avx512 ? 2 : 1;
#else
  return 1;
#endif
}
