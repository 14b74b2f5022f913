// What this machine can do at most, in the terms of a product with quantized weights:
// bytes read from memory, and products of bytes that are in registers already.
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "vec.h"

using namespace vllm;

// Reads `num_bytes` of memory `num_rounds` times; the result keeps the reads alive.
extern "C" int64_t read_memory(const uint8_t* data, int64_t num_bytes, int64_t num_rounds) {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<int64_t> sums(num_bytes / kPiece);
  for (int64_t round = 0; round < num_rounds; ++round)
    parallel_for(num_bytes / kPiece, 4, [&](int64_t piece) {
      IntVec sum[4] = {broadcast_int(0), broadcast_int(0), broadcast_int(0),
                       broadcast_int(0)};
      const uint8_t* p = data + piece * kPiece;
      for (int64_t i = 0; i < kPiece; i += 256) {
        __builtin_prefetch(p + i + 4096);
        __builtin_prefetch(p + i + 4160);
        __builtin_prefetch(p + i + 4224);
        __builtin_prefetch(p + i + 4288);
        for (int j = 0; j < 4; ++j) {
          IntVec four;
          std::memcpy(&four, p + i + 64 * j, 64);
          sum[j] = sum[j] + four;
        }
      }
      int32_t lanes[kLanes];
      const IntVec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      std::memcpy(lanes, &all, 64);
      sums[piece] += lanes[0];
    });
  int64_t total = 0;
  for (int64_t sum : sums) total += sum;
  return total;
}

// `num_rounds` times 8 independent sums of 64 products, a piece; returns a sum.
extern "C" int64_t multiply_bytes(int64_t num_pieces, int64_t num_rounds, int32_t four) {
  std::vector<int64_t> sums(num_pieces);
  parallel_for(num_pieces, 1, [&](int64_t piece) {
    constexpr int kChains = 8;
    uint8_t bytes[4 * kLanes];
    for (int i = 0; i < 4 * kLanes; ++i) bytes[i] = static_cast<uint8_t>((i + piece) & 15);
    const Bytes weights = load_bytes(bytes);
    ProductSums chains[kChains];
    for (ProductSums& chain : chains) chain = no_products();
    for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 8
      for (ProductSums& chain : chains) {
        add_products(chain, weights, four);
        // Each product is a new one to the compiler.
        asm volatile("" : "+m"(four));
      }
    }
    int32_t lanes[kLanes];
    IntVec all = broadcast_int(0);
    for (const ProductSums& chain : chains) all = all + total<1>(chain);
    std::memcpy(lanes, &all, 64);
    sums[piece] = lanes[0];
  });
  int64_t total_sum = 0;
  for (int64_t sum : sums) total_sum += sum;
  return total_sum;
}
