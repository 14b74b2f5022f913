// Draws: uniform numbers, and the Gumbel-max choice of a token.
#include <limits>
#include <vector>

#include "api.h"
#include "draws.h"
#include "parallel.h"
#include "philox.h"

namespace vllm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// The draw 0 stands for 2^-33, so the noise is finite.
constexpr float kSmallestDraw = 0x1p-33f;
// More than the noise of the smallest draw, 33 ln 2 = 22.874.
constexpr float kLargestNoise = 22.875f;

// The definition: logit - log(-log1p(-u)) in double precision.
double exact_score(float logit, float draw) {
  const double u = draw > kSmallestDraw ? draw : kSmallestDraw;
  return static_cast<double>(logit) + -std::log(-std::log1p(-u));
}

// At least the noise of each draw. -log1p(-u) >= u, and the bit pattern of u is a lower
// bound of its logarithm in base 2, so this exceeds -log(u) by 0.06 at most.
Vec noise_bound(Vec draws) {
  const Vec u = max(broadcast(kSmallestDraw), draws);
  constexpr float kLn2 = 0.693147181f;
  return fma(pattern_as_float(u), broadcast(-kLn2 * 0x1p-23f), broadcast(127.0f * kLn2));
}

// The best token so far, and what a float bound must reach to be worth an exact score.
struct Best {
  int64_t token_id;
  double score;
  float threshold;

  void set(int64_t id, double value) {
    token_id = id;
    score = value;
    // Covers the rounding of the bound and of its sum with the logit.
    const float best = static_cast<float>(value);
    threshold = best - (1e-3f + 1e-6f * std::fabs(best));
  }
};

// splitmix64's output function and the step of its state.
constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15u;

uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// The rule of vllm/v1/worker/gpu/sample/random.py.
int64_t noise_key(int64_t seed, int64_t position, const int64_t* anchor, int64_t purpose) {
  // As many as that file has, and where distances begin.
  constexpr uint64_t kNumPurposes = 4;
  constexpr int kDistanceShift = 40;
  const uint64_t place = static_cast<uint64_t>(position);
  uint64_t stream = place * kNumPurposes + static_cast<uint64_t>(purpose) + 1;
  if (anchor != nullptr)
    stream += (place - static_cast<uint64_t>(*anchor)) << kDistanceShift;
  const uint64_t mixed = mix64(static_cast<uint64_t>(seed) + kGoldenGamma);
  return static_cast<int64_t>(mix64(mixed + stream * kGoldenGamma));
}

}  // namespace

int64_t argmax(const float* logits, int64_t size) {
  Vec top = broadcast(-kInfinity);
  for (int64_t start = 0; start < size; start += kLanes)
    top = max(load_at(logits, start, size, -kInfinity), top);
  const float best = largest(top);
  if (best == -kInfinity) return -1;
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec values = load_at(logits, start, size, -kInfinity);
    const uint32_t bits = greater_equal(values, broadcast(best));
    if (bits != 0) return start + __builtin_ctz(bits);
  }
  return -1;
}

int64_t gumbel_argmax(const float* logits, int64_t size, int64_t key) {
  const int64_t first = argmax(logits, size);
  if (first < 0) return -1;
  const PhiloxKey philox_key(key);
  Best best{};
  const float first_draw = philox_uniform(philox_key, static_cast<uint32_t>(first));
  best.set(first, exact_score(logits[first], first_draw));
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec values = load_at(logits, start, size, -kInfinity);
    const Vec threshold = broadcast(best.threshold);
    // No draw can lift these tokens to the best one.
    if (greater(values + broadcast(kLargestNoise), threshold) == 0) continue;
    const Vec draws = philox_uniform16(philox_key, static_cast<uint32_t>(start));
    uint32_t bits = greater(values + noise_bound(draws), threshold);
    float draw[kLanes];
    if (bits != 0) store(draw, draws);
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      const int64_t token_id = start + lane;
      const double score = exact_score(logits[token_id], draw[lane]);
      if (score > best.score || (score == best.score && token_id < best.token_id))
        best.set(token_id, score);
    }
  }
  return best.token_id;
}

}  // namespace vllm

VLLM_API void vllm_noise_keys(const int64_t* seeds, const int64_t* positions,
                              const int64_t* anchor_positions, int64_t purpose,
                              int64_t num_keys, int64_t* keys) {
  using namespace vllm;
  for (int64_t i = 0; i < num_keys; ++i) {
    const int64_t* anchor = anchor_positions == nullptr ? nullptr : anchor_positions + i;
    keys[i] = noise_key(seeds[i], positions[i], anchor, purpose);
  }
}

VLLM_API int64_t vllm_block_noise_keys(const int64_t* seeds, const uint8_t* is_seeded,
                                       int64_t max_num_reqs, const int32_t* idx_mapping,
                                       const int64_t* anchors, int64_t num_reqs,
                                       int64_t num_steps, int64_t target_purpose,
                                       int64_t draft_purpose, int64_t* keys) {
  using namespace vllm;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= max_num_reqs) return 1;
    for (int64_t step = 0; step < num_steps; ++step) {
      const int64_t position = anchors[req] + step + 1;
      keys[step * num_reqs + req] =
          is_seeded[row] != 0
              ? noise_key(seeds[row], position, nullptr, target_purpose)
              : noise_key(seeds[row], position, anchors + req, draft_purpose);
    }
  }
  return 0;
}

VLLM_API void vllm_philox_uniform(const int64_t* keys, int64_t num_rows, int64_t count,
                                  float* out) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(count, 4096), [&](int64_t row) {
    const PhiloxKey key(keys[row]);
    for (int64_t start = 0; start < count; start += kLanes)
      store_at(out + row * count, philox_uniform16(key, static_cast<uint32_t>(start)), start,
               count);
  });
}

VLLM_API void vllm_greedy_argmax(const float* logits, int64_t stride, int64_t num_rows,
                                 int64_t vocab_size, int64_t* out) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    out[row] = argmax(logits + row * stride, vocab_size);
  });
}

VLLM_API int64_t vllm_verify_greedy(const int64_t* token_ids, const int64_t* input_ids,
                                    int64_t num_rows, const int32_t* cu_num_logits,
                                    int64_t num_reqs, int64_t width, int64_t* sampled,
                                    int32_t* num_sampled) {
  std::vector<uint8_t> is_accepted(num_rows);
  // A draft is the input of the row behind. Behind the last row of a request there is
  // none, but what is said of that row ends nothing that does not end there anyway.
  for (int64_t row = 0; row + 1 < num_rows; ++row) {
    const int64_t draft = input_ids[row + 1];
    is_accepted[row] = draft >= 0 && draft == token_ids[row];
  }
  return vllm_take_accepted_prefix(is_accepted.data(), token_ids, num_rows, cu_num_logits,
                                   num_reqs, width, sampled, num_sampled);
}

VLLM_API void vllm_gumbel_argmax(const float* logits, int64_t stride, const int64_t* keys,
                                 const uint8_t* is_greedy, int64_t num_rows,
                                 int64_t vocab_size, int64_t* out) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    const float* values = logits + row * stride;
    const bool greedy = is_greedy != nullptr && is_greedy[row] != 0;
    out[row] = greedy ? argmax(values, vocab_size)
                      : gumbel_argmax(values, vocab_size, keys[row]);
  });
}
