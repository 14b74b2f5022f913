// What samplers need to know of an output layer's logits, which are never written.
#include <algorithm>
#include <vector>

#include "api.h"
#include "likeliest.h"
#include "products.h"

namespace vllm {
namespace {

constexpr int64_t kNotListed = -1;

// Keeps a list of one token of most rows, and more of those that are listed.
class Statistics : public SegmentReader {
 public:
  Statistics(int64_t num_rows, int64_t num_columns, const int64_t* listed, int64_t num_listed,
             int64_t count)
      : num_rows_(num_rows),
        num_segments_(num_segments(num_columns)),
        width_(num_listed > 0 ? count : 1),
        places_(static_cast<size_t>(num_rows), kNotListed),
        sums_(static_cast<size_t>(num_listed * num_segments_)) {
    for (int64_t place = 0; place < num_listed; ++place) places_[listed[place]] = place;
  }

  void begin(int64_t num_parts) override {
    num_parts_ = num_parts;
    tokens_.resize(static_cast<size_t>(num_parts * num_rows_ * width_));
    for (int64_t i = 0; i < num_parts * num_rows_; ++i)
      lists_.emplace_back(tokens_.data() + i * width_,
                          places_[i % num_rows_] == kNotListed ? 1 : width_);
  }

  void read(int64_t part, int64_t first_row, int64_t end_row, int64_t first_column,
            int64_t end_column, const float* products, int64_t stride) override {
    const int64_t size = end_column - first_column;
    for (int64_t row = first_row; row < end_row; ++row, products += stride) {
      lists_[part * num_rows_ + row].meet(products, size, first_column);
      if (places_[row] != kNotListed)
        sums_[places_[row] * num_segments_ + first_column / kSegment] = {products, size};
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
  float logsumexp(int64_t place) const {
    return log_sum_exp(sums_.data() + place * num_segments_, num_segments_);
  }

 private:
  const int64_t num_rows_, num_segments_, width_;
  int64_t num_parts_ = 0;
  // [num_rows], where the row is listed.
  std::vector<int64_t> places_;
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
                                        const int64_t* rows, int64_t num_listed,
                                        int64_t count, int64_t* ids, float* products,
                                        float* logsumexp) {
  using namespace vllm;
  if (num_columns < 1) return 1;
  if (num_listed > 0 && (count < 1 || count > std::min(kMostInList, num_columns))) return 1;
  for (int64_t place = 0; place < num_listed; ++place) {
    const int64_t before = place == 0 ? -1 : rows[place - 1];
    if (rows[place] <= before || rows[place] >= num_rows) return 1;
  }
  Statistics statistics(num_rows, num_columns, rows, num_listed, count);
  const VllmWeight weight{format, packed, bias, num_columns};
  multiply({x, x_stride, num_rows, size}, VllmLinear{&weight, 1, size},
           {nullptr, 0, false, &statistics});
  int64_t place = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const Likeliest& best = statistics.join(row);
    argmax[row] = best.begin()->logit > -kInfinity ? best.begin()->id : -1;
    if (place == num_listed || rows[place] != row) continue;
    for (const Token& token : best) {
      *ids++ = token.id;
      *products++ = token.logit;
    }
    logsumexp[place] = statistics.logsumexp(place);
    ++place;
  }
  return 0;
}
