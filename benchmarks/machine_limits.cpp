// What this machine can do at most, in the terms of a product with quantized weights:
// bytes read from memory, and products of bytes that are in registers already.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "pages.h"
#include "parallel.h"
#include "vec.h"

using namespace vllm;

namespace {

constexpr int64_t kPieceBytes = 1 << 20;

int64_t sum_of(const std::vector<int64_t>& numbers) {
  int64_t total = 0;
  for (int64_t number : numbers) total += number;
  return total;
}

int32_t first_lane(IntVec a) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &a, sizeof(lanes));
  return lanes[0];
}

}  // namespace

// Memory as the weights have it: in huge pages, and written.
extern "C" uint8_t* allocate_memory(int64_t num_pieces) {
  const size_t num_bytes = static_cast<size_t>(num_pieces * kPieceBytes);
  auto* data = static_cast<uint8_t*>(std::aligned_alloc(1 << 21, num_bytes));
  if (data == nullptr) std::abort();
  advise_huge_pages(data, num_bytes);
  std::memset(data, 1, num_bytes);
  return data;
}

extern "C" void free_memory(uint8_t* data) { std::free(data); }

// Reads all pieces once; the result keeps the reads alive.
extern "C" int64_t read_memory(const uint8_t* data, int64_t num_pieces) {
  std::vector<int64_t> sums(num_pieces);
  parallel_for(num_pieces, 8, [&](int64_t piece) {
    constexpr int64_t kAhead = 4096;
    const uint8_t* p = data + piece * kPieceBytes;
    Vec low = broadcast(0.0f), high = broadcast(0.0f);
    for (int64_t i = 0; i < kPieceBytes; i += 128) {
      __builtin_prefetch(p + i + kAhead);
      __builtin_prefetch(p + i + kAhead + 64);
      low = low + load(reinterpret_cast<const float*>(p + i));
      high = high + load(reinterpret_cast<const float*>(p + i + 64));
    }
    sums[piece] = greater(low, high);
  });
  return sum_of(sums);
}

// `num_rounds` times 1024 sums of 64 products a piece, eight of them independent.
extern "C" int64_t multiply_bytes(int64_t num_pieces, int64_t num_rounds) {
  constexpr int kChains = 8;
  constexpr int kFours = 1024;
  std::vector<int64_t> sums(num_pieces);
  parallel_for(num_pieces, 1, [&](int64_t piece) {
    int32_t fours[kFours];
    for (int i = 0; i < kFours; ++i) fours[i] = static_cast<int32_t>(i + piece);
    uint8_t bytes[4 * kLanes];
    for (int i = 0; i < 4 * kLanes; ++i) bytes[i] = static_cast<uint8_t>(i & 15);
    const Bytes weights = load_bytes(bytes);
    NibbleSums chains[kChains];
    for (int c = 0; c < kChains; ++c) chains[c] = no_products();
    for (int64_t round = 0; round < num_rounds; ++round) {
      for (int i = 0; i < kFours; i += kChains) {
#pragma GCC unroll 8
        for (int c = 0; c < kChains; ++c) add_products(chains[c], weights, fours[i + c]);
      }
    }
    IntVec all = broadcast_int(0);
    for (int c = 0; c < kChains; ++c) all = all + total(chains[c]);
    sums[piece] = first_lane(all);
  });
  return sum_of(sums);
}
