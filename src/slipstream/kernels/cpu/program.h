// A parsed program: buffers, weights, caches and instructions, and what a step needs beside them.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "slipstream.h"

namespace ss {

constexpr int32_t LANES = 16;
constexpr int32_t BLOCK = 32;         // inputs that share a scale
constexpr int32_t SEGMENT = 128;      // context positions whose partial result of attention is computed by one worker
constexpr int32_t MOST_ITEMS = 12;    // rows times heads that read a segment together
constexpr int32_t Q8_BLOCK_BYTES = 64;

// A block of 32 quantised activations.
struct Q8Block {
    int8_t q[BLOCK];
    float scale;
    float fsum;        // scale times the sum of q
    int32_t neg8;      // -8 times the sum of q
    int32_t neg8h[2];  // the same of either half
    int32_t unused[3];
};
static_assert(sizeof(Q8Block) == Q8_BLOCK_BYTES, "a block is a cache line");

enum class Kind : int32_t { q4_0, q4_1, q8_0, q8_1, q8_f, q4_k, q6_k, bf16, f32 };

struct KindInfo {
    const char *name;
    int32_t quant_bytes;   // of a block of 32 inputs of 16 outputs
    int32_t scale_bytes;   // of a block, or of a super-block of 8 blocks where `super`
    bool super, integer;
};
const KindInfo &info(Kind kind);

struct Buffer {
    bool q8 = false, wanted = false;
    int32_t width = 0, slot = 0;
    int64_t row_bytes = 0;
    uint8_t *base = nullptr;
    template <class T> T *row(int64_t r) const { return reinterpret_cast<T *>(base + r * row_bytes); }
};

struct Weight {
    Kind kind;
    int32_t outputs, inputs, blocks, tiles;
    int64_t tile_bytes, scales_at;  // scales of a tile begin so many bytes behind its quants
    const uint8_t *data;
    const uint8_t *tile(int64_t t) const { return data + t * tile_bytes; }
};

struct Vector {
    const float *data;
    int32_t count;
};

struct Cache {
    int32_t heads, width;
    bool int8;
    int64_t head_bytes(int32_t tokens) const {
        return int8 ? 2LL * width * tokens + 8LL * tokens : 4LL * width * tokens;
    }
};

enum class Op : int32_t {
    embed, rope_table, norm, quant, linear, qkv, rope, write_kv, attend, attend_merge, gateup, silu_mul, add, select,
    moe_route, moe_gateup, moe_down, reference,
};

// Operands are ids, -1 where there is none.
struct Instr {
    Op op;
    int32_t in = -1, out = -1, weight = -1, bias = -1, add = -1, a = -1, b = -1;
    int32_t q = -1, k = -1, v = -1, q_bias = -1, k_bias = -1, v_bias = -1, q_norm = -1, k_norm = -1;
    int32_t gate = -1, up = -1, down = -1, gate_bias = -1, up_bias = -1, router = -1, inv_freq = -1;
    int32_t query = -1, key = -1, value = -1, cache = -1, table = -1;
    int32_t heads = 0, kv_heads = 0, width = 0, window = 0, experts = 0, top_k = 0, renormalise = 0;
    float eps = 0, scale = 1;
    int32_t own_norm = -1;  // the norm that makes `in` and that nobody else needs: each worker does it for itself
    int32_t line = 0;  // the `do` line that it comes from; one line can give several
};

// Consecutive rows of one sequence at consecutive positions.
struct RowTile {
    int32_t first, count, sequence, position;
};

// Where an expert is needed: entries [begin, begin + count) of `Step::choices`.
struct ExpertUse {
    int32_t expert, begin, count;
};

struct Choice {
    int32_t row, slot;  // slot: row * top_k + number, the row of what the expert's first half gives
    float share;
};

// A worker's own copy of few rows.
struct alignas(64) OwnRows {
    const Instr *for_instr = nullptr;
    std::unique_ptr<uint8_t[]> allocated;
    uint8_t *memory = nullptr;  // in `allocated`, aligned
};

// Weights that a worker will read after the instruction at hand, piece by piece, to be fetched where memory idles.
struct alignas(64) Upcoming {
    const Instr *for_instr = nullptr;
    const uint8_t *at[3];
    int64_t lines[3];

    // The next `count` lines to fetch, all in one place; null when there are none.
    const uint8_t *take(int64_t count) {
        for (int32_t i = 0; i < 3; ++i) {
            if (lines[i] < count) continue;
            const uint8_t *result = at[i];
            at[i] += 64 * count;
            lines[i] -= count;
            return result;
        }
        return nullptr;
    }
};

// What a step knows beside the program. Arrays grow when a larger step comes and stay.
struct Step {
    ss_batch batch;
    int32_t tokens = 0;  // in a page
    std::vector<int32_t> wanted;
    std::vector<RowTile> tiles;
    std::vector<int32_t> first_segment;  // of each tile in the list of all segments, and their number at the end
    bool split = false;                  // whether a tile's segments are computed apart
    std::vector<float> partials;         // of split segments: per head of a row, maximum, sum, weighted values
    std::vector<float> mixed;            // attention's results before they are quantised
    std::vector<Choice> choices;
    std::vector<ExpertUse> uses;
    std::vector<float> shares;           // [rows][experts], -1 where not chosen
    std::vector<uint8_t> expert_input, expert_hidden;  // quantised; the latter float32 for float weights
    int32_t units_per_piece = 0, pieces_per_expert = 0;
    int64_t experts_read = 0;
    std::vector<Upcoming> upcoming;  // of each worker
    std::vector<OwnRows> own_rows;   // of each worker
};

}  // namespace ss

struct ss_program {
    std::vector<ss::Buffer> buffers;
    std::vector<ss::Weight> weights;
    std::vector<ss::Vector> vectors;
    std::vector<ss::Cache> caches;
    std::vector<ss::Instr> instrs;
    std::vector<int32_t> first_of_line;  // instruction that a `do` line begins with, and their number at the end
    int32_t max_rows = 0, num_lines = 0;
    // Over all attention layers: rows that fit in a tile, rows times heads of a tile, the widest result, the most heads.
    int32_t rows_in_tile = 8, most_items = 1, most_heads_width = 0, most_kv_heads = 1;
    int64_t own_row_bytes = 0;
    const struct ss_kernels *kernels = nullptr;
    std::unique_ptr<uint8_t[]> memory;
    ss::Step step;
};

namespace ss {

// Throws std::string with a sentence.
void parse(ss_program &program, const char *text, const uint8_t *weights, int64_t weight_bytes);

}  // namespace ss
