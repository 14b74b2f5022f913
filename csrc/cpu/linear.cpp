// Dense layers over weights that are packed once, at load.
//
// Packed weight: columns in panels of 16, a panel being [K][16], zero past N. A thread
// takes a block of rows that stays in its level 2 cache and a pair of panels.
#include "pages.h"
#include "parallel.h"
#include "products.h"
#include "tile.h"

namespace vllm {
namespace {

constexpr int64_t kPairWidth = 2 * kLanes;
// Share of the level 2 cache that a block of packed rows may fill.
constexpr int64_t kRowBlockBytes = 256 * 1024;
// Multiply-adds below which a second thread costs more than it brings.
constexpr int64_t kMinWork = 32768;
// The same in elements of rows that are made.
constexpr int64_t kMinElements = 4096;
// Rows of a panel that are fetched ahead of the loads; hides the latency of memory at one row.
constexpr int64_t kPrefetchRows = 24;

struct Linear {
  const float* x;
  int64_t x_stride;
  const float* packed;
  const float* bias;
  Output out;
  int64_t num_rows, num_columns, size;
};

int64_t num_panels(int64_t columns) { return (columns + kLanes - 1) / kLanes; }

// Rows of a block: an even load for the threads, within the cache, but enough of them
// that a weight is not read again for every few.
int64_t block_rows(int64_t num_rows, int64_t size) {
  constexpr int64_t kFewestTiles = 4;
  const int64_t tile_bytes = (size > 0 ? size : 1) * 4 * kMaxRows;
  const int64_t fitting = kRowBlockBytes / tile_bytes;
  const int64_t even = num_rows / (4 * num_threads() * kMaxRows) + 1;
  const int64_t tiles = even < kFewestTiles ? kFewestTiles : even;
  return kMaxRows * (tiles < fitting ? tiles : (fitting > 0 ? fitting : 1));
}

// Interleaves `count` rows: element k of row i goes to packed[k * count + i].
void pack_rows(const float* x, int64_t stride, int64_t count, int64_t size, float* packed) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < size; ++k) packed[k * count + i] = x[i * stride + k];
}

// What a thread has packed last: its next task is often another part of the columns.
struct PackedRows {
  Scratch memory;
  uint64_t call = 0;
  int64_t first_row = -1;

  const float* get(const Linear& l, uint64_t this_call, int64_t first, int64_t count) {
    float* rows = memory.floats(static_cast<size_t>(count * l.size));
    if (call == this_call && first_row == first) return rows;
    for (int64_t start = 0; start < count; start += kMaxRows) {
      const int64_t tile = count - start < kMaxRows ? count - start : kMaxRows;
      pack_rows(l.x + (first + start) * l.x_stride, l.x_stride, tile, l.size,
                rows + start * l.size);
    }
    call = this_call;
    first_row = first;
    return rows;
  }
};

void write_sums(const Linear& l, int64_t row, int64_t column, Vec sums) {
  if (column < l.num_columns) l.out.write(row, column, sums, l.bias, l.num_columns);
}

template <int ROWS, int GROUPS>
void multiply_panels(const Linear& l, const float* rows, int64_t first_row, int64_t panel) {
  const float* b[GROUPS];
  for (int g = 0; g < GROUPS; ++g) b[g] = l.packed + (panel + g) * l.size * kLanes;
  Vec acc[ROWS][GROUPS];
  for (int i = 0; i < ROWS; ++i)
    for (int g = 0; g < GROUPS; ++g) acc[i][g] = broadcast(0.0f);
  if constexpr (ROWS <= 4) {
    // The end of the sum is peeled off only to keep the prefetches inside the weight.
    const float* end[GROUPS];
    const int64_t body = l.size > kPrefetchRows ? l.size - kPrefetchRows : 0;
    for (int64_t k = 0; k < body; ++k) {
      const float* at[GROUPS];
      for (int g = 0; g < GROUPS; ++g) {
        at[g] = b[g] + k * kLanes;
        __builtin_prefetch(at[g] + kPrefetchRows * kLanes);
      }
      accumulate<ROWS, GROUPS, 1, ROWS>(acc, rows + k * ROWS, at, kLanes, 1);
    }
    for (int g = 0; g < GROUPS; ++g) end[g] = b[g] + body * kLanes;
    accumulate<ROWS, GROUPS, 1, ROWS>(acc, rows + body * ROWS, end, kLanes, l.size - body);
  } else {
    accumulate<ROWS, GROUPS, 1, ROWS>(acc, rows, b, kLanes, l.size);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int g = 0; g < GROUPS; ++g)
      write_sums(l, first_row + i, (panel + g) * kLanes, acc[i][g]);
}

template <int ROWS>
void multiply_pair(const Linear& l, const float* rows, int64_t first_row, int64_t pair) {
  const int64_t panel = 2 * pair;
  const bool is_whole = panel + 2 <= num_panels(l.num_columns);
  if constexpr (kGroups<ROWS> == 2) {
    if (is_whole) return multiply_panels<ROWS, 2>(l, rows, first_row, panel);
  }
  multiply_panels<ROWS, 1>(l, rows, first_row, panel);
  if (is_whole) multiply_panels<ROWS, 1>(l, rows, first_row, panel + 1);
}

// One block of rows against the pairs [first, last).
void multiply_block(const Linear& l, const float* packed_rows, int64_t first_row,
                    int64_t count, int64_t first, int64_t last) {
  for (int64_t pair = first; pair < last; ++pair) {
    for (int64_t start = 0; start < count; start += kMaxRows) {
      const int64_t rows = count - start < kMaxRows ? count - start : kMaxRows;
      with_rows<kMaxRows>(static_cast<int>(rows), [&]<int ROWS>() {
        multiply_pair<ROWS>(l, packed_rows + start * l.size, first_row + start, pair);
      });
    }
  }
}

void multiply(const Linear& l) {
  if (l.num_rows == 0 || l.num_columns == 0) return;
  static std::atomic<uint64_t> num_calls{0};
  const uint64_t call = ++num_calls;
  const int64_t block = block_rows(l.num_rows, l.size);
  const int64_t num_blocks = (l.num_rows + block - 1) / block;
  const int64_t num_pairs = (num_panels(l.num_columns) + 1) / 2;
  // Enough pieces for an even load; whole blocks where there are many.
  const int64_t wanted = num_threads() == 1 ? 1 : 4 * num_threads();
  int64_t chunks = (wanted + num_blocks - 1) / num_blocks;
  if (chunks > num_pairs) chunks = num_pairs;
  const int64_t per_chunk =
      round_up((num_pairs + chunks - 1) / chunks * kPairWidth, l.out.grain());
  chunks = (l.num_columns + per_chunk - 1) / per_chunk;
  if (l.out.reader != nullptr) l.out.reader->begin(chunks);

  const auto item = [&](int64_t task) {
    thread_local PackedRows packed;
    const int64_t chunk = task % chunks;
    const int64_t first_row = task / chunks * block;
    const int64_t count = l.num_rows - first_row < block ? l.num_rows - first_row : block;
    // One row is its own interleaving.
    const float* rows = count == 1 ? l.x + first_row * l.x_stride
                                   : packed.get(l, call, first_row, count);
    const int64_t first = chunk * per_chunk;
    const int64_t end = std::min(first + per_chunk, l.num_columns);
    l.out.fill(chunk, first_row, first_row + count, first, end,
               [&](const Output& out, int64_t start, int64_t stop) {
                 Linear part = l;
                 part.out = out;
                 multiply_block(part, rows, first_row, count, start / kPairWidth,
                                (stop + kPairWidth - 1) / kPairWidth);
               });
  };
  const int64_t work = l.num_rows * l.num_columns * l.size;
  const int64_t count = num_blocks * chunks;
  parallel_for(count, work < kMinWork ? count : 1, item);
}

// Rows that are not plain, made.
const float* make_rows(const Rows& rows) {
  // The caller's: the helpers read it, and are done when the call returns.
  thread_local Scratch memory;
  float* made = memory.floats(static_cast<size_t>(rows.num_rows * rows.size));
  parallel_for(rows.num_rows, grain_for(rows.size, kMinElements),
               [&](int64_t row) { rows.read(row, made + row * rows.size); });
  return made;
}

}  // namespace

void multiply_dense(const Rows& rows, const VllmWeight& weight, const Output& out) {
  const bool is_plain = rows.kind == Rows::Kind::kPlain;
  multiply({is_plain ? rows.x : make_rows(rows), is_plain ? rows.stride : rows.size,
            static_cast<const float*>(weight.packed), weight.bias, out, rows.num_rows,
            weight.num_columns, rows.size});
}

}  // namespace vllm

VLLM_API int64_t vllm_packed_size(int64_t num_columns, int64_t size) {
  return vllm::num_panels(num_columns) * vllm::kLanes * size;
}

VLLM_API void vllm_pack_weight(const float* weight, int64_t stride, int64_t num_columns,
                               int64_t size, float* packed) {
  using namespace vllm;
  advise_huge_pages(packed, sizeof(float) * vllm_packed_size(num_columns, size));
  parallel_for(num_panels(num_columns), 1, [&](int64_t panel) {
    float* out = packed + panel * size * kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t column = panel * kLanes + lane;
      const float* row = weight + column * stride;
      for (int64_t k = 0; k < size; ++k)
        out[k * kLanes + lane] = column < num_columns ? row[k] : 0.0f;
    }
  });
}

VLLM_API void vllm_packed_linear(const float* x, int64_t x_stride, const float* packed,
                                 const float* bias, float* out, int64_t num_rows,
                                 int64_t num_columns, int64_t size) {
  vllm::multiply_dense({x, x_stride, num_rows, size},
                       {kVllmFloat32, packed, bias, num_columns}, {out, num_columns});
}
