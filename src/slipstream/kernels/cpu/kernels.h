// What one instruction set provides, and how instructions are cut into pieces (the same for all of them).
#pragma once

#include "program.h"

namespace ss {

// Who works on a piece, and among how many.
struct Crew {
    int32_t worker, workers;
};

}  // namespace ss

// `run` does one piece of an instruction of the program's current step.
struct ss_kernels {
    void (*run)(ss_program &program, const ss::Instr &instr, int32_t piece, ss::Crew crew);
};

namespace ss {

extern const ss_kernels PORTABLE_KERNELS;
#if defined(__x86_64__)
extern const ss_kernels AVX2_KERNELS, AVX512_KERNELS;
#endif

constexpr int32_t FEW_ROWS = 8;        // rows that one worker does alone where a row takes a fraction of a microsecond
constexpr int32_t ROWS_IN_PIECE = 4;
constexpr int64_t PIECE_BYTES = 64 << 10;

inline int32_t rows_of(const ss_program &p, int32_t buffer) {
    return p.buffers[buffer].wanted ? p.step.batch.num_wanted : p.step.batch.num_rows;
}

inline int32_t row_pieces(int32_t rows) {
    return rows <= FEW_ROWS ? (rows > 0) : (rows + ROWS_IN_PIECE - 1) / ROWS_IN_PIECE;
}

// Whether the tiles' segments are merged by several workers.
inline bool merges_apart(const ss_program &p) {
    return p.step.batch.num_rows > (p.step.split ? FEW_ROWS / 4 : FEW_ROWS);
}

struct Range {
    int32_t begin, end;
};

inline Range row_range(int32_t rows, int32_t piece) {
    if (rows <= FEW_ROWS) return {0, rows};
    const int32_t end = (piece + 1) * ROWS_IN_PIECE;
    return {piece * ROWS_IN_PIECE, end < rows ? end : rows};
}

// Units (tiles, or groups of them that belong together) of `unit_bytes` that make a piece: some microseconds of work.
inline int32_t units_in_piece(int32_t units, int64_t unit_bytes, int32_t rows, int32_t workers) {
    int64_t most = PIECE_BYTES / unit_bytes;
    if (rows > FEW_ROWS) most = most * FEW_ROWS / rows;
    const int64_t shared = units / (8 * int64_t(workers));
    if (most > shared) most = shared;
    const int64_t least = units / 60000 + 1;
    return int32_t(most < least ? least : most);
}

inline int32_t unit_pieces(int32_t units, int32_t in_piece) { return (units + in_piece - 1) / in_piece; }

inline Range unit_range(int32_t units, int32_t in_piece, int32_t piece) {
    const int32_t end = (piece + 1) * in_piece;
    return {piece * in_piece, end < units ? end : units};
}

// The pool gives every worker a range of a phase's pieces to begin with.
inline int32_t first_piece(int32_t pieces, Crew crew) { return int32_t(int64_t(pieces) * crew.worker / crew.workers); }

inline bool is_last_piece(int32_t piece, int32_t pieces, Crew crew) {
    return piece + 1 == first_piece(pieces, {crew.worker + 1, crew.workers});
}

// The first weights that a worker will read in the instructions behind `instr`; null if there are none.
const uint8_t *next_weights(const ss_program &program, const Instr &instr, Crew crew);

// What `worker` will read of the weights of the two instructions behind attention `instr`, begun anew for each instr.
Upcoming &upcoming_of(ss_program &program, const Instr &instr, Crew crew);

// Pieces of an instruction whose pieces are ranges of units of a weight, and how many units a piece has.
struct Cut {
    int32_t units, in_piece, pieces;
};

inline Cut cut_of(int32_t tiles, int64_t tile_bytes, int32_t rows, int32_t workers) {
    const int32_t units = (tiles + 1) / 2, in_piece = units_in_piece(units, 2 * tile_bytes, rows, workers);
    return {units, in_piece, rows == 0 ? 0 : unit_pieces(units, in_piece)};
}

inline Cut cut_of(const ss_program &p, const Instr &in, int32_t workers) {
    switch (in.op) {
        case Op::linear: {
            const Weight &w = p.weights[in.weight];
            return cut_of(w.tiles, w.tile_bytes, rows_of(p, in.in), workers);
        }
        case Op::gateup: {
            const Weight &gate = p.weights[in.gate], &up = p.weights[in.up];
            return cut_of(gate.tiles, gate.tile_bytes + up.tile_bytes, rows_of(p, in.in), workers);
        }
        default: {  // moe_down
            const Weight &down = p.weights[in.down];
            return cut_of(down.tiles, down.tile_bytes, p.step.batch.num_rows, workers);
        }
    }
}

}  // namespace ss
