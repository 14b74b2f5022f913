// The plain C interface that vllm/_cpu_ops_native.py loads.
//
// Pointers are to float32 data unless named otherwise, strides count elements, and the
// last dimension is contiguous. Functions that read indices return 0, or 1 and leave
// their outputs undefined if an index points out of its array.
#pragma once

#include <cstdint>

#define VLLM_API extern "C" __attribute__((visibility("default")))

VLLM_API int64_t vllm_isa_level();

VLLM_API int64_t vllm_packed_size(int64_t num_columns, int64_t size);
VLLM_API void vllm_pack_weight(const float* weight, int64_t stride, int64_t num_columns,
                               int64_t size, float* packed);
VLLM_API void vllm_packed_linear(const float* x, int64_t x_stride, const float* packed,
                                 const float* bias, float* out, int64_t num_rows,
                                 int64_t num_columns, int64_t size);

// Formats of a quantized weight: 0 Q4_0, 1 Q4_1, 2 Q8_0, 3 int8 with a scale a column.
VLLM_API int64_t vllm_quantized_size(int64_t format, int64_t num_columns, int64_t size);
VLLM_API void vllm_pack_blocks(const uint8_t* blocks, int64_t column_bytes, int64_t format,
                               int64_t num_columns, int64_t size, uint8_t* packed);
VLLM_API void vllm_pack_int8(const float* weight, int64_t stride, int64_t num_columns,
                             int64_t size, uint8_t* packed);
VLLM_API int64_t vllm_quantized_rows(const uint8_t* packed, int64_t format,
                                     int64_t num_columns, int64_t size, const int64_t* ids,
                                     int64_t num_ids, float* out);
VLLM_API int64_t vllm_quantized_select(const uint8_t* packed, int64_t format,
                                       int64_t num_columns, int64_t size,
                                       const int64_t* ids, int64_t num_ids, uint8_t* out);
VLLM_API void vllm_quantized_linear(const float* x, int64_t x_stride, const uint8_t* packed,
                                    int64_t format, const float* bias, float* out,
                                    int64_t num_rows, int64_t num_columns, int64_t size);

// What samplers need to know of products. The format is a quantized weight's, or
// kVllmFloat32. Of every row the first of the largest products, NaN left out, -1 if none is
// above -inf: argmax [num_rows]. Of listed_rows [num_listed] the first `count` columns in
// the order of their products, as vllm_likeliest_tokens, and these products: ids and
// products [num_listed][count], count in 1..64; and logsumexp [num_listed], as
// vllm_logprob_stats. Of written_rows [num_written] all products: written
// [num_written][num_columns]. Rows are named in increasing order.
VLLM_API int64_t vllm_linear_statistics(
    const float* x, int64_t x_stride, const void* packed, int64_t format, const float* bias,
    int64_t num_rows, int64_t num_columns, int64_t size, int64_t* argmax,
    const int64_t* listed_rows, int64_t num_listed, int64_t count, int64_t* ids,
    float* products, float* logsumexp, const int64_t* written_rows, int64_t num_written,
    float* written);

VLLM_API int64_t vllm_context_slots(const int32_t* block_rows, int64_t num_rows,
                                    int64_t max_blocks, const int32_t* idx_mapping,
                                    const int32_t* query_start_loc,
                                    const int64_t* positions,
                                    const int32_t* num_computed, int64_t num_reqs,
                                    int64_t num_tokens, int64_t block_size,
                                    int64_t max_len, int64_t* out);
VLLM_API int64_t vllm_lay_out_blocks(
    const int32_t* all_token_ids, const int32_t* num_computed_tokens,
    const int32_t* block_rows, const int32_t* idx_mapping, int64_t max_num_reqs,
    int64_t max_model_len, int64_t max_blocks, int64_t num_reqs, int64_t num_slots,
    int64_t num_silent, int64_t max_drafts, int64_t mask_id, int64_t block_size,
    int64_t max_len, int64_t num_columns, int64_t* anchors, int64_t* anchor_ids,
    int64_t* input_ids, int64_t* positions, int64_t* slot_mapping, int32_t* query_start_loc,
    int32_t* seq_lens, int32_t* num_drafts, int32_t* block_table);

VLLM_API void vllm_rms_norm(const float* x, int64_t outer_stride, int64_t inner_stride,
                            const float* weight, float eps, float* out,
                            int64_t out_outer_stride, int64_t out_inner_stride,
                            int64_t num_outer, int64_t num_inner, int64_t size);
VLLM_API void vllm_silu_and_mul(const float* x, int64_t x_stride, float* out,
                                int64_t num_rows, int64_t size);
VLLM_API int64_t vllm_rotary_embedding(const int64_t* positions, float* q, int64_t q_stride,
                                       int64_t num_q_heads, float* k, int64_t k_stride,
                                       int64_t num_k_heads, const float* cos_sin_cache,
                                       int64_t num_positions, int64_t rotary_dim,
                                       int64_t head_dim, int64_t num_tokens);

VLLM_API int64_t vllm_reshape_and_cache(const float* key, int64_t key_stride,
                                        const float* value, int64_t value_stride,
                                        void* kv_cache, int64_t is_half,
                                        const int64_t* slot_mapping, int64_t num_tokens,
                                        int64_t num_blocks, int64_t num_kv_heads,
                                        int64_t block_size, int64_t head_size);
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
                                      int64_t is_causal);

// A packed weight [num_columns][size], the size being its layer's.
struct VllmWeight {
  int64_t format;  // of a quantized weight, or kVllmFloat32
  const void* packed;
  const float* bias;  // [num_columns] or null
  int64_t num_columns;
};
constexpr int64_t kVllmFloat32 = -1;

// Weights that stand above each other.
struct VllmLinear {
  const VllmWeight* parts;
  int64_t num_parts;
  int64_t size;
};

struct VllmDecoderLayer {
  VllmLinear qkv, o, gate_up, down;
  const float* input_norm;      // [hidden_size], as the next
  const float* post_norm;
  const float* q_norm;          // [head_size] or null, as the next
  const float* k_norm;
  const float* cos_sin_cache;   // [num_positions][rotary_dim]
  int64_t num_positions, rotary_dim;
  int64_t num_heads, num_kv_heads, head_size;
  float eps, scale;
};

struct VllmStep {
  const int64_t* positions;        // [num_tokens], as the next
  const int64_t* slot_mapping;
  const int32_t* block_table;      // [num_reqs][max_blocks]
  int64_t block_table_stride, max_blocks;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  int64_t num_tokens, num_reqs, num_blocks, block_size;
  int64_t is_causal;
  int64_t is_half;  // the caches' elements, in place of floats
  // Where the stream is copied to, [num_taps][num_tokens][hidden_size], as it enters the
  // layers of these ids; the number of layers is its end.
  float* taps;
  const int64_t* tap_layer_ids;  // [num_taps]
  int64_t num_taps;
};

// Runs layers, all of the first one's shape, on the residual stream [num_tokens]
// [hidden_size]. Returns 1 if a position, 2 if a slot, 3 if a block is outside, and then
// has written nothing.
VLLM_API int64_t vllm_decoder_layers(const VllmDecoderLayer* layers, int64_t num_layers,
                                     const VllmStep* step, float* stream,
                                     int64_t stream_stride, void* const* kv_caches);

// Of a drafter that gets the target's states as context: `fc` fuses the taps of a token
// side by side, `kv` gives the keys of all layers and then the values of all.
struct VllmContextWriter {
  VllmLinear fc, kv;
  const float* hidden_norm;      // [hidden_size], behind fc
  const float* const* k_norms;   // [num_layers], [head_size] or null each
  const float* cos_sin_cache;    // [num_positions][rotary_dim]
  int64_t num_positions, rotary_dim;
  int64_t num_layers, num_kv_heads, head_size;
  float eps;  // of all norms
};

// Pieces one behind the other, as if each had been written after the one before it.
struct VllmContext {
  const int64_t* num_tokens;           // [num_pieces]
  const float* const* taps;            // [num_pieces][num_taps], of
                                       // [num_tokens][fc.size / num_taps] each
  const int64_t* const* positions;     // [num_pieces], of [num_tokens], as the next
  const int64_t* const* slot_mapping;  // below 0: the token is left out
  int64_t num_pieces, num_taps;
  int64_t num_blocks, block_size;
  int64_t is_half;  // the caches' elements, in place of floats
};

// Returns 1 if a position, 2 if a slot is outside, and then has written nothing.
VLLM_API int64_t vllm_write_context(const VllmContextWriter* writer,
                                    const VllmContext* context, void* const* kv_caches);

// A row a token: a quantized weight [num_rows][size], or plain rows of kVllmFloat32.
struct VllmTable {
  int64_t format;
  const void* rows;
  int64_t num_rows, size;
};

struct VllmBlockDrafter {
  VllmTable embedding;           // of the hidden size
  const VllmDecoderLayer* layers;
  int64_t num_layers;
  const float* norm;             // [hidden_size], before the heads
  VllmLinear head;               // of the columns
  VllmTable bigrams;             // of the token before, as bigram_head reads it
  VllmLinear bigram_head;        // what that adds to the columns
  VllmLinear confidence;         // one column of a state, and maybe of the token before
  const float* temperatures;     // of the confidences, a step
  const int64_t* column_ids;     // tokens that columns stand for; null: their own
  int64_t num_columns;
  int64_t first_slot;            // which of a block's slots the first draft is of
  float eps;
};

// How drafts are drawn, and what they were drawn from.
struct VllmDraws {
  const int32_t* idx_mapping;    // [num_reqs], rows of temperature and logits
  const float* temperature;
  const int64_t* keys;           // [num_steps][num_reqs], of the noise
  const uint8_t* is_greedy;      // [num_reqs]
  float* logits;                 // [row][step][vocab_size]
  int64_t req_stride, step_stride, vocab_size, num_reqs, max_num_reqs;
};

struct VllmDrafts {
  const int64_t* input_ids;      // [num_reqs][block_size]; the first is the anchor
  const int32_t* num_drafts;     // [num_reqs]; the token of a later step is -1
  int64_t num_steps, max_reqs_at_once;
  const VllmDraws* draws;        // null: the likeliest tokens
  int64_t* token_ids;            // [num_reqs][num_steps], as the next
  float* scores;
};

// Returns 1 to 3 as vllm_decoder_layers, 4 if a token or request has no row.
VLLM_API int64_t vllm_draft_blocks(const VllmBlockDrafter* drafter, const VllmStep* step,
                                   void* const* kv_caches, const VllmDrafts* drafts);

// The integers of a step; the parameters are the Python functions'.
VLLM_API int64_t vllm_lay_out_step(
    const int32_t* all_token_ids, int64_t max_num_reqs, int64_t max_model_len,
    const int32_t* total_len, const int64_t* draft_tokens, int64_t max_drafts,
    const int32_t* num_computed_tokens, const int32_t* block_rows, int64_t max_blocks,
    int64_t block_size, const int32_t* idx_mapping, int64_t num_reqs,
    const int32_t* query_start_loc, int64_t num_tokens, const int32_t* cu_num_logits,
    int64_t num_logits, int64_t* logits_indices, int32_t* expanded_idx_mapping,
    int32_t* expanded_local_pos, int64_t num_blocks, int64_t* input_ids, int64_t* positions,
    int64_t* slot_mapping, int64_t* sample_positions, int32_t* seq_lens,
    int32_t* block_table);
VLLM_API int64_t vllm_gather_rows(const int32_t* rows, int64_t max_num_reqs, int64_t width,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int64_t num_columns, int32_t* out);
VLLM_API int64_t vllm_scatter_rows(const int64_t* values, int64_t width,
                                   const int32_t* idx_mapping, int64_t num_reqs,
                                   int64_t* rows, int64_t max_num_reqs);
VLLM_API int64_t vllm_compute_slot_mapping(const int32_t* block_table, int64_t stride,
                                           int64_t num_blocks,
                                           const int32_t* query_start_loc,
                                           int64_t num_reqs, const int64_t* positions,
                                           int64_t num_tokens, int64_t block_size,
                                           int64_t* slot_mapping);
VLLM_API void vllm_add_and_sum(const int32_t* counts, const int32_t* admitted,
                               int64_t num_reqs, int32_t* row_sums, int32_t* token_sums);
VLLM_API void vllm_drafts_behind(const int64_t* input_ids, const int32_t* local_pos,
                                 int64_t num_logits, int64_t* drafts);
VLLM_API int64_t vllm_take_accepted_prefix(const uint8_t* is_accepted,
                                           const int64_t* token_ids, int64_t num_logits,
                                           const int32_t* cu_num_logits, int64_t num_reqs,
                                           int64_t width, int64_t* sampled,
                                           int32_t* num_sampled);
VLLM_API int64_t vllm_post_update(const int64_t* sampled_token_ids, int64_t width,
                                  const int32_t* num_sampled, const int32_t* cu_num_logits,
                                  const int32_t* query_start_loc,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int32_t* all_token_ids, int64_t max_num_reqs,
                                  int64_t max_model_len, int32_t* total_len,
                                  int32_t* num_computed_tokens);

// What is known of drafts; parameters as in step.cpp.
VLLM_API int64_t vllm_admit_drafts(const float* confidence_probs, int64_t max_num_reqs,
                                   int64_t max_drafts, const int32_t* idx_mapping,
                                   const int32_t* num_drafts, int64_t num_reqs,
                                   int64_t draft_budget, int32_t* admitted);
VLLM_API int64_t vllm_read_curves(const float* curves, const float* scores,
                                  int64_t req_stride, int64_t stride,
                                  const int32_t* num_drafts,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int64_t max_drafts, const float* temperature,
                                  const uint8_t* is_seeded, const uint8_t* is_constrained,
                                  int64_t max_num_reqs, int64_t num_verifications,
                                  float low, float knots_per_unit, int64_t num_knots,
                                  int64_t parts, float* probs, int32_t* marks);
VLLM_API int64_t vllm_count_outcomes(int32_t* counts, int64_t num_cells, int32_t* marks,
                                     int64_t max_num_reqs, int64_t num_drafts,
                                     const int32_t* idx_mapping,
                                     const int32_t* cu_num_logits,
                                     const int32_t* num_sampled, int64_t num_reqs,
                                     int64_t num_bonus_tokens, int64_t parts);

// What a draft budget is chosen from.
VLLM_API int64_t vllm_record_round(const float* probs, const int32_t* num_drafts,
                                   const int32_t* idx_mapping, int64_t num_reqs,
                                   int64_t max_num_reqs, int64_t max_drafts, float* live,
                                   const int64_t* tenants, int64_t slot, int64_t num_slots,
                                   float* rounds, int64_t* round_tenants);
VLLM_API int64_t vllm_read_rounds(const float* rounds, const int64_t* round_tenants,
                                  int64_t num_slots, const int64_t* tenants,
                                  int64_t max_num_reqs, const double* typical,
                                  int64_t max_drafts, const int64_t* slots,
                                  int64_t num_rounds, const int32_t* idx_mapping,
                                  int64_t num_reqs, double* out);
VLLM_API int64_t vllm_count_round(const float* rounds, const int64_t* round_tenants,
                                  int64_t slot, int64_t num_slots, const int64_t* tenants,
                                  int64_t max_num_reqs, int64_t max_drafts,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int64_t max_counted, double* typical,
                                  int64_t* num_counted);
VLLM_API int64_t vllm_expected_gains(const double* past_confidences, int64_t num_rounds,
                                     int64_t num_reqs, int64_t max_drafts,
                                     const int32_t* num_drafts, int64_t num_gains,
                                     double* gains);
VLLM_API double vllm_correct_costs(double* log_factors, double* covariance,
                                   const double* prior, const double* weights,
                                   int64_t num_draft_knots, int64_t num_knots,
                                   double draft_ms, double verify_ms, double step_ms,
                                   double noise, double outlier_deviations,
                                   double forgetting);

VLLM_API void vllm_noise_keys(const int64_t* seeds, const int64_t* positions,
                              const int64_t* anchor_positions, int64_t purpose,
                              int64_t num_keys, int64_t* keys);
VLLM_API int64_t vllm_block_noise_keys(const int64_t* seeds, const uint8_t* is_seeded,
                                       int64_t max_num_reqs, const int32_t* idx_mapping,
                                       const int64_t* anchors, int64_t num_reqs,
                                       int64_t num_steps, int64_t target_purpose,
                                       int64_t draft_purpose, int64_t* keys);
VLLM_API void vllm_philox_uniform(const int64_t* keys, int64_t num_rows, int64_t count,
                                  float* out);
VLLM_API void vllm_greedy_argmax(const float* logits, int64_t stride, int64_t num_rows,
                                 int64_t vocab_size, int64_t* out);
VLLM_API int64_t vllm_verify_greedy(const int64_t* token_ids, const int64_t* input_ids,
                                    int64_t num_rows, const int32_t* cu_num_logits,
                                    int64_t num_reqs, int64_t width, int64_t* sampled,
                                    int32_t* num_sampled);
VLLM_API void vllm_gumbel_argmax(const float* logits, int64_t stride, const int64_t* keys,
                                 const uint8_t* is_greedy, int64_t num_rows,
                                 int64_t vocab_size, int64_t* out);
VLLM_API int64_t vllm_likeliest_tokens(const float* logits, int64_t stride, int64_t num_rows,
                                       int64_t vocab_size, int64_t count, int64_t* ids);
VLLM_API int64_t vllm_accept_drafts(const float* target_logits, int64_t target_stride,
                                    const float* draft_logits, int64_t draft_req_stride,
                                    int64_t draft_stride, int64_t max_num_reqs,
                                    int64_t max_drafts, const int64_t* draft_token_ids,
                                    const float* uniform, const int32_t* idx_mapping,
                                    const int32_t* local_pos, int64_t num_rows,
                                    int64_t vocab_size, uint8_t* is_accepted);
VLLM_API int64_t vllm_write_residual_logits(
    float* target_logits, int64_t target_stride, const float* draft_logits,
    int64_t draft_req_stride, int64_t draft_stride, int64_t max_num_reqs, int64_t max_drafts,
    const uint8_t* is_rejected, const int32_t* idx_mapping, const int32_t* local_pos,
    int64_t num_rows, int64_t vocab_size);
VLLM_API int64_t vllm_apply_temperature(float* logits, int64_t stride,
                                        const int32_t* idx_mapping,
                                        const float* temperature, int64_t max_num_reqs,
                                        int64_t num_rows, int64_t vocab_size);
VLLM_API void vllm_top_k_top_p(float* logits, int64_t stride, const int32_t* k,
                               const float* p, int64_t num_rows, int64_t vocab_size);
VLLM_API int64_t vllm_logprob_stats(const float* logits, int64_t stride,
                                    const int64_t* token_ids, int64_t num_rows,
                                    int64_t vocab_size, float* logsumexp, int32_t* rank);
VLLM_API int64_t vllm_apply_bitmask(float* logits, int64_t stride, const int32_t* bitmask,
                                    int64_t bitmask_stride, const int32_t* rows,
                                    int64_t num_masks, int64_t num_rows,
                                    int64_t vocab_size);
