// Dense layers over quantized weights.
//
// Activations are quantized to int8, in blocks of 32 or in whole rows as the weight's
// scales are. Products are summed in integers, exactly; a block's sum enters the row's
// float sum by one fused multiply-add, in the order of the blocks. So the bits of a
// result depend on its own row and column only.
#include "quantized.h"

#include <cmath>

#include "parallel.h"
#include "products.h"
#include "tile.h"

namespace vllm {
namespace {

// Multiply-adds below which a second thread costs more than it brings.
constexpr int64_t kMinWork = 131072;
// Elements of rows that are quantized as one piece of work.
constexpr int64_t kPieceElements = 2048;
// Share of the level 2 cache that a block of quantized rows may fill.
constexpr int64_t kRowBlockBytes = 256 * 1024;
// Hides the latency of memory.
constexpr int64_t kPrefetchBytes = 2048;
// What a thread fetches, piece by piece, while others quantize the rows that it waits for:
// memory would have nothing to do.
constexpr int64_t kAheadBytes = 65536;
constexpr int64_t kAheadPiece = 2048;

// A block's record in a tile of rows.
template <int ROWS>
struct TileBlock {
  int8_t values[ROWS][kBlock];
  float scale[ROWS];
  // Q4_1: the sum of the activations. Else minus the offset of products times the sum of the
  // values, an integer.
  union {
    float sum[ROWS];
    int32_t correction[ROWS];
  };
};
constexpr int64_t kRowBlock = sizeof(TileBlock<1>);

struct Product {
  const Rows& rows;
  const uint8_t* packed;
  const float* bias;
  Output out;
  int64_t num_rows, num_columns, size;

  int64_t blocks() const { return num_blocks(size); }
  int64_t panels() const { return (num_columns + kLanes - 1) / kLanes; }
  // Tiles of equal size as far as it goes.
  int64_t tile_rows() const {
    const int64_t tiles = (num_rows + kMaxQuantizedRows - 1) / kMaxQuantizedRows;
    return (num_rows + tiles - 1) / tiles;
  }
  uint8_t* tile(uint8_t* tiles, int64_t first_row) const {
    return tiles + first_row * blocks() * kRowBlock;
  }
};

// Row `row` of a tile of `count` rows.
template <Format F>
class QuantizedRow {
 public:
  QuantizedRow(uint8_t* tile, int64_t row, int64_t count)
      : tile_(tile), row_(row), count_(count) {}

  void write(int64_t block, Vec low, Vec high, Steps steps) const {
    uint8_t* record = tile_ + block * count_ * kRowBlock;
    auto* values = reinterpret_cast<int8_t*>(record) + row_ * kBlock;
    const Vec inverse = broadcast(steps.inverse);
    const Vec rounded_low = quantize(low, inverse, values);
    const Vec rounded = rounded_low + quantize(high, inverse, values + kLanes);
    const float total = sum(rounded);
    uint8_t* numbers = record + count_ * kBlock + row_ * 4;
    std::memcpy(numbers, &steps.scale, 4);
    if constexpr (F == Format::kQ4_1) {
      const float scaled = steps.scale * total;
      std::memcpy(numbers + count_ * 4, &scaled, 4);
    } else {
      // A row that is not finite has a scale that is none: any sum will do.
      const auto finite = std::isfinite(total) ? static_cast<int32_t>(total) : 0;
      const int32_t correction = -product_offset(F) * finite;
      std::memcpy(numbers + count_ * 4, &correction, 4);
    }
  }

 private:
  uint8_t* tile_;
  int64_t row_, count_;
};

Vec load_or_zero(const float* x, int64_t start, int64_t size) {
  return start < size ? load_at(x, start, size, 0.0f) : broadcast(0.0f);
}

template <Format F>
void quantize_row(const float* x, int64_t size, const QuantizedRow<F>& out) {
  Range row;
  if constexpr (F == Format::kInt8) {
    for (int64_t start = 0; start < size; start += kLanes)
      row.add(load_at(x, start, size, 0.0f));
  }
  const Steps row_steps = row.steps();
  for (int64_t start = 0; start < size; start += kBlock) {
    const Vec low = load_or_zero(x, start, size);
    const Vec high = load_or_zero(x, start + kLanes, size);
    Range range;
    range.add(low);
    range.add(high);
    out.write(start / kBlock, low, high, F == Format::kInt8 ? row_steps : range.steps());
  }
}

// Rows [first_row, end_row).
template <Format F>
void quantize_rows(const Product& p, int64_t first_row, int64_t end_row, uint8_t* tiles) {
  thread_local Scratch memory;
  float* buffer = memory.floats(static_cast<size_t>(p.size));
  const int64_t tile_rows = p.tile_rows();
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t first = row / tile_rows * tile_rows;
    const int64_t left = p.num_rows - first;
    const int64_t count = left < tile_rows ? left : tile_rows;
    quantize_row<F>(p.rows.read(row, buffer), p.size,
                    {p.tile(tiles, first), row - first, count});
  }
}

inline int32_t four_values(const int8_t* values) {
  int32_t four;
  std::memcpy(&four, values, 4);
  return four;
}

template <int ROWS>
inline void add_group(NibbleSums (&sums)[ROWS], Bytes weights, const TileBlock<ROWS>& x,
                      int group) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
    add_products(sums[i], weights, four_values(x.values[i] + 4 * group));
}

template <int ROWS>
inline void add_signed_group(IntVec (&sums)[ROWS], const SignedBytes& weights,
                             const TileBlock<ROWS>& x, int group) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
    add_signed_products(sums[i], weights, four_values(x.values[i] + 4 * group));
}

// The integer sums of one block's products, a row each.
template <Format F, int ROWS>
inline __attribute__((always_inline)) void multiply_block(const uint8_t* record,
                                                          const TileBlock<ROWS>& x,
                                                          IntVec (&out)[ROWS]) {
  if constexpr (has_nibbles(F)) {
    NibbleSums sums[ROWS];
    for (int i = 0; i < ROWS; ++i) sums[i] = no_products();
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
      const Bytes both = load_bytes(record + group * kGroupBytes);
      add_group(sums, low_nibbles(both), x, group);
      add_group(sums, high_nibbles(both), x, group + 4);
    }
    for (int i = 0; i < ROWS; ++i) out[i] = total(sums[i]);
  } else {
    for (int i = 0; i < ROWS; ++i) out[i] = broadcast_int(0);
#pragma GCC unroll 8
    for (int group = 0; group < 8; ++group)
      add_signed_group(out, load_signed(record + group * kGroupBytes), x, group);
  }
}

inline const uint16_t* halves_of(const uint8_t* record, Format format) {
  return reinterpret_cast<const uint16_t*>(record + value_bytes(format));
}

inline void prefetch(const uint8_t* data, int64_t num_bytes) {
  for (int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(data + line);
}

// Never part of its caller, whose variables would take registers from the inner loop.
template <Format F, int ROWS>
__attribute__((noinline)) void multiply_tile(const Product& p, const uint8_t* tile,
                                             int64_t first_row, int64_t panel) {
  const uint8_t* record = p.packed + panel * panel_bytes(F, p.size);
  const auto* x = reinterpret_cast<const TileBlock<ROWS>*>(tile);
  Vec acc[ROWS];
  for (int i = 0; i < ROWS; ++i) acc[i] = broadcast(0.0f);
  for (int64_t block = 0; block < p.blocks(); ++block, ++x, record += record_bytes(F)) {
    prefetch(record + kPrefetchBytes, record_bytes(F));
    IntVec sums[ROWS];
    multiply_block<F>(record, *x, sums);
    const Vec scale = load_half(halves_of(record, F));
    for (int i = 0; i < ROWS; ++i) {
      if constexpr (product_offset(F) != 0)
        sums[i] = sums[i] + broadcast_int(x->correction[i]);
      acc[i] = fma(to_float(sums[i]), scale * broadcast(x->scale[i]), acc[i]);
    }
    if constexpr (F == Format::kQ4_1) {
      const Vec minimum = load_half(halves_of(record, F) + kLanes);
      for (int i = 0; i < ROWS; ++i) acc[i] = fma(minimum, broadcast(x->sum[i]), acc[i]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    p.out.write(first_row + i, panel * kLanes, acc[i], p.bias, p.num_columns);
}

// One scale a row and column: the whole sum is an integer.
template <int ROWS>
__attribute__((noinline)) void multiply_int8_tile(const Product& p, const uint8_t* tile,
                                                  int64_t first_row, int64_t panel) {
  constexpr Format F = Format::kInt8;
  const uint8_t* record = p.packed + panel * panel_bytes(F, p.size);
  const auto* x = reinterpret_cast<const TileBlock<ROWS>*>(tile);
  IntVec acc[ROWS];
  for (int i = 0; i < ROWS; ++i) acc[i] = broadcast_int(0);
  for (int64_t block = 0; block < p.blocks(); ++block, ++x, record += record_bytes(F)) {
    prefetch(record + kPrefetchBytes, record_bytes(F));
    IntVec sums[ROWS];
    multiply_block<F>(record, *x, sums);
    for (int i = 0; i < ROWS; ++i) {
      if constexpr (product_offset(F) != 0)
        sums[i] = sums[i] + broadcast_int(x->correction[i]);
      acc[i] = acc[i] + sums[i];
    }
  }
  const auto* first = reinterpret_cast<const TileBlock<ROWS>*>(tile);
  const Vec scale = load(reinterpret_cast<const float*>(record));
  for (int i = 0; i < ROWS; ++i) {
    const Vec both = scale * broadcast(first->scale[i]);
    p.out.write(first_row + i, panel * kLanes, to_float(acc[i]) * both, p.bias,
                p.num_columns);
  }
}

// Rows [first_row, end_row) against the panels [first, last).
template <Format F>
void multiply_part(const Product& p, uint8_t* tiles, int64_t first_row, int64_t end_row,
                   int64_t first, int64_t last) {
  const int64_t tile_rows = p.tile_rows();
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t row = first_row; row < end_row; row += tile_rows) {
      const uint8_t* tile = p.tile(tiles, row);
      const int64_t left = p.num_rows - row;
      const int64_t count = left < tile_rows ? left : tile_rows;
      with_rows<kMaxQuantizedRows>(static_cast<int>(count), [&]<int ROWS>() {
        if constexpr (F == Format::kInt8)
          multiply_int8_tile<ROWS>(p, tile, row, panel);
        else
          multiply_tile<F, ROWS>(p, tile, row, panel);
      });
    }
  }
}

template <Format F>
void multiply(const Product& p) {
  if (p.num_rows == 0 || p.num_columns == 0) return;
  // The caller's: the helpers use it, and are done when the call returns.
  thread_local Scratch memory;
  auto* tiles = static_cast<uint8_t*>(
      memory.get(static_cast<size_t>(p.num_rows * p.blocks() * kRowBlock)));

  const int64_t tile_rows = p.tile_rows();
  const int64_t fitting = kRowBlockBytes / (p.blocks() * kRowBlock * tile_rows);
  const int64_t rows = tile_rows * (fitting > 0 ? fitting : 1);
  const int64_t num_row_parts = (p.num_rows + rows - 1) / rows;
  // Enough pieces for an even load; whole blocks of rows where there are many.
  const int64_t wanted = num_threads() == 1 ? 1 : 4 * num_threads();
  int64_t chunks = (wanted + num_row_parts - 1) / num_row_parts;
  if (chunks > p.panels()) chunks = p.panels();
  const int64_t per_chunk =
      round_up((p.panels() + chunks - 1) / chunks * kLanes, p.out.grain());
  chunks = (p.num_columns + per_chunk - 1) / per_chunk;
  if (p.out.reader != nullptr) p.out.reader->begin(chunks);

  const int64_t rows_at_once = grain_for(p.size, kPieceElements);
  const int64_t num_quantizing = (p.num_rows + rows_at_once - 1) / rows_at_once;
  const int64_t count = num_quantizing + num_row_parts * chunks;
  const int64_t work = p.num_rows * p.num_columns * p.size;
  Countdown unquantized(num_quantizing);
  parallel_for(count, work < kMinWork ? count : 1, [&](int64_t task) {
    if (task < num_quantizing) {
      const int64_t start = task * rows_at_once;
      const int64_t end = start + rows_at_once;
      quantize_rows<F>(p, start, end < p.num_rows ? end : p.num_rows, tiles);
      return unquantized.finish_item();
    }
    const int64_t place = task - num_quantizing;
    const int64_t first_row = place / chunks * rows;
    const int64_t end_row =
        first_row + rows < p.num_rows ? first_row + rows : p.num_rows;
    const int64_t first = place % chunks * per_chunk;
    const int64_t end =
        first + per_chunk < p.num_columns ? first + per_chunk : p.num_columns;
    const uint8_t* ahead = p.packed + first / kLanes * panel_bytes(F, p.size);
    for (int64_t at = 0; at < kAheadBytes && !unquantized.is_over(); at += kAheadPiece)
      prefetch(ahead + at, kAheadPiece);
    spin_until([&] { return unquantized.is_over(); });
    p.out.fill(place % chunks, first_row, end_row, first, end,
               [&](const Output& out, int64_t start, int64_t stop) {
                 Product part = p;
                 part.out = out;
                 multiply_part<F>(part, tiles, first_row, end_row, start / kLanes,
                                  (stop + kLanes - 1) / kLanes);
               });
  });
}

}  // namespace

void multiply_quantized(const Rows& rows, const VllmWeight& weight, const Output& out) {
  const Product p{rows,
                  static_cast<const uint8_t*>(weight.packed),
                  weight.bias,
                  out,
                  rows.num_rows,
                  weight.num_columns,
                  rows.size};
  switch (static_cast<Format>(weight.format)) {
    case Format::kQ4_0:
      return multiply<Format::kQ4_0>(p);
    case Format::kQ4_1:
      return multiply<Format::kQ4_1>(p);
    case Format::kQ8_0:
      return multiply<Format::kQ8_0>(p);
    case Format::kInt8:
      return multiply<Format::kInt8>(p);
  }
}

}  // namespace vllm

VLLM_API void vllm_quantized_linear(const float* x, int64_t x_stride, const uint8_t* packed,
                                    int64_t format, const float* bias, float* out,
                                    int64_t num_rows, int64_t num_columns, int64_t size) {
  vllm::multiply_quantized({x, x_stride, num_rows, size},
                           {format, packed, bias, num_columns}, {out, num_columns});
}
