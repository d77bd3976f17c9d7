// Running a program: one phase per instruction, cut into pieces for the pool.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels.h"
#include "pool.h"

namespace ss {

namespace {

template <class T> void grow(std::vector<T> &values, int64_t size) {
    if (int64_t(values.size()) < size) values.resize(size_t(size));
}

// Which rows want logits, and which go through attention together.
void prepare(ss_program &p, const ss_batch &batch, int32_t workers) {
    Step &step = p.step;
    step.batch = batch;
    step.tokens = batch.page_size;
    step.wanted.clear();
    step.tiles.clear();
    step.first_segment.clear();
    int32_t segments = 0;
    for (int32_t r = 0; r < batch.num_rows; ++r) {
        if (batch.wants_logits[r]) step.wanted.push_back(r);
        RowTile *last = step.tiles.empty() ? nullptr : &step.tiles.back();
        if (last != nullptr && last->sequence == batch.sequence[r] && last->position + last->count == batch.position[r] &&
            last->count < p.rows_in_tile) {
            last->count += 1;
            continue;
        }
        step.tiles.push_back({r, 1, batch.sequence[r], batch.position[r]});
    }
    for (const RowTile &tile : step.tiles) {
        step.first_segment.push_back(segments);
        segments += (tile.position + tile.count - 1) / SEGMENT + 1;
    }
    step.first_segment.push_back(segments);
    int32_t kv_heads = 1 << 20;
    for (const Instr &instr : p.instrs)
        if (instr.op == Op::attend) kv_heads = std::min(kv_heads, instr.kv_heads);
    const int32_t tiles = int32_t(step.tiles.size());
    step.split = segments > tiles && int64_t(tiles) * kv_heads < 8 * int64_t(workers);
    if (step.split) grow(step.partials, int64_t(segments) * p.most_kv_heads * p.most_items * (2 + 256));
    grow(step.mixed, int64_t(batch.num_rows) * p.most_heads_width);
    grow(step.upcoming, workers);
    for (Upcoming &upcoming : step.upcoming) upcoming.for_instr = nullptr;
    if (int32_t(step.own_rows.size()) < workers) step.own_rows.resize(size_t(workers));
    for (OwnRows &own : step.own_rows) {
        own.for_instr = nullptr;
        if (own.allocated != nullptr) continue;
        own.allocated.reset(new uint8_t[size_t(p.own_row_bytes * FEW_ROWS + 64)]);
        own.memory = own.allocated.get() + (64 - reinterpret_cast<uintptr_t>(own.allocated.get()) % 64) % 64;
    }
}

// Finds norms whose result only the next instruction reads.
void find_own_norms(ss_program &p) {
    const int32_t count = int32_t(p.instrs.size());
    for (int32_t i = 0; i + 1 < count; ++i) {
        Instr &norm = p.instrs[i], &next = p.instrs[i + 1];
        if (norm.op != Op::norm || !p.buffers[norm.out].q8 || next.in != norm.out) continue;
        if (next.op != Op::linear && next.op != Op::qkv && next.op != Op::gateup) continue;
        // Whoever reads the buffer later must find something newer in it. The next instruction must not overwrite what
        // the norm reads either: workers do the norm at different times.
        bool alone = next.out < 0 || p.buffers[next.out].slot != p.buffers[norm.in].slot;
        if (next.op == Op::qkv) alone = p.buffers[next.query].slot != p.buffers[norm.in].slot;
        for (int32_t j = i + 2; j < count && alone; ++j) {
            if (p.instrs[j].op == Op::reference) alone = false;
            if (p.instrs[j].in == norm.out) alone = false;
            if (p.instrs[j].out == norm.out) break;
        }
        if (!alone) continue;
        norm.own_norm = next.own_norm = i;
        p.own_row_bytes = std::max(p.own_row_bytes, p.buffers[norm.out].row_bytes);
    }
}

// Lists, by expert, the rows that chose it.
int32_t expert_pieces(ss_program &p, const Instr &in, int32_t workers) {
    Step &step = p.step;
    const int32_t rows = step.batch.num_rows;
    step.choices.clear();
    step.uses.clear();
    for (int32_t e = 0; e < in.experts; ++e) {
        const int32_t begin = int32_t(step.choices.size());
        for (int32_t r = 0; r < rows; ++r) {
            const float *shares = step.shares.data() + int64_t(r) * in.experts;
            if (shares[e] < 0) continue;
            const auto before = std::count_if(shares, shares + e, [](float share) { return !(share < 0); });
            step.choices.push_back({r, r * in.top_k + int32_t(before), shares[e]});
        }
        const int32_t count = int32_t(step.choices.size()) - begin;
        if (count > 0) step.uses.push_back({e, begin, count});
    }
    step.experts_read += int64_t(step.uses.size());
    const Weight &gate = p.weights[in.gate];
    const int32_t units = (gate.tiles + 1) / 2;
    step.units_per_piece = units_in_piece(units, 4 * gate.tile_bytes, std::max(1, rows * in.top_k / in.experts), workers);
    step.pieces_per_expert = unit_pieces(units, step.units_per_piece);
    return step.pieces_per_expert * int32_t(step.uses.size());
}

constexpr int64_t FETCHED_BEFORE = 8192;

struct Run final : ss_phases {
    Run(ss_program &program, int32_t count) : p(program), workers(count) {}

    int32_t pieces(int32_t phase) override {
        const Instr &in = p.instrs[phase];
        const int32_t rows = p.step.batch.num_rows;
        switch (in.op) {
            case Op::embed:
            case Op::rope_table:
            case Op::moe_route: return route_pieces(in, rows);
            case Op::norm: {
                const int32_t own = rows_of(p, in.in);
                return in.own_norm >= 0 && own <= FEW_ROWS ? 0 : row_pieces(own);
            }
            case Op::quant:
            case Op::rope: return row_pieces(rows_of(p, in.in));
            case Op::silu_mul: return row_pieces(rows_of(p, in.gate));
            case Op::add: return row_pieces(rows_of(p, in.a));
            case Op::select: return row_pieces(p.step.batch.num_wanted);
            case Op::linear:
            case Op::gateup:
            case Op::moe_down: return cut_of(p, in, workers).pieces;
            case Op::qkv: return in.heads + 2 * in.kv_heads;
            case Op::write_kv: return p.caches[in.cache].heads;
            case Op::attend:
                return in.kv_heads * (p.step.split ? p.step.first_segment.back() : int32_t(p.step.tiles.size()));
            case Op::attend_merge:
                if (!p.buffers[in.out].q8 && !p.step.split) return 0;
                return merges_apart(p) ? int32_t(p.step.tiles.size()) : 1;
            case Op::moe_gateup: return expert_pieces(p, in, workers);
            case Op::reference: return 0;
        }
        return 0;
    }

    void run(int32_t phase, int32_t piece, int32_t worker) override {
        p.kernels->run(p, p.instrs[phase], piece, {worker, workers});
    }

    const uint8_t *ahead(int32_t phase, int32_t worker) override {
        // The beginning was fetched along with the last piece.
        const uint8_t *next = next_weights(p, p.instrs[phase], {worker, workers});
        return next == nullptr ? nullptr : next + FETCHED_BEFORE;
    }

  private:
    int32_t route_pieces(const Instr &in, int32_t rows) {
        if (in.op == Op::moe_route) {
            const int64_t hidden = p.buffers[in.in].width, inner = p.weights[in.down].inputs;
            grow(p.step.shares, int64_t(rows) * in.experts);
            grow(p.step.expert_input, rows * ((hidden + BLOCK - 1) / BLOCK) * Q8_BLOCK_BYTES);
            grow(p.step.expert_hidden, int64_t(rows) * in.top_k * ((inner + BLOCK - 1) / BLOCK) * 4 * BLOCK);
        }
        return row_pieces(rows);
    }

    ss_program &p;
    const int32_t workers;
};

bool fits(const ss_program &p, const ss_batch &batch) {
    if (batch.num_rows < 1 || batch.num_rows > p.max_rows || batch.num_wanted < 0) return false;
    if (batch.page_size < LANES || (batch.page_size & (batch.page_size - 1))) return false;
    int32_t wanted = 0;
    for (int32_t r = 0; r < batch.num_rows; ++r) wanted += batch.wants_logits[r] != 0;
    if (wanted != batch.num_wanted) return false;
    for (const Instr &instr : p.instrs) {
        if (instr.op != Op::embed) continue;
        for (int32_t r = 0; r < batch.num_rows; ++r)
            if (batch.token[r] < 0 || batch.token[r] >= p.weights[instr.weight].outputs) return false;
    }
    return true;
}

}  // namespace

namespace {

// A worker's own part of an instruction's weights, as (begin, bytes); nothing for instructions that have none.
int32_t own_weights(const ss_program &p, const Instr &in, Crew crew, const uint8_t **at, int64_t *bytes) {
    if (in.op == Op::linear || in.op == Op::gateup) {
        const Cut cut = cut_of(p, in, crew.workers);
        const int32_t begin = first_piece(cut.pieces, crew) * cut.in_piece;
        const int32_t end = std::min(first_piece(cut.pieces, {crew.worker + 1, crew.workers}) * cut.in_piece, cut.units);
        const Weight *const both[2] = {&p.weights[in.op == Op::linear ? in.weight : in.gate],
                                       in.op == Op::linear ? nullptr : &p.weights[in.up]};
        int32_t count = 0;
        for (const Weight *w : both) {
            if (w == nullptr || begin >= end) continue;
            at[count] = w->tile(2LL * begin);
            bytes[count++] = 2LL * (end - begin) * w->tile_bytes;
        }
        return count;
    }
    if (in.op == Op::qkv) {
        const int32_t head = first_piece(in.heads + 2 * in.kv_heads, crew), tiles = in.width / LANES;
        const bool is_query = head < in.heads, is_key = !is_query && head < in.heads + in.kv_heads;
        const Weight &w = p.weights[is_query ? in.q : is_key ? in.k : in.v];
        const int32_t own = is_query ? head : is_key ? head - in.heads : head - in.heads - in.kv_heads;
        at[0] = w.tile(int64_t(own) * tiles);
        bytes[0] = tiles * w.tile_bytes;
        return 1;
    }
    return 0;
}

}  // namespace

const uint8_t *next_weights(const ss_program &p, const Instr &instr, Crew crew) {
    const Instr *const end = p.instrs.data() + p.instrs.size();
    const uint8_t *at[2];
    int64_t bytes[2];
    for (const Instr *in = &instr + 1; in < end && in->op != Op::moe_route; ++in)
        if (own_weights(p, *in, crew, at, bytes) > 0) return at[0];
    return nullptr;
}

Upcoming &upcoming_of(ss_program &p, const Instr &instr, Crew crew) {
    Upcoming &upcoming = p.step.upcoming[crew.worker];
    if (upcoming.for_instr == &instr) return upcoming;
    upcoming = {&instr, {}, {}};
    // With many rows arithmetic takes longer than reading weights, and attention needs the memory for itself.
    if (p.step.batch.num_rows > 2 * FEW_ROWS) return upcoming;
    const Instr *const end = p.instrs.data() + p.instrs.size();
    int32_t found = 0;
    for (const Instr *in = &instr + 1; in < end && in->op != Op::moe_route && found < 3; ++in) {
        const uint8_t *at[2];
        int64_t bytes[2];
        const int32_t count = own_weights(p, *in, crew, at, bytes);
        for (int32_t i = 0; i < count && found < 3; ++i, ++found) {
            upcoming.at[found] = at[i];
            upcoming.lines[found] = bytes[i] / 64;
        }
    }
    return upcoming;
}

}  // namespace ss

int32_t ss_abi(void) { return 1; }

int32_t ss_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return SS_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return SS_AVX2;
#endif
    return SS_PORTABLE;
}

ss_program *ss_program_create(const char *text, const uint8_t *weights, int64_t weight_bytes, int32_t isa,
                              int32_t max_rows, char *error, int32_t error_size) {
    std::unique_ptr<ss_program> program(new ss_program);
    std::string problem;
    if (max_rows < 1 || max_rows > 1 << 20) problem = "max_rows must be from 1 to 1048576";
    else if (isa < 0 || isa > ss_best_isa()) problem = "this CPU lacks that instruction set";
    if (problem.empty()) {
        try {
            program->max_rows = max_rows;
            ss::parse(*program, text, weights, weight_bytes);
        } catch (const std::string &sentence) {
            problem = sentence;
        } catch (const std::bad_alloc &) {
            problem = "there is not enough memory";
        }
    }
    if (!problem.empty()) {
        if (error != nullptr && error_size > 0) snprintf(error, size_t(error_size), "%s", problem.c_str());
        return nullptr;
    }
    program->kernels = &ss::PORTABLE_KERNELS;
#if defined(__x86_64__)
    if (isa == SS_AVX2) program->kernels = &ss::AVX2_KERNELS;
    if (isa == SS_AVX512) program->kernels = &ss::AVX512_KERNELS;
#endif
    ss::find_own_norms(*program);
    for (const ss::Instr &instr : program->instrs) {
        if (instr.op != ss::Op::attend) continue;
        const int32_t per_group = instr.heads / instr.kv_heads;
        program->rows_in_tile = std::min(program->rows_in_tile, std::max(1, ss::MOST_ITEMS / per_group));
        program->most_kv_heads = std::max(program->most_kv_heads, instr.kv_heads);
    }
    for (const ss::Instr &instr : program->instrs)
        if (instr.op == ss::Op::attend)
            program->most_items =
                std::max(program->most_items, program->rows_in_tile * (instr.heads / instr.kv_heads));
    return program.release();
}

void ss_program_destroy(ss_program *program) { delete program; }

void *ss_program_buffer(ss_program *program, int32_t id, int64_t *row_bytes) {
    if (id < 0 || id >= int32_t(program->buffers.size())) return nullptr;
    if (row_bytes != nullptr) *row_bytes = program->buffers[id].row_bytes;
    return program->buffers[id].base;
}

int32_t ss_program_length(ss_program *program) { return program->num_lines; }

int64_t ss_program_experts_read(ss_program *program) { return program->step.experts_read; }

int32_t ss_program_run(ss_program *program, ss_pool *pool, const ss_batch *batch, int32_t first, int32_t last) {
    if (first < 0 || last > program->num_lines || first > last || !ss::fits(*program, *batch)) return -1;
    const int32_t workers = ss_pool_threads(pool);
    ss::prepare(*program, *batch, workers);
    ss::Run run(*program, workers);
    ss_pool_run(pool, run, program->first_of_line[first], program->first_of_line[last]);
    return 0;
}
