// Attention over the paged cache, without gathering it.
//
// A row is one query head of one token. Its softmax runs over steps of 64 keys at
// absolute positions, and partitions of 256 keys are merged in order. So its bits depend
// on its own query and keys only, not on the chunk, the batch or the threads.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "api.h"
#include "parallel.h"
#include "tile.h"

namespace vllm {
namespace {

constexpr int kStepGroups = 4;
constexpr int kStep = kStepGroups * kLanes;
constexpr int64_t kPartition = 256;
// Query rows of a tile, which share every key block they load where their head is one.
constexpr int64_t kTileRows = 48;
// Multiply-adds below which a second thread costs more than it brings.
constexpr int64_t kMinWork = 65536;

// Rows of the largest tile: a whole group of heads always fits.
int64_t max_tile_rows(const Attention& a) {
  return a.group() > kTileRows ? a.group() : kTileRows;
}

// Neighbouring query tokens of one request, with the heads of some key/value heads. What
// those have in a block lies side by side, and long reads are faster than short ones.
struct Tile {
  int64_t req;
  int64_t first_head, num_heads;    // of keys and values
  int64_t first_token, num_tokens;  // rows of the query
  int64_t first_position;           // absolute position of first_token
};

// Softmax state of a tile's rows: running maximum, sum and weighted values.
struct State {
  float* max;
  float* sum;
  float* acc;  // [rows][width]
};

int64_t state_floats(int64_t rows, int64_t width) { return rows * (2 + width); }

State state_at(float* memory, int64_t rows) {
  return {memory, memory + rows, memory + 2 * rows};
}

int64_t num_rows(const Attention& a, const Tile& tile) {
  return tile.num_heads * tile.num_tokens * a.group();
}

// Rows count the tokens and heads of one key/value head, and stand key/value head after
// key/value head. T is the type of the cache's elements.
template <typename T>
class TileRun {
 public:
  TileRun(const Attention& a, const Tile& tile, float* memory)
      : a_(a),
        tile_(tile),
        rows_(tile.num_tokens * a.group()),
        queries_(memory),
        weights_(queries_ + max_tile_rows(a) * a.width()),
        alphas_(weights_ + max_tile_rows(a) * kStep) {
    pack_queries();
  }

  // Attends to the keys of one partition; false if no row of the tile sees any.
  bool run(int64_t partition, State state) {
    const int64_t begin = partition * kPartition;
    int64_t end = begin + kPartition;
    if (end > num_keys(rows_ - 1)) end = num_keys(rows_ - 1);
    if (begin >= end) return false;
    const float lowest = -std::numeric_limits<float>::infinity();
    const int64_t all_rows = num_rows(a_, tile_);
    for (int64_t row = 0; row < all_rows; ++row) {
      state.max[row] = lowest;
      state.sum[row] = 0.0f;
    }
    std::memset(state.acc, 0, static_cast<size_t>(all_rows * a_.width()) * sizeof(float));
    for (int64_t start = begin; start < end; start += kStep)
      run_step(start, end - start < kStep ? end - start : kStep, state);
    return true;
  }

 private:
  // Keys that a row sees, counted from position 0.
  int64_t num_keys(int64_t row) const {
    if (!a_.is_causal) return a_.seq_lens[tile_.req];
    return tile_.first_position + row / a_.group() + 1;
  }

  int64_t keys_in_step(int64_t row, int64_t start, int64_t size) const {
    const int64_t keys = num_keys(row) - start;
    return keys < 0 ? 0 : (keys < size ? keys : size);
  }

  int64_t block_of(int64_t position) const {
    return a_.block_table[tile_.req * a_.block_table_stride +
                          position / a_.cache.block_size];
  }

  // Rows in register tiles of kMaxRows, each [width][rows], scaled.
  void pack_queries() {
    for (int64_t head = 0; head < tile_.num_heads; ++head)
      for (int64_t row = 0; row < rows_; ++row) pack_query(head, row);
  }

  void pack_query(int64_t head, int64_t row) {
    const int64_t tile_start = row / kMaxRows * kMaxRows;
    const int64_t tile_rows = rows_ - tile_start < kMaxRows ? rows_ - tile_start : kMaxRows;
    const int64_t token = tile_.first_token + row / a_.group();
    const int64_t query_head = (tile_.first_head + head) * a_.group() + row % a_.group();
    const float* source =
        a_.query + token * a_.query_stride + query_head * a_.cache.head_size;
    float* target = queries_ + (head * rows_ + tile_start) * a_.width() + row - tile_start;
    for (int64_t d = 0; d < a_.cache.head_size; ++d)
      target[d * tile_rows] = source[d] * a_.scale;
  }

  void run_step(int64_t start, int64_t size, State state) {
    for (int64_t row = 0; row < rows_; row += kMaxRows) {
      const int64_t count = rows_ - row < kMaxRows ? rows_ - row : kMaxRows;
      if (keys_in_step(row + count - 1, start, size) == 0) continue;
      with_rows<kMaxRows>(static_cast<int>(count), [&]<int ROWS>() {
        score<ROWS>(row, start, size);
        for (int64_t head = 0; head < tile_.num_heads; ++head)
          for (int64_t i = row; i < row + ROWS; ++i)
            weigh(head * rows_ + i, keys_in_step(i, start, size), state);
        add_values<ROWS>(row, start, size, state);
      });
    }
  }

  // weights[head][row][0..size) = scaled query . key.
  template <int ROWS>
  void score(int64_t row, int64_t start, int64_t size) {
    const int64_t groups = (size + kLanes - 1) / kLanes;
    for (int64_t g = 0; g < groups; g += kGroups<ROWS>) {
      for (int64_t head = 0; head < tile_.num_heads; ++head) {
        if (kGroups<ROWS> == 2 && g + 1 < groups)
          score_groups<ROWS, kGroups<ROWS>>(head, row, start, g);
        else
          score_groups<ROWS, 1>(head, row, start, g);
      }
    }
  }

  template <int ROWS, int GROUPS>
  void score_groups(int64_t head, int64_t row, int64_t start, int64_t g) {
    const T* keys[GROUPS];
    const T* ahead[GROUPS];
    const bool is_last = head + 1 == tile_.num_heads;
    for (int i = 0; i < GROUPS; ++i) {
      const int64_t position = start + (g + i) * kLanes;
      const int64_t block = block_of(position), offset = position % a_.cache.block_size;
      keys[i] = a_.cache.keys<T>(block, tile_.first_head + head) + offset;
      ahead[i] = offset + (is_last ? a_.cache.values<T>(block, tile_.first_head)
                                   : a_.cache.keys<T>(block, tile_.first_head + head + 1));
    }
    Vec acc[ROWS][GROUPS];
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < GROUPS; ++j) acc[i][j] = broadcast(0.0f);
    const int64_t first = head * rows_ + row;
    const int64_t stride = a_.cache.block_size;
    accumulate<ROWS, GROUPS, 1, ROWS>(
        acc, queries_ + first * a_.width(), keys, stride, a_.cache.head_size,
        [&](int i, int64_t d) { __builtin_prefetch(ahead[i] + d * stride); });
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < GROUPS; ++j)
        store(weights_ + (first + i) * kStep + (g + j) * kLanes, acc[i][j]);
  }

  // Turns a row's scores into weights and moves its maximum and sum on.
  void weigh(int64_t row, int64_t valid, State state) {
    alphas_[row] = 1.0f;
    if (valid == 0) return;
    float* weights = weights_ + row * kStep;
    const Vec masked = broadcast(-std::numeric_limits<float>::infinity());
    const int groups = static_cast<int>((valid + kLanes - 1) / kLanes);
    Vec scores[kStepGroups];
    Vec top = masked;
    for (int g = 0; g < groups; ++g) {
      const int64_t left = valid - g * kLanes;
      const uint32_t bits = left >= kLanes ? 0xFFFFu : (1u << left) - 1u;
      scores[g] = select(bits, load(weights + g * kLanes), masked);
      top = max(top, scores[g]);
    }
    const float step_max = largest(top);
    const float new_max = state.max[row] > step_max ? state.max[row] : step_max;
    const Vec shift = broadcast(new_max);
    Vec total = broadcast(0.0f);
    for (int g = 0; g < groups; ++g) {
      const Vec weight = exp(scores[g] - shift);
      store(weights + g * kLanes, weight);
      total = total + weight;
    }
    if (state.max[row] != new_max) {
      float lanes[kLanes];
      store(lanes, exp(broadcast(state.max[row]) - shift));
      alphas_[row] = lanes[0];
      state.max[row] = new_max;
    }
    state.sum[row] = std::fmaf(state.sum[row], alphas_[row], sum(total));
  }

  // acc[row] = alpha * acc[row] + weights . values, key after key. Masked keys are
  // skipped, not multiplied by zero: their slots may hold anything.
  template <int ROWS>
  void add_values(int64_t row, int64_t start, int64_t size, State state) {
    const int64_t common = keys_in_step(row, start, size);
    int64_t key = 0;
    do {
      const int64_t end = block_end(start, key, common);
      for (int64_t head = 0; head < tile_.num_heads; ++head)
        add_block<ROWS>(head, row, start, key, end, key == 0, state);
      key = end;
    } while (key < common);
    for (int64_t i = row; i < row + ROWS; ++i) {
      const int64_t valid = keys_in_step(i, start, size);
      for (key = common; key < valid; key = block_end(start, key, valid))
        for (int64_t head = 0; head < tile_.num_heads; ++head)
          add_block<1>(head, i, start, key, block_end(start, key, valid), false, state);
    }
  }

  // The first key of a step that is in another block than this one, or past the last.
  int64_t block_end(int64_t start, int64_t key, int64_t last) const {
    const int64_t end = key + a_.cache.block_size - (start + key) % a_.cache.block_size;
    return end < last ? end : last;
  }

  template <int ROWS>
  void add_block(int64_t head, int64_t row, int64_t start, int64_t from, int64_t to,
                 bool rescale, State state) {
    for (int64_t column = 0; column < a_.width(); column += kGroups<ROWS> * kLanes) {
      if (kGroups<ROWS> == 2 && column + kLanes < a_.width())
        add_columns<ROWS, kGroups<ROWS>>(head, row, start, from, to, column, rescale, state);
      else
        add_columns<ROWS, 1>(head, row, start, from, to, column, rescale, state);
    }
  }

  template <int ROWS, int GROUPS>
  void add_columns(int64_t head, int64_t row, int64_t start, int64_t from, int64_t to,
                   int64_t column, bool rescale, State state) {
    const int64_t width = a_.width();
    const int64_t first = head * rows_ + row;
    float* sums = state.acc + first * width + column;
    Vec acc[ROWS][GROUPS];
    for (int i = 0; i < ROWS; ++i) {
      const Vec alpha = broadcast(rescale ? alphas_[first + i] : 1.0f);
      for (int j = 0; j < GROUPS; ++j) acc[i][j] = load(sums + i * width + j * kLanes) * alpha;
    }
    if (from < to) {
      const int64_t position = start + from;
      const int64_t offset = position % a_.cache.block_size;
      const T* base = a_.cache.values<T>(block_of(position), tile_.first_head + head);
      const T* next = values_ahead(position, head);
      const T* values[GROUPS];
      const T* ahead[GROUPS];
      for (int j = 0; j < GROUPS; ++j) {
        const int64_t index = a_.cache.value_index(offset, column + j * kLanes);
        values[j] = base + index;
        ahead[j] = next + index;
      }
      const int64_t stride = a_.cache.panel();
      accumulate<ROWS, GROUPS, kStep, 1>(
          acc, weights_ + first * kStep + from, values, stride, to - from,
          [&](int j, int64_t key) { __builtin_prefetch(ahead[j] + key * stride); });
    }
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < GROUPS; ++j) store(sums + i * width + j * kLanes, acc[i][j]);
  }

  // What is read behind the values of a block and head: the values of the next head, or
  // the keys of the block that has the same place in the next step.
  const T* values_ahead(int64_t position, int64_t head) const {
    if (head + 1 < tile_.num_heads)
      return a_.cache.values<T>(block_of(position), tile_.first_head + head + 1);
    const int64_t next = position + kStep < num_keys(rows_ - 1) ? position + kStep : position;
    return a_.cache.keys<T>(block_of(next), tile_.first_head);
  }

  const Attention& a_;
  const Tile tile_;
  const int64_t rows_;
  float* const queries_;
  float* const weights_;  // [heads][rows][kStep]
  float* const alphas_;   // [heads][rows]
};

// Memory of a TileRun.
int64_t tile_floats(const Attention& a) {
  return max_tile_rows(a) * (a.width() + kStep + 1);
}

float exp_one(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

// Adds a later partition to the total. A partition that a row does not see has sum 0.
void merge(State total, State part, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    if (part.sum[row] == 0.0f) continue;
    const float top = total.max[row] > part.max[row] ? total.max[row] : part.max[row];
    const float keep = exp_one(total.max[row] - top);
    const float add = exp_one(part.max[row] - top);
    total.max[row] = top;
    total.sum[row] = std::fmaf(part.sum[row], add, total.sum[row] * keep);
    for (int64_t column = 0; column < width; column += kLanes) {
      float* acc = total.acc + row * width + column;
      const Vec old = load(acc) * broadcast(keep);
      store(acc, fma(load(part.acc + row * width + column), broadcast(add), old));
    }
  }
}

void write_out(const Attention& a, const Tile& tile, State state) {
  const int64_t rows_a_head = tile.num_tokens * a.group();
  for (int64_t row = 0; row < num_rows(a, tile); ++row) {
    const int64_t row_of_head = row % rows_a_head;
    const int64_t token = tile.first_token + row_of_head / a.group();
    const int64_t kv_head = tile.first_head + row / rows_a_head;
    const int64_t head = kv_head * a.group() + row_of_head % a.group();
    float* out = a.out + token * a.out_stride + head * a.cache.head_size;
    const Vec sums = broadcast(state.sum[row]);
    for (int64_t column = 0; column < a.cache.head_size; column += kLanes) {
      const Vec acc = load(state.acc + row * a.width() + column);
      store_at(out, acc / sums, column, a.cache.head_size);
    }
  }
}

int64_t num_partitions(const Attention& a, const Tile& tile) {
  const int64_t keys = a.is_causal ? tile.first_position + tile.num_tokens
                                   : int64_t{a.seq_lens[tile.req]};
  return (keys + kPartition - 1) / kPartition;
}

// The long ones first: prefills stand last in a batch, and late tiles see most keys.
std::vector<Tile> make_tiles(const Attention& a, int64_t& work) {
  std::vector<Tile> tiles;
  const int64_t cap = max_tile_rows(a) / a.group();
  const bool has_enough = a.num_reqs >= 4 * num_threads();
  for (int64_t req = a.num_reqs - 1; req >= 0; --req) {
    const int64_t first = a.query_start_loc[req];
    const int64_t count = a.query_start_loc[req + 1] - first;
    const int64_t computed = a.seq_lens[req] - count;
    work += count * a.num_heads * a.seq_lens[req] * a.cache.head_size;
    for (int64_t tile = (count + cap - 1) / cap - 1; tile >= 0; --tile) {
      const int64_t start = tile * cap;
      const int64_t tokens = count - start < cap ? count - start : cap;
      const int64_t heads = has_enough ? cap / tokens : 1;
      for (int64_t head = 0; head < a.cache.num_kv_heads; head += heads) {
        const int64_t left = a.cache.num_kv_heads - head;
        tiles.push_back({req, head, left < heads ? left : heads, first + start, tokens,
                         computed + start});
      }
    }
  }
  return tiles;
}

template <typename T>
void run_tile(const Attention& a, const Tile& tile) {
  thread_local Scratch scratch;
  const int64_t rows = num_rows(a, tile);
  const int64_t floats = state_floats(max_tile_rows(a), a.width());
  float* memory = scratch.floats(static_cast<size_t>(tile_floats(a) + 2 * floats));
  const State total = state_at(memory + tile_floats(a), rows);
  const State part = state_at(memory + tile_floats(a) + floats, rows);
  TileRun<T> run(a, tile, memory);
  run.run(0, total);
  for (int64_t partition = 1; partition < num_partitions(a, tile); ++partition)
    if (run.run(partition, part)) merge(total, part, rows, a.width());
  write_out(a, tile, total);
}

// For fewer tiles than threads: partitions side by side, then merged as run_tile does.
template <typename T>
void run_split(const Attention& a, const std::vector<Tile>& tiles) {
  struct Piece {
    size_t tile;
    int64_t partition;
  };
  thread_local Scratch shared;
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece;
  for (size_t tile = 0; tile < tiles.size(); ++tile) {
    first_piece.push_back(static_cast<int64_t>(pieces.size()));
    for (int64_t partition = 0; partition < num_partitions(a, tiles[tile]); ++partition)
      pieces.push_back({tile, partition});
  }
  const int64_t floats = state_floats(max_tile_rows(a), a.width());
  float* states = shared.floats(pieces.size() * static_cast<size_t>(floats));
  const auto rows_of = [&](size_t tile) { return num_rows(a, tiles[tile]); };
  parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t index) {
    thread_local Scratch scratch;
    const Piece& piece = pieces[static_cast<size_t>(index)];
    float* memory = scratch.floats(static_cast<size_t>(tile_floats(a)));
    TileRun<T> run(a, tiles[piece.tile], memory);
    run.run(piece.partition, state_at(states + index * floats, rows_of(piece.tile)));
  });
  parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t index) {
    const size_t tile = static_cast<size_t>(index);
    const int64_t first = first_piece[tile];
    const State total = state_at(states + first * floats, rows_of(tile));
    for (int64_t partition = 1; partition < num_partitions(a, tiles[tile]); ++partition)
      merge(total, state_at(states + (first + partition) * floats, rows_of(tile)),
            rows_of(tile), a.width());
    write_out(a, tiles[tile], total);
  });
}

template <typename T>
void attend_over(const Attention& a) {
  int64_t work = 0;
  const std::vector<Tile> tiles = make_tiles(a, work);
  const int64_t count = static_cast<int64_t>(tiles.size());
  const auto is_long = [&](const Tile& tile) { return num_partitions(a, tile) > 1; };
  if (work >= kMinWork && num_threads() > 1 && count < 4 * num_threads() &&
      std::any_of(tiles.begin(), tiles.end(), is_long)) {
    run_split<T>(a, tiles);
    return;
  }
  parallel_for(count, work < kMinWork ? count + 1 : 1,
               [&](int64_t index) { run_tile<T>(a, tiles[static_cast<size_t>(index)]); });
}

}  // namespace

bool has_valid_indices(const Attention& a) {
  if (a.query_start_loc[0] < 0 || a.query_start_loc[a.num_reqs] > a.num_tokens)
    return false;
  for (int64_t req = 0; req < a.num_reqs; ++req) {
    const int64_t count = a.query_start_loc[req + 1] - a.query_start_loc[req];
    if (count < 0 || a.seq_lens[req] < count) return false;
    const int64_t used = (a.seq_lens[req] + a.cache.block_size - 1) / a.cache.block_size;
    if (count > 0 && used > a.max_blocks) return false;
    for (int64_t i = 0; count > 0 && i < used; ++i) {
      const int32_t id = a.block_table[req * a.block_table_stride + i];
      if (id < 0 || id >= a.cache.num_blocks) return false;
    }
  }
  return true;
}

void attend(const Attention& a) {
  if (a.cache.is_half)
    attend_over<uint16_t>(a);
  else
    attend_over<float>(a);
}

}  // namespace vllm

VLLM_API int64_t vllm_reshape_and_cache(const float* key, int64_t key_stride,
                                        const float* value, int64_t value_stride,
                                        void* kv_cache, int64_t is_half,
                                        const int64_t* slot_mapping, int64_t num_tokens,
                                        int64_t num_blocks, int64_t num_kv_heads,
                                        int64_t block_size, int64_t head_size) {
  using namespace vllm;
  for (int64_t token = 0; token < num_tokens; ++token)
    if (slot_mapping[token] >= num_blocks * block_size) return 1;
  const KVCache cache{kv_cache,     is_half != 0, num_blocks,
                      num_kv_heads, block_size,   head_size};
  const int64_t work = 8 * num_kv_heads * head_size;
  parallel_for(num_tokens, grain_for(work, 65536), [&](int64_t token) {
    cache.write(slot_mapping[token], key + token * key_stride,
                value + token * value_stride);
  });
  return 0;
}

VLLM_API int64_t vllm_paged_attention(const float* query, int64_t query_stride,
                                      void* kv_cache, int64_t is_half,
                                      const int32_t* block_table,
                                      int64_t block_table_stride,
                                      const int32_t* query_start_loc,
                                      const int32_t* seq_lens, float* out,
                                      int64_t out_stride, int64_t num_tokens,
                                      int64_t num_reqs, int64_t num_heads,
                                      int64_t num_kv_heads, int64_t head_size,
                                      int64_t block_size, int64_t num_blocks,
                                      int64_t max_blocks, float scale,
                                      int64_t is_causal) {
  using namespace vllm;
  const Attention a{query,
                    query_stride,
                    {kv_cache, is_half != 0, num_blocks, num_kv_heads, block_size,
                     head_size},
                    block_table,
                    block_table_stride,
                    max_blocks,
                    query_start_loc,
                    seq_lens,
                    out,
                    out_stride,
                    num_tokens,
                    num_reqs,
                    num_heads,
                    scale,
                    is_causal != 0};
  if (!has_valid_indices(a)) return 1;
  attend(a);
  return 0;
}
