// All kernels over sixteen lanes. Included once per instruction set, inside its namespace, behind its lanes_*.h, so
// that the same source with the same order of operations gives the same bits on each.

#include "exp_impl.h"

inline F gated(F gate, F up) {
    return mul(div(gate, add(splat(1.0f), exp16(neg(gate)))), up);
}

// 32 values, in two vectors, to a block.
inline void quantise(F low, F high, Q8Block *block) {
    const uint32_t bits = fold_umax(umax(magnitude(low), magnitude(high)));
    float largest;
    memcpy(&largest, &bits, 4);
    if (bits >= 0x7F800000u || largest < 1e-30f) {
        const bool broken = bits >= 0x7F800000u;
        memset(block, 0, sizeof(Q8Block));
        if (broken) block->scale = block->fsum = NAN;
        return;
    }
    const F inverse = splat(127.0f / largest);
    const Sums sums = store_both(block->q, to_int(mul(low, inverse)), to_int(mul(high, inverse)));
    block->scale = largest / 127.0f;
    block->fsum = block->scale * float(sums.low + sums.high);
    block->neg8 = -8 * (sums.low + sums.high);
    block->neg8h[0] = -8 * sums.low;
    block->neg8h[1] = -8 * sums.high;
}

inline void quantise_row(const float *x, int32_t width, Q8Block *out) {
    int32_t k = 0;
    for (; k + 32 <= width; k += 32) quantise(load(x + k), load(x + k + 16), out++);
    if (k < width) {
        const int32_t left = width - k;
        const F low = load_n(x + k, left < 16 ? left : 16);
        quantise(low, left > 16 ? load_n(x + k + 16, left - 16) : splat(0.0f), out);
    }
}

inline float inverse_rms(const float *x, int32_t width, float eps) {
    F squares = splat(0.0f);
    int32_t k = 0;
    for (; k + 16 <= width; k += 16) {
        const F v = load(x + k);
        squares = fma(v, v, squares);
    }
    if (k < width) {
        const F v = load_n(x + k, width - k);
        squares = fma(v, v, squares);
    }
    return 1.0f / sqrtf(fold_add(squares) / float(width) + eps);
}

// In place is fine.
inline void normalise(const float *x, const float *weight, int32_t width, float eps, float *out) {
    const F r = splat(inverse_rms(x, width, eps));
    int32_t k = 0;
    for (; k + 16 <= width; k += 16) store(out + k, mul(load(weight + k), mul(load(x + k), r)));
    if (k < width) {
        const int32_t left = width - k;
        store_n(out + k, mul(load_n(weight + k, left), mul(load_n(x + k, left), r)), left);
    }
}

inline void normalise_to_q8(const float *x, const float *weight, int32_t width, float eps, Q8Block *out) {
    const F r = splat(inverse_rms(x, width, eps));
    int32_t k = 0;
    for (; k + 32 <= width; k += 32)
        quantise(mul(load(weight + k), mul(load(x + k), r)), mul(load(weight + k + 16), mul(load(x + k + 16), r)),
                 out++);
    if (k < width) {
        const int32_t left = width - k, first = left < 16 ? left : 16;
        const F low = mul(load_n(weight + k, first), mul(load_n(x + k, first), r));
        F high = splat(0.0f);
        if (left > 16) high = mul(load_n(weight + k + 16, left - 16), mul(load_n(x + k + 16, left - 16), r));
        quantise(low, high, out);
    }
}

// Rotates one head by its row's cosines and sines.
inline void rotate(const float *x, const float *table, int32_t width, float *out) {
    const int32_t half = width / 2;
    for (int32_t k = 0; k < half; k += 16) {
        const F c = load(table + k), s = load(table + half + k);
        const F first = load(x + k), second = load(x + half + k);
        store(out + k, fma(first, c, neg(mul(second, s))));
        store(out + half + k, fma(second, c, mul(first, s)));
    }
}

// The rows that a piece of `in` reads. Where they are few and come from a norm that nobody else reads, every worker makes
// its own copy: two cores compute them sooner than one hands them to the other.
inline Buffer input_of(ss_program &p, const Instr &in, Crew crew) {
    const Buffer &from = p.buffers[in.in];
    const int32_t rows = rows_of(p, in.in);
    if (in.own_norm < 0 || rows > FEW_ROWS) return from;
    const Instr &norm = p.instrs[in.own_norm];
    OwnRows &own = p.step.own_rows[crew.worker];
    Buffer mine = from;
    mine.base = own.memory;
    if (own.for_instr == &in) return mine;
    own.for_instr = &in;
    const Buffer &source = p.buffers[norm.in];
    for (int32_t r = 0; r < rows; ++r)
        for (int32_t at = 0; at < source.row_bytes; at += 64) fetch(source.row<uint8_t>(r) + at);
    for (int32_t r = 0; r < rows; ++r)
        normalise_to_q8(source.row<float>(r), p.vectors[norm.weight].data, source.width, norm.eps, mine.row<Q8Block>(r));
    return mine;
}

#include "linear_impl.h"

#include "attention_impl.h"

#include "experts_impl.h"

// Instructions -------------------------------------------------------------------------------------------------------

inline void run_embed(ss_program &p, const Instr &in, int32_t piece) {
    const Buffer &out = p.buffers[in.out];
    const Range range = row_range(p.step.batch.num_rows, piece);
    for (int32_t r = range.begin; r < range.end; ++r)
        embed_row(p.weights[in.weight], p.step.batch.token[r], out.row<float>(r));
}

inline void run_rope_table(ss_program &p, const Instr &in, int32_t piece) {
    const Buffer &out = p.buffers[in.out];
    const Vector &freq = p.vectors[in.inv_freq];
    const Range range = row_range(p.step.batch.num_rows, piece);
    for (int32_t r = range.begin; r < range.end; ++r) {
        float *row = out.row<float>(r);
        for (int32_t k = 0; k < freq.count; ++k) {
            const SinCos both = sin_cos(float(p.step.batch.position[r]) * freq.data[k]);
            row[k] = both.cos * in.scale;
            row[freq.count + k] = both.sin * in.scale;
        }
    }
}

inline void run_norm(ss_program &p, const Instr &in, int32_t piece) {
    const Buffer &from = p.buffers[in.in], &to = p.buffers[in.out];
    const float *weight = p.vectors[in.weight].data;
    const int32_t width = from.width / in.heads;
    const Range range = row_range(rows_of(p, in.in), piece);
    for (int32_t r = range.begin; r < range.end; ++r) {
        if (to.q8) {
            normalise_to_q8(from.row<float>(r), weight, width, in.eps, to.row<Q8Block>(r));
            continue;
        }
        for (int32_t h = 0; h < in.heads; ++h)
            normalise(from.row<float>(r) + h * width, weight, width, in.eps, to.row<float>(r) + h * width);
    }
}

inline void run_quant(ss_program &p, const Instr &in, int32_t piece) {
    const Buffer &from = p.buffers[in.in], &to = p.buffers[in.out];
    const Range range = row_range(rows_of(p, in.in), piece);
    for (int32_t r = range.begin; r < range.end; ++r) quantise_row(from.row<float>(r), from.width, to.row<Q8Block>(r));
}

inline void run_rope(ss_program &p, const Instr &in, int32_t piece) {
    const Range range = row_range(rows_of(p, in.in), piece);
    for (int32_t r = range.begin; r < range.end; ++r) {
        const float *table = p.buffers[in.table].row<float>(r);
        for (int32_t h = 0; h < in.heads; ++h)
            rotate(p.buffers[in.in].row<float>(r) + h * in.width, table, in.width,
                   p.buffers[in.out].row<float>(r) + h * in.width);
    }
}

inline void run_write_kv(ss_program &p, const Instr &in, int32_t head) {
    const Cache &cache = p.caches[in.cache];
    for (int32_t r = 0; r < p.step.batch.num_rows; ++r) {
        const Place place = place_of(p, in.cache, head, p.step.batch.slot[r]);
        write_key(cache, place, p.buffers[in.key].row<float>(r) + head * cache.width);
        write_value(cache, place, p.buffers[in.value].row<float>(r) + head * cache.width);
    }
}

inline void run_silu_mul(ss_program &p, const Instr &in, int32_t piece) {
    const int32_t width = p.buffers[in.gate].width;
    const Range range = row_range(rows_of(p, in.gate), piece);
    for (int32_t r = range.begin; r < range.end; ++r)
        for (int32_t k = 0; k < width; k += 16)
            store(p.buffers[in.out].row<float>(r) + k,
                  gated(load(p.buffers[in.gate].row<float>(r) + k), load(p.buffers[in.up].row<float>(r) + k)));
}

inline void run_add(ss_program &p, const Instr &in, int32_t piece) {
    const int32_t width = p.buffers[in.a].width;
    const Range range = row_range(rows_of(p, in.a), piece);
    for (int32_t r = range.begin; r < range.end; ++r)
        for (int32_t k = 0; k < width; k += 16)
            store(p.buffers[in.out].row<float>(r) + k,
                  add(load(p.buffers[in.a].row<float>(r) + k), load(p.buffers[in.b].row<float>(r) + k)));
}

inline void run_select(ss_program &p, const Instr &in, int32_t piece) {
    const Range range = row_range(p.step.batch.num_wanted, piece);
    for (int32_t r = range.begin; r < range.end; ++r)
        memcpy(p.buffers[in.out].row<float>(r), p.buffers[in.in].row<float>(p.step.wanted[r]),
               size_t(p.buffers[in.in].row_bytes));
}

void run(ss_program &p, const Instr &in, int32_t piece, Crew crew) {
    switch (in.op) {
        case Op::embed: return run_embed(p, in, piece);
        case Op::rope_table: return run_rope_table(p, in, piece);
        case Op::norm: return run_norm(p, in, piece);
        case Op::quant: return run_quant(p, in, piece);
        case Op::linear: return run_linear(p, in, piece, crew);
        case Op::qkv: return run_qkv(p, in, piece, crew);
        case Op::rope: return run_rope(p, in, piece);
        case Op::write_kv: return run_write_kv(p, in, piece);
        case Op::attend: return run_attend(p, in, piece, crew);
        case Op::attend_merge: return run_attend_merge(p, in, piece);
        case Op::gateup: return run_gateup(p, in, piece, crew);
        case Op::silu_mul: return run_silu_mul(p, in, piece);
        case Op::add: return run_add(p, in, piece);
        case Op::select: return run_select(p, in, piece);
        case Op::moe_route: return run_moe_route(p, in, piece);
        case Op::moe_gateup: return run_moe_gateup(p, in, piece);
        case Op::moe_down: return run_moe_down(p, in, piece, crew);
        case Op::reference: return;
    }
}
