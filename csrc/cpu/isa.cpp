// Which of the builds this processor can run.
#include "api.h"

// 0: the portable build only; 1: also the base build; 2: also the AVX-512 build; 3: also
// the one with its dot products of bytes. Where the base build is the portable one, 1.
VLLM_API int64_t vllm_isa_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every processor with AVX2 converts half floats too.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (!has_avx512) return 1;
  return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
#else
  return 1;
#endif
}
