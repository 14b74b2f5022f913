// What a draft budget is chosen from: how sure the drafter was in past rounds, what its drafts
// are then worth, and how far the step costs are from those that were measured. A few numbers
// a request, as in step.cpp; the parameters are the Python functions'.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "api.h"

VLLM_API int64_t vllm_record_round(const float* probs, const int32_t* num_drafts,
                                   const int32_t* idx_mapping, int64_t num_reqs,
                                   int64_t max_num_reqs, int64_t max_drafts, float* live,
                                   const int64_t* tenants, int64_t slot, int64_t num_slots,
                                   float* rounds, int64_t* round_tenants) {
  if (slot < 0 || slot >= num_slots) return 1;
  for (int64_t req = 0; req < num_reqs; ++req)
    if (idx_mapping[req] < 0 || idx_mapping[req] >= max_num_reqs) return 1;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    for (int64_t step = 0; step < max_drafts; ++step)
      live[row * max_drafts + step] = step < num_drafts[req]
                                          ? probs[req * max_drafts + step]
                                          : std::numeric_limits<float>::quiet_NaN();
  }
  const int64_t size = max_num_reqs * max_drafts;
  std::copy_n(live, size, rounds + slot * size);
  std::copy_n(tenants, max_num_reqs, round_tenants + slot * max_num_reqs);
  return 0;
}

VLLM_API int64_t vllm_read_rounds(const float* rounds, const int64_t* round_tenants,
                                  int64_t num_slots, const int64_t* tenants,
                                  int64_t max_num_reqs, const double* typical,
                                  int64_t max_drafts, const int64_t* slots,
                                  int64_t num_rounds, const int32_t* idx_mapping,
                                  int64_t num_reqs, double* out) {
  for (int64_t round = 0; round < num_rounds; ++round)
    if (slots[round] < 0 || slots[round] >= num_slots) return 1;
  const double unknown = std::numeric_limits<double>::quiet_NaN();
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= max_num_reqs) return 1;
    for (int64_t step = 0; step < max_drafts; ++step) {
      const int64_t stride = num_reqs * max_drafts;
      double* values = out + req * max_drafts + step;
      double sum = 0.0;
      int64_t num_known = 0;
      for (int64_t round = 0; round < num_rounds; ++round) {
        const int64_t place = slots[round] * max_num_reqs + row;
        const bool is_own = round_tenants[place] == tenants[row];
        const float value = rounds[place * max_drafts + step];
        const bool is_known = is_own && !std::isnan(value);
        values[round * stride] =
            is_known ? static_cast<double>(std::clamp(value, 0.0f, 1.0f)) : unknown;
        if (!is_known) continue;
        sum += values[round * stride];
        ++num_known;
      }
      const double mean = num_known > 0 ? sum / static_cast<double>(num_known) : typical[step];
      for (int64_t round = 0; round < num_rounds; ++round)
        if (std::isnan(values[round * stride])) values[round * stride] = mean;
    }
  }
  return 0;
}

VLLM_API int64_t vllm_count_round(const float* rounds, const int64_t* round_tenants,
                                  int64_t slot, int64_t num_slots, const int64_t* tenants,
                                  int64_t max_num_reqs, int64_t max_drafts,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int64_t max_counted, double* typical,
                                  int64_t* num_counted) {
  if (slot < 0 || slot >= num_slots) return 1;
  for (int64_t req = 0; req < num_reqs; ++req)
    if (idx_mapping[req] < 0 || idx_mapping[req] >= max_num_reqs) return 1;
  const float* round = rounds + slot * max_num_reqs * max_drafts;
  round_tenants += slot * max_num_reqs;
  for (int64_t step = 0; step < max_drafts; ++step) {
    float sum = 0.0f;
    int64_t num_known = 0;
    for (int64_t req = 0; req < num_reqs; ++req) {
      const int64_t row = idx_mapping[req];
      const float value = round[row * max_drafts + step];
      if (round_tenants[row] != tenants[row] || std::isnan(value)) continue;
      sum += std::clamp(value, 0.0f, 1.0f);
      ++num_known;
    }
    const int64_t counted = std::min(num_counted[step] + num_known, max_counted);
    num_counted[step] = std::max(counted, num_known);
    const double above = static_cast<double>(sum) - static_cast<double>(num_known) * typical[step];
    typical[step] += above / static_cast<double>(num_counted[step]);
  }
  return 0;
}

VLLM_API int64_t vllm_expected_gains(const double* past_confidences, int64_t num_rounds,
                                     int64_t num_reqs, int64_t max_drafts,
                                     const int32_t* num_drafts, int64_t num_gains,
                                     double* gains) {
  int64_t total = 0;
  for (int64_t req = 0; req < num_reqs; ++req) {
    if (num_drafts[req] < 0 || num_drafts[req] > max_drafts) return 1;
    total += num_drafts[req];
  }
  if (num_gains != total + 1 || num_rounds < 1) return 1;
  std::fill_n(gains, num_gains, 0.0);
  std::vector<double> survivals;
  survivals.reserve(total);
  for (int64_t round = 0; round < num_rounds; ++round) {
    survivals.clear();
    for (int64_t req = 0; req < num_reqs; ++req) {
      const double* confidences = past_confidences + (round * num_reqs + req) * max_drafts;
      double survival = 1.0;
      for (int32_t step = 0; step < num_drafts[req]; ++step)
        survivals.push_back(survival *= confidences[step]);
    }
    std::sort(survivals.begin(), survivals.end(), std::greater<>());
    double sum = 0.0;
    for (int64_t draft = 0; draft < total; ++draft)
      gains[draft + 1] += sum += survivals[draft];
  }
  for (int64_t draft = 1; draft <= total; ++draft)
    gains[draft] /= static_cast<double>(num_rounds);
  return 0;
}

VLLM_API double vllm_correct_costs(double* log_factors, double* covariance,
                                   const double* prior, const double* weights,
                                   int64_t num_draft_knots, int64_t num_knots,
                                   double draft_ms, double verify_ms, double step_ms,
                                   double noise, double outlier_deviations,
                                   double forgetting) {
  std::vector<double> gradient(num_knots), shared(num_knots);
  double log_draft = 0.0, log_verify = 0.0;
  for (int64_t knot = 0; knot < num_draft_knots; ++knot)
    log_draft += weights[knot] * log_factors[knot];
  for (int64_t knot = num_draft_knots; knot < num_knots; ++knot)
    log_verify += weights[knot] * log_factors[knot];
  draft_ms *= std::exp(log_draft);
  verify_ms *= std::exp(log_verify);
  const double predicted_ms = draft_ms + verify_ms;
  for (int64_t knot = 0; knot < num_knots; ++knot)
    gradient[knot] =
        weights[knot] * (knot < num_draft_knots ? draft_ms : verify_ms) / predicted_ms;

  const double error = std::log(step_ms / predicted_ms);
  double explained = 0.0;
  for (int64_t knot = 0; knot < num_knots; ++knot) {
    for (int64_t other = 0; other < num_knots; ++other)
      shared[knot] += covariance[knot * num_knots + other] * gradient[other];
    explained += gradient[knot] * shared[knot];
  }
  const double outlier = error * error / (outlier_deviations * outlier_deviations);
  double variance = noise * noise;
  variance = explained + variance * (1.0 + outlier / (explained + variance));
  for (int64_t knot = 0; knot < num_knots; ++knot) {
    const double gain = shared[knot] / variance;
    log_factors[knot] += gain * error;
    log_factors[knot] *= 1.0 - forgetting / 2.0;
    for (int64_t other = 0; other < num_knots; ++other) {
      double& value = covariance[knot * num_knots + other];
      value -= gain * shared[other];
      value += forgetting * (prior[knot * num_knots + other] - value);
    }
  }
  return error;
}
