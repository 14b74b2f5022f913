// The first tokens of a row in the order of their logits, found in any number of parts.
#pragma once

#include <cmath>

#include "softmax.h"

namespace vllm {

// Up to so many, a sorted list that tokens are put into beats sorting all of them.
constexpr int64_t kMostInList = 64;

struct Token {
  float logit;
  int32_t id;

  // Larger logits first, of equal ones the lower id; NaN is below -inf.
  bool operator<(const Token& other) const {
    if (logit > other.logit) return true;
    if (logit < other.logit) return false;
    const bool is_nan = std::isnan(logit);
    return is_nan == std::isnan(other.logit) ? id < other.id : !is_nan;
  }
};

// A sorted list of at most `capacity` tokens, at least one, in the caller's memory.
class Likeliest {
 public:
  Likeliest() = default;
  Likeliest(Token* tokens, int64_t capacity) : tokens_(tokens), capacity_(capacity) {}

  const Token* begin() const { return tokens_; }
  const Token* end() const { return tokens_ + size_; }

  // Logits of the tokens from first_id; ids are met in their order.
  void meet(const float* logits, int64_t size, int64_t first_id) {
    int64_t start = 0;
    for (; start < size && (lets_all_in() || start % kLanes != 0); ++start)
      offer(logits, start, first_id);
    if (start == size) return;
    float last = tokens_[size_ - 1].logit;
    for (; start < size; start += kLanes) {
      uint32_t bits =
          greater(load_at(logits, start, size, -kInfinity), broadcast(last));
      // Few groups of a row hold one of its first tokens: about the logarithm of their
      // number.
      if (bits == 0) continue;
      for (; bits != 0; bits &= bits - 1)
        offer(logits, start + __builtin_ctz(bits), first_id);
      last = tokens_[size_ - 1].logit;
    }
  }

  // False if the list is full of tokens that come before.
  bool offer(const Token& token) {
    if (size_ < capacity_)
      ++size_;
    else if (!(token < tokens_[size_ - 1]))
      return false;
    int64_t place = size_ - 1;
    for (; place > 0 && token < tokens_[place - 1]; --place)
      tokens_[place] = tokens_[place - 1];
    tokens_[place] = token;
    return true;
  }

 private:
  // A comparison with the last logit would not show what comes before it.
  bool lets_all_in() const {
    return size_ < capacity_ || std::isnan(tokens_[size_ - 1].logit);
  }
  void offer(const float* logits, int64_t place, int64_t first_id) {
    offer({logits[place], static_cast<int32_t>(first_id + place)});
  }

  Token* tokens_ = nullptr;
  int64_t capacity_ = 0, size_ = 0;
};

}  // namespace vllm
