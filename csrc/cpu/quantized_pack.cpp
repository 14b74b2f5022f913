// Quantized weights: laid out once, at load, and read back by row.
#include "api.h"
#include "pages.h"
#include "parallel.h"
#include "quantized.h"

namespace vllm {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinElements = 16384;

int64_t num_panels(int64_t columns) { return (columns + kLanes - 1) / kLanes; }

// A GGUF block: the scale, the minimum if there is one, then the values.
int64_t gguf_header_bytes(Format format) { return format == Format::kQ4_1 ? 4 : 2; }
int64_t gguf_block_bytes(Format format) {
  return gguf_header_bytes(format) + (has_nibbles(format) ? kBlock / 2 : kBlock);
}

void fill_empty_lane(Format format, uint8_t* record, int64_t lane) {
  const uint8_t zero = has_nibbles(format) ? 0 : 128;
  for (int64_t start = 0; start < value_bytes(format); start += kGroupBytes)
    std::memset(record + start + 4 * lane, zero, 4);
  for (int64_t start = value_bytes(format); start < record_bytes(format);
       start += 2 * kLanes)
    std::memset(record + start + 2 * lane, 0, 2);
}

void pack_block(Format format, const uint8_t* block, uint8_t* record, int64_t lane) {
  const int64_t header = gguf_header_bytes(format);
  const uint8_t flip = has_nibbles(format) ? 0 : 128;
  for (int64_t start = 0; start < value_bytes(format); start += kGroupBytes)
    for (int64_t j = 0; j < 4; ++j)
      record[start + 4 * lane + j] = block[header + start / kLanes + j] ^ flip;
  for (int64_t i = 0; i < header / 2; ++i)
    std::memcpy(record + value_bytes(format) + 2 * (i * kLanes + lane), block + 2 * i, 2);
}

// One column from a panel's lane to a lane of another.
void copy_column(Format format, int64_t size, const uint8_t* from, int64_t from_lane,
                 uint8_t* to, int64_t to_lane) {
  for (int64_t i = 0; i < num_blocks(size); ++i) {
    for (int64_t start = 0; start < value_bytes(format); start += kGroupBytes)
      std::memcpy(to + start + 4 * to_lane, from + start + 4 * from_lane, 4);
    for (int64_t start = value_bytes(format); start < record_bytes(format);
         start += 2 * kLanes)
      std::memcpy(to + start + 2 * to_lane, from + start + 2 * from_lane, 2);
    from += record_bytes(format);
    to += record_bytes(format);
  }
  if (format == Format::kInt8) std::memcpy(to + 4 * to_lane, from + 4 * from_lane, 4);
}

void fill_empty_column(Format format, int64_t size, uint8_t* panel, int64_t lane) {
  for (int64_t i = 0; i < num_blocks(size); ++i, panel += record_bytes(format))
    fill_empty_lane(format, panel, lane);
  if (format == Format::kInt8) std::memset(panel + 4 * lane, 0, 4);
}

// The first `count` of a column's `size` values; the others are zero.
void pack_int8_column(const float* weight, int64_t count, int64_t size, uint8_t* panel,
                      int64_t lane) {
  Range range;
  for (int64_t start = 0; start < count; start += kLanes)
    range.add(load_at(weight, start, count, 0.0f));
  const Steps steps = range.steps();
  for (int64_t start = 0; start < num_blocks(size) * kBlock; start += kLanes) {
    int8_t values[kLanes];
    const Vec x = start < count ? load_at(weight, start, count, 0.0f) : broadcast(0.0f);
    quantize(x, broadcast(steps.inverse), values);
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t k = start + i;
      panel[k / 4 * kGroupBytes + 4 * lane + k % 4] = static_cast<uint8_t>(values[i]) ^ 128;
    }
  }
  std::memcpy(panel + num_blocks(size) * record_bytes(Format::kInt8) + 4 * lane,
              &steps.scale, 4);
}

// One column of a panel as floats.
struct Column {
  Format format;
  const uint8_t* panel;
  int64_t lane, size;

  float half_at(const uint8_t* record, int64_t index) const {
    float lanes[kLanes];
    const uint8_t* halves = record + value_bytes(format) + 2 * kLanes * index;
    store(lanes, load_half(reinterpret_cast<const uint16_t*>(halves)));
    return lanes[lane];
  }

  int32_t value_at(const uint8_t* record, int64_t k) const {
    const int64_t group = k / 4;
    if (!has_nibbles(format)) return record[group * kGroupBytes + 4 * lane + k % 4];
    const uint8_t both = record[group % 4 * kGroupBytes + 4 * lane + k % 4];
    return group < 4 ? both & 15 : both >> 4;
  }

  void read(float* out) const {
    float scale = 0.0f;
    if (format == Format::kInt8) {
      const uint8_t* tail = panel + num_blocks(size) * record_bytes(format);
      std::memcpy(&scale, tail + 4 * lane, 4);
    }
    for (int64_t start = 0; start < size; start += kBlock) {
      const uint8_t* record = panel + start / kBlock * record_bytes(format);
      if (format != Format::kInt8) scale = half_at(record, 0);
      const float minimum = format == Format::kQ4_1 ? half_at(record, 1) : 0.0f;
      for (int64_t k = 0; k < kBlock && start + k < size; ++k) {
        const int32_t value = value_at(record, k) - stored_offset(format);
        out[start + k] = scale * static_cast<float>(value) + minimum;
      }
    }
  }
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_quantized_size(int64_t format, int64_t num_columns, int64_t size) {
  return vllm::num_panels(num_columns) *
         vllm::panel_bytes(static_cast<vllm::Format>(format), size);
}

VLLM_API void vllm_pack_blocks(const uint8_t* blocks, int64_t column_bytes, int64_t format,
                               int64_t num_columns, int64_t size, uint8_t* packed) {
  using namespace vllm;
  const Format f = static_cast<Format>(format);
  advise_huge_pages(packed, vllm_quantized_size(format, num_columns, size));
  parallel_for(num_panels(num_columns), 1, [&](int64_t panel) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t column = panel * kLanes + lane;
      const uint8_t* block = blocks + column * column_bytes;
      uint8_t* record = packed + panel * panel_bytes(f, size);
      for (int64_t i = 0; i < num_blocks(size); ++i, record += record_bytes(f)) {
        if (column < num_columns)
          pack_block(f, block + i * gguf_block_bytes(f), record, lane);
        else
          fill_empty_lane(f, record, lane);
      }
    }
  });
}

VLLM_API void vllm_pack_int8(const float* weight, int64_t stride, int64_t num_columns,
                             int64_t size, uint8_t* packed) {
  using namespace vllm;
  const int64_t format = static_cast<int64_t>(Format::kInt8);
  advise_huge_pages(packed, vllm_quantized_size(format, num_columns, size));
  parallel_for(num_panels(num_columns), 1, [&](int64_t panel) {
    uint8_t* out = packed + panel * panel_bytes(Format::kInt8, size);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t column = panel * kLanes + lane;
      const int64_t count = column < num_columns ? size : 0;
      pack_int8_column(weight + column * stride, count, size, out, lane);
    }
  });
}

VLLM_API int64_t vllm_quantized_rows(const uint8_t* packed, int64_t format,
                                     int64_t num_columns, int64_t size, const int64_t* ids,
                                     int64_t num_ids, float* out) {
  using namespace vllm;
  const Format f = static_cast<Format>(format);
  for (int64_t i = 0; i < num_ids; ++i)
    if (ids[i] < 0 || ids[i] >= num_columns) return 1;
  parallel_for(num_ids, grain_for(size, kMinElements), [&](int64_t i) {
    const uint8_t* panel = packed + ids[i] / kLanes * panel_bytes(f, size);
    Column{f, panel, ids[i] % kLanes, size}.read(out + i * size);
  });
  return 0;
}

VLLM_API int64_t vllm_quantized_select(const uint8_t* packed, int64_t format,
                                       int64_t num_columns, int64_t size,
                                       const int64_t* ids, int64_t num_ids, uint8_t* out) {
  using namespace vllm;
  const Format f = static_cast<Format>(format);
  for (int64_t i = 0; i < num_ids; ++i)
    if (ids[i] < 0 || ids[i] >= num_columns) return 1;
  advise_huge_pages(out, vllm_quantized_size(format, num_ids, size));
  parallel_for(num_panels(num_ids), 1, [&](int64_t panel) {
    uint8_t* to = out + panel * panel_bytes(f, size);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = panel * kLanes + lane;
      if (i >= num_ids) {
        fill_empty_column(f, size, to, lane);
        continue;
      }
      const uint8_t* from = packed + ids[i] / kLanes * panel_bytes(f, size);
      copy_column(f, size, from, ids[i] % kLanes, to, lane);
    }
  });
  return 0;
}
