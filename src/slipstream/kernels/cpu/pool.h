// Threads that stay: the caller is worker 0, the others are pinned, spin for a moment between tasks and then sleep.
#pragma once

#include <stdint.h>

#include "slipstream.h"

// A list of phases. A phase has pieces that may run in any order on any worker; phases run one after the other.
struct ss_phases {
    // Pieces of phase `phase`. Called once, by one worker, after all earlier phases are done.
    virtual int32_t pieces(int32_t phase) = 0;
    virtual void run(int32_t phase, int32_t piece, int32_t worker) = 0;
    // Memory that a worker will read after phase `phase`, to be fetched while it waits for the others; or null.
    virtual const uint8_t *ahead(int32_t, int32_t) { return nullptr; }

  protected:
    ~ss_phases() = default;
};

// Runs phases [first, last) on all workers of the pool, or on the caller alone if `pool` is null.
void ss_pool_run(ss_pool *pool, ss_phases &phases, int32_t first, int32_t last);
// Runs `fn(context, piece, worker)` for every piece.
void ss_pool_each(ss_pool *pool, int32_t pieces, void (*fn)(void *context, int32_t piece, int32_t worker),
                  void *context);
int32_t ss_pool_threads(const ss_pool *pool);  // 1 for null
