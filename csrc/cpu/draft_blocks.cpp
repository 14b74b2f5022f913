// A drafter's whole pass over blocks: layers, output layer, and a walk over each block's
// drafts, of which every one knows the token before.
//
// What is computed is what the single operators compute, in the same order of operations.
#include <algorithm>
#include <limits>

#include "api.h"
#include "draws.h"
#include "parallel.h"
#include "products.h"

namespace vllm {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinElements = 16384;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows [num_ids][stride] of a table; false if there is no such row.
bool copy_rows(const VllmTable& table, const int64_t* ids, int64_t num_ids, float* out,
               int64_t stride) {
  for (int64_t i = 0; i < num_ids; ++i, out += stride) {
    if (ids[i] < 0 || ids[i] >= table.num_rows) return false;
    if (table.format == kVllmFloat32)
      std::memcpy(out, static_cast<const float*>(table.rows) + ids[i] * table.size,
                  static_cast<size_t>(table.size) * sizeof(float));
    else
      vllm_quantized_rows(static_cast<const uint8_t*>(table.rows), table.format,
                          table.num_rows, table.size, ids + i, 1, out);
  }
  return true;
}

void divide(float* values, int64_t size, float divisor) {
  for (int64_t start = 0; start < size; start += kLanes)
    store_at(values, load_at(values, start, size, 0.0f) / broadcast(divisor), start, size);
}

// Some requests of a pass, as many as there is room for at once. Rows of x and logits are
// [num_steps][num_reqs]: a row of x is a state behind the norm and then the row of the
// token before, as the heads read them.
struct Part {
  const VllmBlockDrafter& d;
  const VllmDrafts& drafts;
  int64_t block_size, first_req, num_reqs;
  float* x;
  float* logits;
  float* confidence;

  int64_t hidden_size() const { return d.embedding.size; }
  int64_t width() const { return hidden_size() + d.bigrams.size; }
  int64_t num_columns() const { return d.num_columns; }
  int64_t num_rows() const { return drafts.num_steps * num_reqs; }
  Rows states(int64_t size) const { return {x, width(), num_rows(), size}; }

  static int64_t floats_per_req(const VllmBlockDrafter& d, const VllmDrafts& drafts) {
    return drafts.num_steps * (d.embedding.size + d.bigrams.size + d.num_columns + 1);
  }

  // False if a token has no row in the table.
  bool run(const float* stream) const {
    norm_states(stream);
    multiply(states(hidden_size()), d.head, {logits, num_columns()});
    for (int64_t step = 0; step < drafts.num_steps; ++step)
      if (!take(step)) return false;
    multiply(states(d.confidence.size), d.confidence, {confidence, 1});
    for (int64_t req = 0; req < num_reqs; ++req) {
      const int64_t out = (first_req + req) * drafts.num_steps;
      for (int64_t step = 0; step < drafts.num_steps; ++step)
        drafts.scores[out + step] =
            confidence[step * num_reqs + req] / d.temperatures[step];
      for (int64_t step = std::max(drafts.num_drafts[first_req + req], 0);
           step < drafts.num_steps; ++step)
        drafts.token_ids[out + step] = -1;
    }
    return true;
  }

 private:
  void norm_states(const float* stream) const {
    const int64_t size = hidden_size();
    parallel_for(num_rows(), grain_for(size, kMinElements), [&](int64_t row) {
      const int64_t block = first_req + row % num_reqs;
      const int64_t slot = d.first_slot + row / num_reqs;
      const float* state = stream + (block * block_size + slot) * size;
      norm_row(state, d.norm, d.eps, x + row * width(), size);
    });
  }

  int64_t* token_of(int64_t step, int64_t req) const {
    return drafts.token_ids + (first_req + req) * drafts.num_steps + step;
  }

  bool take(int64_t step) const {
    float* before = x + step * num_reqs * width() + hidden_size();
    for (int64_t req = 0; req < num_reqs; ++req) {
      const int64_t* id = step == 0 ? drafts.input_ids + (first_req + req) * block_size
                                    : token_of(step - 1, req);
      if (!copy_rows(d.bigrams, id, 1, before + req * width(), width())) return false;
    }
    float* rows = logits + step * num_reqs * num_columns();
    multiply({before, width(), num_reqs, d.bigrams.size}, d.bigram_head,
             {rows, num_columns(), true});
    parallel_for(num_reqs, grain_for(num_columns(), kMinElements), [&](int64_t req) {
      float* row = rows + req * num_columns();
      *token_of(step, req) =
          drafts.draws == nullptr ? likeliest(row) : draw(*drafts.draws, step, req, row);
    });
    return true;
  }

  int64_t likeliest(const float* row) const {
    const int64_t column = std::max<int64_t>(argmax(row, num_columns()), 0);
    return d.column_ids == nullptr ? column : d.column_ids[column];
  }

  int64_t draw(const VllmDraws& draws, int64_t step, int64_t req, float* row) const {
    const int64_t place = draws.idx_mapping[first_req + req];
    const float temperature = draws.temperature[place];
    if (temperature != 0.0f && temperature != 1.0f)
      divide(row, num_columns(), temperature);
    // A row without a token to draw is certain of its first one.
    if (argmax(row, num_columns()) < 0) {
      std::fill(row, row + num_columns(), -kInfinity);
      row[0] = 0.0f;
    }
    float* kept = draws.logits + place * draws.req_stride + step * draws.step_stride;
    if (d.column_ids == nullptr)
      std::copy(row, row + num_columns(), kept);
    else
      for (int64_t column = 0; column < num_columns(); ++column)
        kept[d.column_ids[column]] = row[column];
    // A token's noise is that of its place in the target's vocabulary.
    const int64_t key = draws.keys[step * draws.num_reqs + first_req + req];
    return draws.is_greedy[first_req + req] != 0
               ? argmax(kept, draws.vocab_size)
               : gumbel_argmax(kept, draws.vocab_size, key);
  }
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_draft_blocks(const VllmBlockDrafter* drafter, const VllmStep* step,
                                   void* const* kv_caches, const VllmDrafts* drafts) {
  using namespace vllm;
  constexpr int64_t kNoRow = 4;
  if (step->num_reqs == 0 || drafts->num_steps == 0) return 0;
  if (const VllmDraws* draws = drafts->draws)
    for (int64_t req = 0; req < step->num_reqs; ++req)
      if (draws->idx_mapping[req] < 0 || draws->idx_mapping[req] >= draws->max_num_reqs)
        return kNoRow;
  const int64_t hidden_size = drafter->embedding.size;
  const int64_t at_once = std::min(step->num_reqs, drafts->max_reqs_at_once);
  const int64_t per_req = Part::floats_per_req(*drafter, *drafts);
  thread_local Scratch scratch;
  float* stream = scratch.floats(
      static_cast<size_t>(step->num_tokens * hidden_size + at_once * per_req));
  if (!copy_rows(drafter->embedding, drafts->input_ids, step->num_tokens, stream, hidden_size))
    return kNoRow;
  if (const int64_t code = vllm_decoder_layers(drafter->layers, drafter->num_layers, step,
                                               stream, hidden_size, kv_caches))
    return code;
  float* x = stream + step->num_tokens * hidden_size;
  for (int64_t first = 0; first < step->num_reqs; first += at_once) {
    Part part{*drafter, *drafts, step->num_tokens / step->num_reqs,
              first,    std::min(at_once, step->num_reqs - first),
              x,        nullptr, nullptr};
    part.logits = x + part.num_rows() * part.width();
    part.confidence = part.logits + part.num_rows() * part.num_columns();
    if (!part.run(stream)) return kNoRow;
  }
  return 0;
}
