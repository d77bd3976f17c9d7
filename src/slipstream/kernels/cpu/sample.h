// Sampling on the CPU: from logits to tokens, by the rules of slipstream/ops/sample.py.
#pragma once

#include "slipstream.h"

typedef struct ss_sampler ss_sampler;

// The rows of one call. Columns of `reals` and `wholes` are those of `Real` and `Whole`; entries of the lists name their
// row first (-1: padding). Rows of results that a row did not ask for get NaN, -1, NaN and 0.
typedef struct {
    const float *logits;      // [rows][vocab]
    const float *reals;       // [rows][7]
    const int64_t *wholes;    // [rows][7]
    const int64_t *penalised; // [num_penalised][4]: row, token, times in the output, in the prompt
    const int64_t *bias_at;   // [num_bias][2]: row, token
    const float *bias_value;  // [num_bias]
    const int64_t *banned;    // [num_banned][2]
    const int64_t *allowed;   // [num_allowed][2]
    const int32_t *grammar;   // [rows][ceil(vocab / 32)], or NULL
    int64_t *tokens;          // [rows]
    float *logprobs;          // [rows]
    int64_t *top_ids;         // [rows][num_top]
    float *top_logprobs;      // [rows][num_top]
    int64_t *ranks;           // [rows]
    int64_t num_penalised, num_bias, num_banned, num_allowed;
    int32_t rows, num_top;    // num_top at most the vocabulary
} ss_sample_batch;

// Room for `workers` threads. NULL without memory.
SS_EXPORT ss_sampler *ss_sampler_create(int32_t vocab, int32_t isa, int32_t workers);
SS_EXPORT void ss_sampler_destroy(ss_sampler *);
// 0; -1 if an entry names a row or token that is not there (nothing was written then); -2 without memory. `pool` may be
// NULL, and must not have more threads than the sampler has workers.
SS_EXPORT int32_t ss_sampler_run(ss_sampler *, ss_pool *pool, const ss_sample_batch *);
