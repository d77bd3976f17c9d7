// What one instruction set provides, and how instructions are cut into pieces (the same for all of them).
#pragma once

#include "program.h"

// `run` does one piece of an instruction of the program's current step.
struct ss_kernels {
    void (*run)(ss_program &program, const ss::Instr &instr, int32_t piece, int32_t workers);
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

}  // namespace ss
