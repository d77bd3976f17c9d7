// Products with packed weights. A tile is 16 outputs: lane o sums output o over its inputs in order, so the number of
// rows that share a pass, the order of tiles and the thread do not show in the bits.

// How a block of 32 inputs of a tile is unpacked: `vector<J>` gives inputs 4J to 4J + 3 of every output as bytes.

struct Nibbles {
    template <int J> static B vector(const uint8_t *q) {
        const B packed = load_b(q + 64 * (J % 4));
        return J < 4 ? low_nibbles(packed) : high_nibbles(packed);
    }
    static constexpr int64_t BYTES = 256;
};

struct Bytes {
    template <int J> static B vector(const uint8_t *q) { return load_b(q + 64 * J); }
    static constexpr int64_t BYTES = 512;
};

struct SixBits {
    template <int J> static B vector(const uint8_t *q) {
        return bor(Nibbles::vector<J>(q), two_bits<J % 4>(load_b(q + 256 + 64 * (J / 4))));
    }
    static constexpr int64_t BYTES = 384;
};

inline const uint16_t *halves(const uint8_t *p) { return reinterpret_cast<const uint16_t *>(p); }

// SHIFT turns neg8 into minus the sum of activations times what was added to the weights to make them unsigned.
template <Kind K> struct Format;
template <> struct Format<Kind::q4_0> : Nibbles {
    static constexpr int SHIFT = 0;
    static constexpr bool OFFSET = true, MINIMUM = false;
    static F scale(const uint8_t *s, int32_t b, F &) { return load_f16(halves(s + 32 * b)); }
};
template <> struct Format<Kind::q4_1> : Nibbles {
    static constexpr int SHIFT = 0;
    static constexpr bool OFFSET = false, MINIMUM = true;
    static F scale(const uint8_t *s, int32_t b, F &minimum) {
        minimum = load_f16(halves(s + 64 * b + 32));
        return load_f16(halves(s + 64 * b));
    }
};
template <> struct Format<Kind::q8_0> : Bytes {
    static constexpr int SHIFT = 4;
    static constexpr bool OFFSET = true, MINIMUM = false;
    static F scale(const uint8_t *s, int32_t b, F &) { return load_f16(halves(s + 32 * b)); }
};
template <> struct Format<Kind::q8_1> : Bytes {
    static constexpr int SHIFT = 4;
    static constexpr bool OFFSET = true, MINIMUM = true;
    static F scale(const uint8_t *s, int32_t b, F &minimum) {
        minimum = load_f16(halves(s + 64 * b + 32));
        return load_f16(halves(s + 64 * b));
    }
};
template <> struct Format<Kind::q8_f> : Bytes {
    static constexpr int SHIFT = 4;
    static constexpr bool OFFSET = true, MINIMUM = true;
    static F scale(const uint8_t *s, int32_t b, F &minimum) {
        const float *both = reinterpret_cast<const float *>(s + 128 * b);
        minimum = load(both + 16);
        return load(both);
    }
};
template <> struct Format<Kind::q4_k> : Nibbles {
    static constexpr int SHIFT = 0;
    static constexpr bool OFFSET = false, MINIMUM = true;
    static F scale(const uint8_t *s, int32_t b, F &minimum) {
        const uint8_t *super = s + 320 * (b / 8), *own = super + 64 + 32 * (b % 8);
        minimum = neg(mul(load_f16(halves(super + 32)), load_u8(own + 16)));
        return mul(load_f16(halves(super)), load_u8(own));
    }
};
struct Q6K : SixBits {
    static F scale(const uint8_t *s, int32_t b, int32_t half) {
        const uint8_t *super = s + 288 * (b / 8);
        return mul(load_f16(halves(super)),
                   load_i8(reinterpret_cast<const int8_t *>(super + 32 + 32 * (b % 8) + 16 * half)));
    }
};

// The last three parameters of the kernels: R rows times T tiles that lie one behind the other share a pass.

template <class W, int J, int END, int R, int T>
__attribute__((always_inline)) inline void dots(const uint8_t *q, int64_t tile_bytes, const Q8Block *const *x, int32_t b, I *dot) {
    if constexpr (J < END) {
        B w[T];
        SS_UNROLL
        for (int t = 0; t < T; ++t) w[t] = W::template vector<J>(q + t * tile_bytes);
        SS_UNROLL
        for (int r = 0; r < R; ++r)
            SS_UNROLL
            for (int t = 0; t < T; ++t) dot[t * R + r] = dot4(dot[t * R + r], w[t], x[r][b].q + 4 * J);
        dots<W, J + 1, END, R, T>(q, tile_bytes, x, b, dot);
    }
}

// What of the weights to come a pass asks memory for meanwhile: so many lines with every block of inputs.
struct Fetch {
    const uint8_t *at;
    int32_t lines;

    void some() {
        for (int32_t i = 0; i < lines; ++i, at += 64) fetch(at);
    }
};

template <Kind K, int R, int T>
inline void integer_tiles(const Weight &w, const uint8_t *tile, const Q8Block *const *x, Fetch ahead,
                          F (*result)[GROUP]) {
    const int64_t stride = w.tile_bytes;
    const uint8_t *scales = tile + w.scales_at;
    F acc[T * R];
    SS_UNROLL
    for (int t = 0; t < T; ++t)
        SS_UNROLL
        for (int r = 0; r < R; ++r) acc[t * R + r] = splat(0.0f);
    for (int32_t b = 0; b < w.blocks; ++b) {
        I dot[T * R];
        if constexpr (K == Kind::q6_k) {
            const uint8_t *q = tile + Q6K::BYTES * b;
            SS_UNROLL
            for (int half = 0; half < 2; ++half) {
                SS_UNROLL
                for (int r = 0; r < R; ++r)
                    SS_UNROLL
                    for (int t = 0; t < T; ++t) dot[t * R + r] = shift_left<2>(isplat(x[r][b].neg8h[half]));
                if (half == 0) dots<Q6K, 0, 4, R, T>(q, stride, x, b, dot);
                else dots<Q6K, 4, 8, R, T>(q, stride, x, b, dot);
                SS_UNROLL
                for (int t = 0; t < T; ++t) {
                    const F scale = Q6K::scale(scales + t * stride, b, half);
                    SS_UNROLL
                    for (int r = 0; r < R; ++r)
                        acc[t * R + r] = fma(mul(scale, splat(x[r][b].scale)), to_float(dot[t * R + r]), acc[t * R + r]);
                }
            }
        } else {
            using W = Format<K>;
            const uint8_t *q = tile + W::BYTES * b;
            SS_UNROLL
            for (int r = 0; r < R; ++r) {
                const I begin = W::OFFSET ? shift_left<W::SHIFT>(isplat(x[r][b].neg8)) : isplat(0);
                SS_UNROLL
                for (int t = 0; t < T; ++t) dot[t * R + r] = begin;
            }
            dots<W, 0, 8, R, T>(q, stride, x, b, dot);
            SS_UNROLL
            for (int t = 0; t < T; ++t) {
                F minimum = splat(0.0f);
                const F scale = W::scale(scales + t * stride, b, minimum);
                SS_UNROLL
                for (int r = 0; r < R; ++r) {
                    acc[t * R + r] = fma(mul(scale, splat(x[r][b].scale)), to_float(dot[t * R + r]), acc[t * R + r]);
                    if (W::MINIMUM) acc[t * R + r] = fma(minimum, splat(x[r][b].fsum), acc[t * R + r]);
                }
            }
        }
        ahead.some();
    }
    SS_UNROLL
    for (int t = 0; t < T; ++t)
        SS_UNROLL
        for (int r = 0; r < R; ++r) result[t][r] = acc[t * R + r];
}

template <Kind K, int R, int T>
inline void float_tiles(const Weight &w, const uint8_t *tile, const float *const *x, Fetch ahead, F (*result)[GROUP]) {
    F acc[T * R];
    SS_UNROLL
    for (int t = 0; t < T; ++t)
        SS_UNROLL
        for (int r = 0; r < R; ++r) acc[t * R + r] = splat(0.0f);
    constexpr int64_t STRIDE = K == Kind::bf16 ? 32 : 64;
    for (int32_t k = 0; k < w.inputs; ++k) {
        F value[T];
        SS_UNROLL
        for (int t = 0; t < T; ++t) {
            const uint8_t *at = tile + t * w.tile_bytes + STRIDE * k;
            value[t] = K == Kind::bf16 ? load_bf16(halves(at)) : load(reinterpret_cast<const float *>(at));
        }
        SS_UNROLL
        for (int r = 0; r < R; ++r) {
            const F input = splat(x[r][k]);
            SS_UNROLL
            for (int t = 0; t < T; ++t) acc[t * R + r] = fma(value[t], input, acc[t * R + r]);
        }
        if (k % BLOCK == 0) ahead.some();
    }
    SS_UNROLL
    for (int t = 0; t < T; ++t)
        SS_UNROLL
        for (int r = 0; r < R; ++r) result[t][r] = acc[t * R + r];
}

// Rows of a buffer that a pass reads, by pointers, so that they need not lie one behind the other.
struct Rows {
    const void *at[GROUP];
};

inline Rows rows_from(const Buffer &buffer, int32_t first, int32_t count) {
    Rows rows;
    for (int32_t r = 0; r < count; ++r) rows.at[r] = buffer.row<uint8_t>(first + r);
    return rows;
}

template <Kind K, int R, int T>
inline void tiles_of(const Weight &w, const uint8_t *tile, const Rows &rows, Fetch ahead, F (*result)[GROUP]) {
    if constexpr (K == Kind::bf16 || K == Kind::f32) {
        const float *x[R];
        for (int r = 0; r < R; ++r) x[r] = static_cast<const float *>(rows.at[r]);
        float_tiles<K, R, T>(w, tile, x, ahead, result);
    } else {
        const Q8Block *x[R];
        for (int r = 0; r < R; ++r) x[r] = static_cast<const Q8Block *>(rows.at[r]);
        integer_tiles<K, R, T>(w, tile, x, ahead, result);
    }
}

template <Kind K, int T, int R = GROUP>
inline void tiles_of_rows(const Weight &w, const uint8_t *tile, const Rows &rows, int32_t count, Fetch ahead,
                          F (*result)[GROUP]) {
    if (count == R) return tiles_of<K, R, T>(w, tile, rows, ahead, result);
    if constexpr (R > 1) tiles_of_rows<K, T, R - 1>(w, tile, rows, count, ahead, result);
}

template <int T>
__attribute__((noinline)) void product_of(const Weight &w, const uint8_t *data, const Rows &rows, int32_t count,
                                          Fetch ahead, F (*result)[GROUP]) {
    switch (w.kind) {
        case Kind::q4_0: return tiles_of_rows<Kind::q4_0, T>(w, data, rows, count, ahead, result);
        case Kind::q4_1: return tiles_of_rows<Kind::q4_1, T>(w, data, rows, count, ahead, result);
        case Kind::q8_0: return tiles_of_rows<Kind::q8_0, T>(w, data, rows, count, ahead, result);
        case Kind::q8_1: return tiles_of_rows<Kind::q8_1, T>(w, data, rows, count, ahead, result);
        case Kind::q8_f: return tiles_of_rows<Kind::q8_f, T>(w, data, rows, count, ahead, result);
        case Kind::q4_k: return tiles_of_rows<Kind::q4_k, T>(w, data, rows, count, ahead, result);
        case Kind::q6_k: return tiles_of_rows<Kind::q6_k, T>(w, data, rows, count, ahead, result);
        case Kind::bf16: return tiles_of_rows<Kind::bf16, T>(w, data, rows, count, ahead, result);
        case Kind::f32: return tiles_of_rows<Kind::f32, T>(w, data, rows, count, ahead, result);
    }
}

// Which of several passes over the same weights this is, and what weights come after them: each pass fetches its part.
struct Pass {
    int32_t number, of;
    const uint8_t *next;
};

// Outputs [32 * unit, 32 * unit + 32) of up to GROUP rows; zero where there is no second tile.
inline void product(const Weight &w, int32_t unit, const Rows &rows, int32_t count, Pass pass, F (*result)[GROUP]) {
    const uint8_t *tile = w.tile(2 * unit);
    const int64_t lines = (2 * w.tile_bytes / 64 + pass.of - 1) / pass.of;
    const Fetch ahead{pass.next + pass.number * lines * 64, int32_t((lines + w.blocks - 1) / w.blocks)};
    if (2 * unit + 1 < w.tiles) return product_of<2>(w, tile, rows, count, ahead, result);
    product_of<1>(w, tile, rows, count, ahead, result);
    for (int32_t r = 0; r < count; ++r) result[1][r] = splat(0.0f);
}

// Rows whose activations stay in the second-level cache while the tiles of a piece pass over them.
constexpr int32_t PANEL = 128;

// Calls `body(unit, first_row, count, number, of)` for groups of rows and units so that both stay in caches: it is pass
// `number` of `of` over the unit's weights.
template <class Body> inline void in_panels(Range units, int32_t rows, Body body) {
    for (int32_t panel = 0; panel < rows; panel += PANEL) {
        const int32_t end = panel + PANEL < rows ? panel + PANEL : rows;
        const int32_t passes = (end - panel + GROUP - 1) / GROUP;
        for (int32_t unit = units.begin; unit < units.end; ++unit)
            for (int32_t r = panel; r < end; r += GROUP)
                body(unit, r, r + GROUP < end ? GROUP : end - r, (r - panel) / GROUP, passes);
    }
}

// Weights that are read after unit `unit` of weight `w` by who has range `units` of them as its piece.
inline const uint8_t *behind(const ss_program &p, const Instr &in, const Weight &w, int32_t unit, Range units,
                             bool last_piece, Crew crew) {
    if (unit + 1 == units.end && last_piece)
        if (const uint8_t *next = next_weights(p, in, crew)) return next;
    return w.tile(2 * unit + 2);
}

// Adds a vector to outputs [at, at + 16) of every row.
inline void add_bias(const ss_program &p, int32_t bias, int32_t at, int32_t left, int32_t count, F *y) {
    if (bias < 0) return;
    const F values = load_n(p.vectors[bias].data + at, left);
    for (int32_t r = 0; r < count; ++r) y[r] = add(y[r], values);
}

inline void run_linear(ss_program &p, const Instr &in, int32_t piece, Crew crew) {
    const Weight &w = p.weights[in.weight];
    const Buffer from = input_of(p, in, crew);
    const Cut cut = cut_of(p, in, crew.workers);
    const Range range = unit_range(cut.units, cut.in_piece, piece);
    const bool last = is_last_piece(piece, cut.pieces, crew);
    in_panels(range, rows_of(p, in.in), [&](int32_t unit, int32_t first, int32_t count, int32_t number, int32_t of) {
        const Pass pass{number, of, behind(p, in, w, unit, range, last, crew)};
        F y[2][GROUP];
        product(w, unit, rows_from(from, first, count), count, pass, y);
        for (int32_t t = 0; t < 2 && 2 * unit + t < w.tiles; ++t) {
            const int32_t at = (2 * unit + t) * LANES, left = w.outputs - at < LANES ? w.outputs - at : LANES;
            add_bias(p, in.bias, at, left, count, y[t]);
            for (int32_t r = 0; r < count; ++r) {
                F value = y[t][r];
                if (in.add >= 0) value = add(load(p.buffers[in.add].row<float>(first + r) + at), value);
                if (in.out >= 0) store(p.buffers[in.out].row<float>(first + r) + at, value);
                else store_n(p.step.batch.logits + int64_t(first + r) * w.outputs + at, value, left);
            }
        }
    });
}

// Outputs [32 * unit, 32 * unit + 32) of the gated pair, zero beyond the last.
inline void gated_unit(const ss_program &p, const Instr &in, const Weight &gate, const Weight &up, int32_t unit,
                       const Rows &rows, int32_t count, Pass in_gate, Pass in_up, F (*result)[GROUP]) {
    F u[2][GROUP];
    product(gate, unit, rows, count, in_gate, result);
    product(up, unit, rows, count, in_up, u);
    for (int32_t t = 0; t < 2; ++t) {
        const int32_t at = (2 * unit + t) * LANES, left = gate.outputs - at < LANES ? gate.outputs - at : LANES;
        if (left > 0) {
            add_bias(p, in.gate_bias, at, left, count, result[t]);
            add_bias(p, in.up_bias, at, left, count, u[t]);
        }
        for (int32_t r = 0; r < count; ++r)
            result[t][r] = keep_first(gated(result[t][r], u[t][r]), left, splat(0.0f));
    }
}

inline void run_gateup(ss_program &p, const Instr &in, int32_t piece, Crew crew) {
    const Weight &gate = p.weights[in.gate], &up = p.weights[in.up];
    const Buffer from = input_of(p, in, crew), &out = p.buffers[in.out];
    const Cut cut = cut_of(p, in, crew.workers);
    const Range range = unit_range(cut.units, cut.in_piece, piece);
    const bool last = is_last_piece(piece, cut.pieces, crew);
    in_panels(range, rows_of(p, in.in), [&](int32_t unit, int32_t first, int32_t count, int32_t number, int32_t of) {
        const Pass in_gate{number, of, behind(p, in, gate, unit, range, last, crew)};
        const Pass in_up{number, of, behind(p, in, up, unit, range, false, crew)};
        F y[2][GROUP];
        gated_unit(p, in, gate, up, unit, rows_from(from, first, count), count, in_gate, in_up, y);
        for (int32_t r = 0; r < count; ++r) {
            if (out.q8) {
                quantise(y[0][r], y[1][r], out.row<Q8Block>(first + r) + unit);
                continue;
            }
            store(out.row<float>(first + r) + 32 * unit, y[0][r]);
            if (2 * unit + 1 < gate.tiles) store(out.row<float>(first + r) + 32 * unit + 16, y[1][r]);
        }
    });
}

// The row of output `o` as float32, by the products and sums that ggml's dequantisation does.
inline void embed_row(const Weight &w, int32_t o, float *out) {
    const uint8_t *tile = w.tile(o / LANES), *s = tile + w.scales_at;
    const int32_t lane = o % LANES;
    if (w.kind == Kind::bf16 || w.kind == Kind::f32) {
        for (int32_t k = 0; k < w.inputs; ++k) {
            if (w.kind == Kind::f32) {
                memcpy(out + k, tile + 4 * (int64_t(k) * LANES + lane), 4);
            } else {
                const uint32_t bits = uint32_t(halves(tile)[int64_t(k) * LANES + lane]) << 16;
                memcpy(out + k, &bits, 4);
            }
        }
        return;
    }
    const int64_t bytes = info(w.kind).quant_bytes;
    for (int32_t k = 0; k < w.inputs; ++k) {
        const int32_t b = k / BLOCK, in_block = k % BLOCK;
        const uint8_t *q = tile + bytes * b;
        const int32_t vector = in_block / 4, byte = 4 * lane + in_block % 4;
        const int32_t nibble = (q[64 * (vector % 4) + byte] >> (vector < 4 ? 0 : 4)) & 15;
        const int32_t whole = q[64 * vector % int32_t(bytes) + byte];
        switch (w.kind) {
            case Kind::q4_0: out[k] = half_to_float(halves(s + 32 * b)[lane]) * float(nibble - 8); break;
            case Kind::q4_1:
                out[k] = half_to_float(halves(s + 64 * b)[lane]) * float(nibble);
                out[k] = out[k] + half_to_float(halves(s + 64 * b + 32)[lane]);
                break;
            case Kind::q8_0: out[k] = half_to_float(halves(s + 32 * b)[lane]) * float(whole - 128); break;
            case Kind::q8_1:
                out[k] = half_to_float(halves(s + 64 * b)[lane]) * float(whole - 128);
                out[k] = out[k] + half_to_float(halves(s + 64 * b + 32)[lane]);
                break;
            case Kind::q8_f: {
                const float *both = reinterpret_cast<const float *>(s + 128 * b);
                out[k] = both[lane] * float(whole - 128);
                out[k] = out[k] + both[16 + lane];
                break;
            }
            case Kind::q4_k: {
                const uint8_t *super = s + 320 * (b / 8), *own = super + 64 + 32 * (b % 8);
                out[k] = half_to_float(halves(super)[lane]) * float(own[lane]) * float(nibble);
                out[k] = out[k] - half_to_float(halves(super + 32)[lane]) * float(own[16 + lane]);
                break;
            }
            default: {
                const uint8_t *super = s + 288 * (b / 8);
                const int8_t own = int8_t(super[32 + 32 * (b % 8) + 16 * (in_block / 16) + lane]);
                const int32_t top = (q[256 + 64 * (vector / 4) + byte] >> (2 * (vector % 4))) & 3;
                out[k] = half_to_float(halves(super)[lane]) * float(own) * float((nibble | top << 4) - 32);
            }
        }
    }
}
