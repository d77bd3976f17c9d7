// The C interface of the native CPU step. Everything a caller needs; nothing here depends on an instruction set.
#pragma once

#include <stdint.h>

#define SS_EXPORT extern "C" __attribute__((visibility("default")))

// Instruction sets. All give the same bits.
enum ss_isa { SS_PORTABLE = 0, SS_AVX2 = 1, SS_AVX512 = 2 };

typedef struct ss_pool ss_pool;
typedef struct ss_program ss_program;

// One step's rows. Arrays stay the caller's; see docs/cpu.md for shapes.
typedef struct {
    int32_t num_rows, num_wanted, page_size, table_stride;
    const int32_t *token, *position, *sequence, *slot;  // [num_rows]
    const int32_t *page_table;                          // [sequences + 1][table_stride]
    const uint8_t *wants_logits;                        // [num_rows], num_wanted of them set
    void *const *caches;                                // one per `cache` line of the program
    float *logits;                                      // [num_wanted][vocab]
} ss_batch;

SS_EXPORT int32_t ss_abi(void);
SS_EXPORT int32_t ss_best_isa(void);

// Threads beside the caller's are pinned within `cpus` and sleep when there is nothing to do.
SS_EXPORT ss_pool *ss_pool_create(int32_t threads, const int32_t *cpus, int32_t num_cpus);
SS_EXPORT void ss_pool_destroy(ss_pool *);

// Parses a program; `weights` must stay mapped while it lives. NULL, and a sentence in `error`, if the text is wrong.
SS_EXPORT ss_program *ss_program_create(const char *text, const uint8_t *weights, int64_t weight_bytes, int32_t isa,
                                        int32_t max_rows, char *error, int32_t error_size);
SS_EXPORT void ss_program_destroy(ss_program *);
// Row r of buffer `id` is at the result plus r times *row_bytes.
SS_EXPORT void *ss_program_buffer(ss_program *, int32_t id, int64_t *row_bytes);
SS_EXPORT int32_t ss_program_length(ss_program *);
// Experts' weights that were read since the program was made, one per expert, layer and step.
SS_EXPORT int64_t ss_program_experts_read(ss_program *);
// Runs instructions [first, last). 0, or -1 if the batch does not fit the program.
SS_EXPORT int32_t ss_program_run(ss_program *, ss_pool *, const ss_batch *, int32_t first, int32_t last);
