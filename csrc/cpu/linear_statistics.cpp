// What samplers need to know of an output layer's logits, few of which are written.
#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"
#include "likeliest.h"
#include "products.h"

namespace vllm {
namespace {

// Some of the rows, in increasing order.
class RowSet {
 public:
  static constexpr int64_t kNone = -1;

  RowSet(const int64_t* rows, int64_t count) : rows_(rows), count_(count) {}

  bool is_valid(int64_t num_rows) const {
    for (int64_t place = 0; place < count_; ++place) {
      const int64_t before = place == 0 ? -1 : rows_[place - 1];
      if (rows_[place] <= before || rows_[place] >= num_rows) return false;
    }
    return true;
  }
  int64_t size() const { return count_; }
  // Of each of all rows its place in the set.
  std::vector<int64_t> places(int64_t num_rows) const {
    std::vector<int64_t> places(static_cast<size_t>(num_rows), kNone);
    for (int64_t place = 0; place < count_; ++place) places[rows_[place]] = place;
    return places;
  }

 private:
  const int64_t* rows_;
  int64_t count_;
};

// Keeps a list of one token of most rows, and more of those that are listed.
class Statistics : public SegmentReader {
 public:
  Statistics(int64_t num_rows, int64_t num_columns, const RowSet& listed, int64_t count,
             const RowSet& written, float* out)
      : num_rows_(num_rows),
        num_columns_(num_columns),
        num_segments_(num_segments(num_columns)),
        width_(listed.size() > 0 ? count : 1),
        listed_(listed.places(num_rows)),
        written_(written.places(num_rows)),
        out_(out),
        sums_(static_cast<size_t>(listed.size() * num_segments_)) {}

  void begin(int64_t num_parts) override {
    num_parts_ = num_parts;
    tokens_.resize(static_cast<size_t>(num_parts * num_rows_ * width_));
    for (int64_t i = 0; i < num_parts * num_rows_; ++i)
      lists_.emplace_back(tokens_.data() + i * width_,
                          listed_[i % num_rows_] == RowSet::kNone ? 1 : width_);
  }

  void read(int64_t part, int64_t first_row, int64_t end_row, int64_t first_column,
            int64_t end_column, const float* products, int64_t stride) override {
    const int64_t size = end_column - first_column;
    for (int64_t row = first_row; row < end_row; ++row, products += stride) {
      lists_[part * num_rows_ + row].meet(products, size, first_column);
      const int64_t listed = listed_[row], written = written_[row];
      if (listed != RowSet::kNone)
        sums_[listed * num_segments_ + first_column / kSegment] = {products, size};
      if (written != RowSet::kNone)
        std::memcpy(out_ + written * num_columns_ + first_column, products,
                    static_cast<size_t>(size) * sizeof(float));
    }
  }

  // The first tokens of the row; parts are in the order of their columns.
  const Likeliest& join(int64_t row) {
    Likeliest& joined = lists_[row];
    for (int64_t part = 1; part < num_parts_; ++part)
      for (const Token& token : lists_[part * num_rows_ + row])
        if (!joined.offer(token)) break;
    return joined;
  }
  // The row's place in what is listed.
  int64_t place(int64_t row) const { return listed_[row]; }
  float logsumexp(int64_t place) const {
    return log_sum_exp(sums_.data() + place * num_segments_, num_segments_);
  }

 private:
  const int64_t num_rows_, num_columns_, num_segments_, width_;
  int64_t num_parts_ = 0;
  // [num_rows] each: the row's place among those that are.
  const std::vector<int64_t> listed_, written_;
  // [num_written][num_columns]
  float* out_;
  // [num_listed][num_segments]
  std::vector<SegmentSum> sums_;
  // [num_parts][num_rows][width]
  std::vector<Token> tokens_;
  std::vector<Likeliest> lists_;
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_linear_statistics(const float* x, int64_t x_stride,
                                        const void* packed, int64_t format,
                                        const float* bias, int64_t num_rows,
                                        int64_t num_columns, int64_t size, int64_t* argmax,
                                        const int64_t* listed_rows, int64_t num_listed,
                                        int64_t count, int64_t* ids, float* products,
                                        float* logsumexp, const int64_t* written_rows,
                                        int64_t num_written, float* written) {
  using namespace vllm;
  const RowSet listed_set(listed_rows, num_listed), written_set(written_rows, num_written);
  if (num_columns < 1) return 1;
  if (num_listed > 0 && (count < 1 || count > std::min(kMostInList, num_columns))) return 1;
  if (!listed_set.is_valid(num_rows) || !written_set.is_valid(num_rows)) return 1;
  Statistics statistics(num_rows, num_columns, listed_set, count, written_set, written);
  const VllmWeight weight{format, packed, bias, num_columns};
  multiply({x, x_stride, num_rows, size}, VllmLinear{&weight, 1, size},
           {nullptr, 0, false, &statistics});
  for (int64_t row = 0; row < num_rows; ++row) {
    const Likeliest& best = statistics.join(row);
    argmax[row] = best.begin()->logit > -kInfinity ? best.begin()->id : -1;
    const int64_t place = statistics.place(row);
    if (place == RowSet::kNone) continue;
    for (const Token& token : best) {
      *ids++ = token.id;
      *products++ = token.logit;
    }
    logsumexp[place] = statistics.logsumexp(place);
  }
  return 0;
}
