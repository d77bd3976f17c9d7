// Keys and values in pages, and attention over them. A page holds for each head its keys as [width][tokens] and its
// values as [tokens][width]: scores are computed with positions in lanes, weighted sums with the width in lanes, so each
// number is one chain of operations in a fixed order. See docs/cpu.md for the order.

struct Place {
    uint8_t *head;       // of the page
    int32_t tokens, at;  // in the page
};

inline Place place_of(const ss_program &p, int32_t cache, int32_t head, int32_t slot) {
    const Cache &c = p.caches[cache];
    const int32_t tokens = p.step.tokens;
    uint8_t *base = static_cast<uint8_t *>(p.step.batch.caches[cache]);
    return {base + (int64_t(slot / tokens) * c.heads + head) * c.head_bytes(tokens), tokens, slot % tokens};
}

inline float *scales_of(const Cache &c, uint8_t *head, int32_t tokens, bool of_values) {
    return reinterpret_cast<float *>(head + 2LL * c.width * tokens) + (of_values ? tokens : 0);
}

// x [width] to 8 bits with one scale.
inline float quantise_head(const float *x, int32_t width, int8_t *q) {
    I largest_bits = isplat(0);
    for (int32_t k = 0; k < width; k += 16) largest_bits = umax(largest_bits, magnitude(load(x + k)));
    const uint32_t bits = fold_umax(largest_bits);
    float largest;
    memcpy(&largest, &bits, 4);
    if (bits >= 0x7F800000u || largest < 1e-30f) {
        memset(q, 0, size_t(width));
        return bits >= 0x7F800000u ? NAN : 0.0f;
    }
    const F inverse = splat(127.0f / largest);
    for (int32_t k = 0; k < width; k += 16) store_bytes(q + k, to_int(mul(load(x + k), inverse)));
    return largest / 127.0f;
}

inline void write_key(const Cache &c, const Place &place, const float *x) {
    if (c.int8) {
        int8_t q[256];
        scales_of(c, place.head, place.tokens, false)[place.at] = quantise_head(x, c.width, q);
        for (int32_t d = 0; d < c.width; ++d) place.head[int64_t(d) * place.tokens + place.at] = uint8_t(q[d]);
        return;
    }
    uint16_t *keys = reinterpret_cast<uint16_t *>(place.head);
    for (int32_t d = 0; d < c.width; ++d) keys[int64_t(d) * place.tokens + place.at] = float_to_bf16(x[d]);
}

inline void write_value(const Cache &c, const Place &place, const float *x) {
    if (c.int8) {
        int8_t *values = reinterpret_cast<int8_t *>(place.head) + int64_t(c.width) * place.tokens;
        scales_of(c, place.head, place.tokens, true)[place.at] =
            quantise_head(x, c.width, values + int64_t(place.at) * c.width);
        return;
    }
    uint16_t *values = reinterpret_cast<uint16_t *>(place.head) + int64_t(c.width) * place.tokens;
    for (int32_t d = 0; d < c.width; d += 16) store_bf16(values + int64_t(place.at) * c.width + d, load(x + d));
}

// A head of queries, keys or values: its outputs for up to GROUP rows, then what follows while they are at hand.
inline void run_qkv(ss_program &p, const Instr &in, int32_t unit, Crew crew) {
    const Buffer from = input_of(p, in, crew);
    const Cache &cache = p.caches[in.cache];
    const int32_t rows = p.step.batch.num_rows;
    const bool is_query = unit < in.heads, is_key = !is_query && unit < in.heads + in.kv_heads;
    const int32_t head = is_query ? unit : is_key ? unit - in.heads : unit - in.heads - in.kv_heads;
    const Weight &w = p.weights[is_query ? in.q : is_key ? in.k : in.v];
    const int32_t bias = is_query ? in.q_bias : is_key ? in.k_bias : in.v_bias;
    const int32_t norm = is_query ? in.q_norm : is_key ? in.k_norm : -1;
    const int32_t passes = (rows + GROUP - 1) / GROUP, units = in.width / (2 * LANES);
    const bool last = is_last_piece(unit, in.heads + 2 * in.kv_heads, crew);
    // The lines that will be written, among them one for each number of a key: memory brings them meanwhile.
    for (int32_t r = 0; !is_query && r < rows && rows <= FEW_ROWS; ++r) {
        const Place place = place_of(p, in.cache, head, p.step.batch.slot[r]);
        const int64_t size = cache.int8 ? 1 : 2, stride = is_key ? size * place.tokens : 64;
        const int64_t begin = is_key ? size * place.at : size * cache.width * (place.tokens + place.at);
        const int64_t lines = is_key ? cache.width : (size * cache.width + 63) / 64;
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(place.head + begin + i * stride, 1);
    }
    float y[GROUP][256];
    for (int32_t first = 0; first < rows; first += GROUP) {
        const int32_t count = first + GROUP < rows ? GROUP : rows - first;
        const Rows x = rows_from(from, first, count);
        for (int32_t u = 0; u < units; ++u) {
            F part[2][GROUP];
            const Range all{head * units, (head + 1) * units};
            const Pass pass{first / GROUP, passes, behind(p, in, w, all.begin + u, all, last, crew)};
            product(w, all.begin + u, x, count, pass, part);
            for (int32_t t = 0; t < 2; ++t) {
                const int32_t at = (2 * u + t) * LANES;
                add_bias(p, bias, head * in.width + at, LANES, count, part[t]);
                for (int32_t r = 0; r < count; ++r) store(y[r] + at, part[t][r]);
            }
        }
        for (int32_t r = 0; r < count; ++r) {
            if (norm >= 0) normalise(y[r], p.vectors[norm].data, in.width, in.eps, y[r]);
            const float *table = p.buffers[in.table].row<float>(first + r);
            if (is_query) {
                rotate(y[r], table, in.width, p.buffers[in.query].row<float>(first + r) + head * in.width);
                continue;
            }
            const Place place = place_of(p, in.cache, head, p.step.batch.slot[first + r]);
            if (is_key) {
                float rotated[256];
                rotate(y[r], table, in.width, rotated);
                write_key(cache, place, rotated);
            } else {
                write_value(cache, place, y[r]);
            }
        }
    }
}

// Rows times heads of one group that are computed together; as many as the registers hold.
constexpr int ITEMS = MANY_REGISTERS ? MOST_ITEMS : 4;

struct Items {
    int32_t count;
    float query[ITEMS][256];                   // scaled
    int32_t begin[ITEMS], end[ITEMS];          // positions that an item sees
    float maximum[ITEMS], sum[ITEMS];          // over the segments so far; sum < 0: none yet
    float weighted[ITEMS][256];
};

template <int BYTES> inline F load_cached(const uint8_t *p) {
    if constexpr (BYTES == 2) return load_bf16(reinterpret_cast<const uint16_t *>(p));
    else return load_i8(reinterpret_cast<const int8_t *>(p));
}

// What will be read next, and is fetched meanwhile, each a line further with every step. Where there is nothing, the stride
// is zero and the line one that is at hand.
struct Ahead {
    const uint8_t *first, *second, *weights;
    int64_t stride, second_stride, weights_stride;
};

// Scores of N items at VECTORS * 16 positions; keys[v] points at the first of 16 of them.
template <int BYTES, int N, int VECTORS>
inline void scores(const Items &items, const uint8_t *const *keys, int32_t width, int32_t tokens, const Ahead &ahead,
                   float (*out)[SEGMENT]) {
    F s[VECTORS * N];
    SS_UNROLL
    for (int n = 0; n < VECTORS * N; ++n) s[n] = splat(0.0f);
    const int64_t stride = int64_t(BYTES) * tokens;
    for (int32_t d = 0; d < width; ++d) {
        F key[VECTORS];
        SS_UNROLL
        for (int v = 0; v < VECTORS; ++v) key[v] = load_cached<BYTES>(keys[v] + d * stride);
        SS_UNROLL
        for (int n = 0; n < N; ++n) {
            const F q = splat(items.query[n][d]);
            SS_UNROLL
            for (int v = 0; v < VECTORS; ++v) s[VECTORS * n + v] = fma(q, key[v], s[VECTORS * n + v]);
        }
        fetch(ahead.first + d * ahead.stride);
        if (VECTORS > 2) fetch(ahead.second + d * ahead.second_stride);
        fetch(ahead.weights + d * ahead.weights_stride);
    }
    SS_UNROLL
    for (int n = 0; n < N; ++n)
        SS_UNROLL
        for (int v = 0; v < VECTORS; ++v) store(out[n] + 16 * v, s[VECTORS * n + v]);
}

// Adds weights times values at `count` positions of a page to columns [column, column + 16 * VECTORS). `next`: the
// values that come after these.
template <int BYTES, int N, int VECTORS>
inline void weigh(float (*weighted)[256], const float (*weights)[SEGMENT], const uint8_t *values, int32_t width,
                  int32_t count, int32_t column, const uint8_t *next, const uint8_t *upcoming) {
    F o[N * VECTORS];
    const int64_t step = upcoming == nullptr ? 0 : 64;
    if (upcoming == nullptr) upcoming = values;
    SS_UNROLL
    for (int n = 0; n < N; ++n)
        SS_UNROLL
        for (int v = 0; v < VECTORS; ++v) o[VECTORS * n + v] = load(weighted[n] + column + 16 * v);
    for (int32_t t = 0; t < count; ++t) {
        const int64_t at = int64_t(BYTES) * (int64_t(t) * width + column);
        F value[VECTORS];
        SS_UNROLL
        for (int v = 0; v < VECTORS; ++v) value[v] = load_cached<BYTES>(values + at + BYTES * 16 * v);
        SS_UNROLL
        for (int n = 0; n < N; ++n) {
            const F weight = splat(weights[n][t]);
            SS_UNROLL
            for (int v = 0; v < VECTORS; ++v) o[VECTORS * n + v] = fma(weight, value[v], o[VECTORS * n + v]);
        }
        fetch(next + at);
        fetch(upcoming + t * step);
    }
    SS_UNROLL
    for (int n = 0; n < N; ++n)
        SS_UNROLL
        for (int v = 0; v < VECTORS; ++v) store(weighted[n] + column + 16 * v, o[VECTORS * n + v]);
}

template <int BYTES, int N>
inline void weigh_all(float (*weighted)[256], const float (*weights)[SEGMENT], const uint8_t *values, int32_t width,
                      int32_t count, const uint8_t *next, Upcoming &upcoming) {
    int32_t column = 0;
    // With few items more columns at once, so that enough chains of additions run side by side.
    if constexpr (N <= 4 && MANY_REGISTERS)
        for (; column + 64 <= width; column += 64)
            weigh<BYTES, N, 4>(weighted, weights, values, width, count, column, next, upcoming.take(count));
    for (; column + 32 <= width; column += 32)
        weigh<BYTES, N, 2>(weighted, weights, values, width, count, column, next, upcoming.take(count));
    if (column < width) weigh<BYTES, N, 1>(weighted, weights, values, width, count, column, next, upcoming.take(count));
}

inline const uint8_t *page_head(const ss_program &p, const Instr &in, int32_t head, int32_t sequence, int32_t position) {
    const ss_batch &batch = p.step.batch;
    const int32_t page = batch.page_table[int64_t(sequence) * batch.table_stride + position / p.step.tokens];
    return place_of(p, in.cache, head, page * p.step.tokens).head;
}

// One segment's own maximum, sum and weighted values of N items -> the same fields of `part`.
template <int BYTES, int N>
void segment_of(const ss_program &p, const Instr &in, int32_t head, int32_t sequence, int32_t segment,
                const Items &items, float (*weighted)[256], float *maximum, float *sum, Upcoming &upcoming,
                const uint8_t *values_next) {
    const Cache &cache = p.caches[in.cache];
    const int32_t tokens = p.step.tokens, width = in.width, start = segment * SEGMENT;
    int32_t low = start + SEGMENT, high = start, common_low = start, common_high = start + SEGMENT;
    int32_t begin[N], end[N];
    for (int n = 0; n < N; ++n) {
        begin[n] = items.begin[n] > start ? items.begin[n] : start;
        end[n] = items.end[n] < start + SEGMENT ? items.end[n] : start + SEGMENT;
        if (begin[n] >= end[n]) begin[n] = end[n] = start;
        else {
            if (begin[n] < low) low = begin[n];
            if (end[n] > high) high = end[n];
        }
        if (begin[n] > common_low) common_low = begin[n];
        if (end[n] < common_high) common_high = end[n];
    }
    alignas(64) float s[N][SEGMENT];  // a chunk may go beyond `high`, never beyond the segment
    if (low >= high) {
        for (int n = 0; n < N; ++n) sum[n] = -1.0f;
        return;
    }
    const int64_t key_stride = int64_t(BYTES) * tokens;
    auto keys_at = [&](int32_t t) { return page_head(p, in, head, sequence, t) + int64_t(BYTES) * (t % tokens); };
    auto values_at = [&](int32_t t) {
        return page_head(p, in, head, sequence, t) + int64_t(BYTES) * width * (tokens + t % tokens);
    };
    const int32_t first = low & ~15, page_end = (first / tokens + 1) * tokens;
    for (int32_t d = 0; d < width; ++d) fetch(keys_at(first) + d * key_stride);
    if (N <= 4 && page_end < high)
        for (int32_t d = 0; d < width; ++d) fetch(keys_at(page_end) + d * key_stride);
    for (int32_t t = first; t < high;) {
        // Two vectors while a step's registers hold them; with few items more, to run enough chains side by side.
        const int32_t left = high - t;
        const int32_t room = start + SEGMENT - t;
        const int32_t vectors = !MANY_REGISTERS || left <= 16 ? 1 : N <= 4 && left > 32 && room >= 64 ? 4 : 2;
        const uint8_t *keys[4];
        for (int32_t v = 0; v < vectors; ++v) keys[v] = keys_at(t + 16 * v < high ? t + 16 * v : t);
        const int32_t next = t + 16 * vectors;
        Ahead ahead{keys[0], keys[0], upcoming.take(width), 0, 0, 64};
        if (ahead.weights == nullptr) ahead.weights = keys[0], ahead.weights_stride = 0;
        if (next < high) {
            ahead.first = keys_at(next), ahead.stride = key_stride;
            if (next + 32 < high) ahead.second = keys_at(next + 32), ahead.second_stride = key_stride;
        } else {
            ahead.first = values_at(low), ahead.stride = 64;
        }
        float(*out)[SEGMENT] = reinterpret_cast<float(*)[SEGMENT]>(&s[0][t - start]);
        if constexpr (MANY_REGISTERS) {
            if (vectors == 4) {
                if constexpr (N <= 4) scores<BYTES, N, 4>(items, keys, width, tokens, ahead, out);
            } else if (vectors == 2) {
                scores<BYTES, N, 2>(items, keys, width, tokens, ahead, out);
            }
        }
        if (vectors == 1) scores<BYTES, N, 1>(items, keys, width, tokens, ahead, out);
        t = next;
    }
    for (int n = 0; n < N; ++n) {
        maximum[n] = -INFINITY;
        sum[n] = -1.0f;
        if (begin[n] >= end[n]) continue;
        const int32_t from = (begin[n] - start) & ~15, to = end[n] - start;
        F best = splat(-INFINITY);
        for (int32_t t = from; t < to; t += 16) {
            F v = load(s[n] + t);
            if (BYTES == 1) {
                const int32_t position = start + t;
                uint8_t *page = const_cast<uint8_t *>(page_head(p, in, head, sequence, position));
                v = mul(v, load(scales_of(cache, page, tokens, false) + position % tokens));
            }
            v = keep_from(keep_first(v, to - t, splat(-INFINITY)), begin[n] - start - t, splat(-INFINITY));
            store(s[n] + t, v);
            best = max(v, best);
        }
        maximum[n] = fold_max(best);
        F total = splat(0.0f);
        const F most = splat(maximum[n]);
        for (int32_t t = from; t < to; t += 16) {
            F e = exp16(sub(load(s[n] + t), most));
            e = keep_from(keep_first(e, to - t, splat(0.0f)), begin[n] - start - t, splat(0.0f));
            total = add(total, e);
            if (BYTES == 1) {
                const int32_t position = start + t;
                uint8_t *page = const_cast<uint8_t *>(page_head(p, in, head, sequence, position));
                e = mul(e, load(scales_of(cache, page, tokens, true) + position % tokens));
            }
            store(s[n] + t, e);
        }
        sum[n] = fold_add(total);
        for (int32_t d = 0; d < width; d += 16) store(weighted[n] + d, splat(0.0f));
    }
    // What a row does not see may be anything, NaN too, so positions that not all items see are added item by item.
    auto alone = [&](int n, int32_t first, int32_t last) {
        for (int32_t t = first; t < last;) {
            const int32_t room = tokens - t % tokens, count = last - t < room ? last - t : room;
            const uint8_t *values = values_at(t);
            weigh_all<BYTES, 1>(weighted + n, reinterpret_cast<const float(*)[SEGMENT]>(&s[n][t - start]), values, width,
                                count, values, upcoming);
            t += count;
        }
    };
    if (common_low >= common_high) {
        for (int n = 0; n < N; ++n) alone(n, begin[n], end[n]);
        return;
    }
    for (int n = 0; n < N; ++n) alone(n, begin[n], common_low);
    for (int32_t t = common_low; t < common_high;) {
        const int32_t room = tokens - t % tokens, count = common_high - t < room ? common_high - t : room;
        const uint8_t *values = values_at(t), *next = t + count < common_high ? values_at(t + count) : values_next;
        if (next == nullptr) next = values;
        weigh_all<BYTES, N>(weighted, reinterpret_cast<const float(*)[SEGMENT]>(&s[0][t - start]), values, width, count,
                            next, upcoming);
        t += count;
    }
    for (int n = 0; n < N; ++n) alone(n, common_high, end[n]);
}

// How many of `left` items go together: numbers for which there is code.
inline int32_t items_at_once(int32_t left) {
    for (const int32_t count : {12, 8, 6, 4, 3, 2})
        if (count <= ITEMS && count <= left) return count;
    return 1;
}

template <int BYTES>
inline void segment_of_count(const ss_program &p, const Instr &in, int32_t head, int32_t sequence, int32_t segment,
                             const Items &items, float (*weighted)[256], float *maximum, float *sum, Upcoming &upcoming,
                const uint8_t *values_next) {
#define SS_CASE(N) \
    case N:        \
        if constexpr (N <= ITEMS) segment_of<BYTES, N>(p, in, head, sequence, segment, items, weighted, maximum, sum, upcoming, values_next); \
        return
    switch (items.count) {
        SS_CASE(1);
        SS_CASE(2);
        SS_CASE(3);
        SS_CASE(4);
        SS_CASE(6);
        SS_CASE(8);
        SS_CASE(12);
    }
#undef SS_CASE
}

// Joins a segment's (m, l, o) to what the segments before it gave.
inline void fold_segment(float &maximum, float &sum, float *weighted, float m, float l, const float *o, int32_t width) {
    if (l < 0) return;
    if (sum < 0) {
        maximum = m;
        sum = l;
        memcpy(weighted, o, size_t(width) * 4);
        return;
    }
    const float highest = maximum > m ? maximum : m;
    float exps[16] = {maximum - highest, m - highest};
    store(exps, exp16(load(exps)));
    const float a = exps[0], b = exps[1];
    sum = __builtin_fmaf(sum, a, l * b);
    for (int32_t d = 0; d < width; d += 16)
        store(weighted + d, fma(load(weighted + d), splat(a), mul(load(o + d), splat(b))));
    maximum = highest;
}

// Some items from number `first` on of a tile's rows times the heads of a group; row-major.
inline void take_items(const ss_program &p, const Instr &in, const RowTile &tile, int32_t head, int32_t first,
                       Items &items) {
    const int32_t per_group = in.heads / in.kv_heads, all = tile.count * per_group;
    items.count = items_at_once(all - first);
    for (int32_t n = 0; n < items.count; ++n) {
        const int32_t row = (first + n) / per_group, h = head * per_group + (first + n) % per_group;
        const float *query = p.buffers[in.query].row<float>(tile.first + row) + h * in.width;
        for (int32_t d = 0; d < in.width; d += 16) store(items.query[n] + d, mul(load(query + d), splat(in.scale)));
        const int32_t position = tile.position + row;
        items.end[n] = position + 1;
        items.begin[n] = in.window > 0 && position >= in.window ? position - in.window + 1 : 0;
        items.sum[n] = -1.0f;
        items.maximum[n] = -INFINITY;
    }
}

inline void compute_segment(const ss_program &p, const Instr &in, int32_t head, int32_t sequence, int32_t segment,
                            const Items &items, float (*weighted)[256], float *maximum, float *sum, Upcoming &upcoming,
                const uint8_t *values_next) {
    if (p.caches[in.cache].int8)
        segment_of_count<1>(p, in, head, sequence, segment, items, weighted, maximum, sum, upcoming, values_next);
    else
        segment_of_count<2>(p, in, head, sequence, segment, items, weighted, maximum, sum, upcoming, values_next);
}

inline float *attention_row(ss_program &p, const Instr &in, int32_t row) {
    const Buffer &out = p.buffers[in.out];
    return out.q8 ? p.step.mixed.data() + int64_t(row) * p.most_heads_width : out.row<float>(row);
}

inline void finish_item(float *out, const float *weighted, float sum, int32_t width) {
    const F inverse = splat(1.0f / sum);
    for (int32_t d = 0; d < width; d += 16) store(out + d, mul(load(weighted + d), inverse));
}

// Where a split segment's result lies: for item n of a tile, maximum, sum, weighted values.
inline float *partial_of(ss_program &p, const Instr &in, int32_t segment, int32_t head, int32_t item) {
    const int64_t per_head = int64_t(p.most_items) * (2 + 256);
    return p.step.partials.data() + (int64_t(segment) * in.kv_heads + head) * per_head + int64_t(item) * (2 + 256);
}

inline void run_attend(ss_program &p, const Instr &in, int32_t piece, Crew crew) {
    Step &step = p.step;
    Upcoming &upcoming = upcoming_of(p, in, crew);
    const int32_t per_group = in.heads / in.kv_heads, head = piece % in.kv_heads;
    int32_t index = piece / in.kv_heads, segment = -1;
    if (step.split) {
        const int32_t global = index;
        index = 0;
        while (step.first_segment[index + 1] <= global) ++index;
        segment = global - step.first_segment[index];
    }
    const RowTile &tile = step.tiles[index];
    // The next head's keys lie behind this head's values; behind the last head it is another tile's turn.
    const bool same_tile = head + 1 < in.kv_heads;
    const int32_t next_index = same_tile || index + 1 >= int32_t(step.tiles.size()) ? index : index + 1;
    const RowTile &next_tile = step.tiles[next_index];
    const int32_t begin = in.window > 0 && next_tile.position >= in.window ? next_tile.position - in.window + 1 : 0;
    const uint8_t *values_next =
        segment >= 0 ? nullptr : page_head(p, in, same_tile ? head + 1 : 0, next_tile.sequence, begin);
    float weighted[ITEMS][256], maximum[ITEMS], sum[ITEMS];
    Items items;
    for (int32_t first = 0; first < tile.count * per_group; first += items.count) {
        take_items(p, in, tile, head, first, items);
        if (segment >= 0) {
            compute_segment(p, in, head, tile.sequence, segment, items, weighted, maximum, sum, upcoming, values_next);
            for (int32_t n = 0; n < items.count; ++n) {
                float *out = partial_of(p, in, step.first_segment[index] + segment, head, first + n);
                out[0] = maximum[n];
                out[1] = sum[n];
                if (sum[n] >= 0 || sum[n] != sum[n]) memcpy(out + 2, weighted[n], size_t(in.width) * 4);
            }
            continue;
        }
        const int32_t last = items.end[items.count - 1];
        for (int32_t s = items.begin[0] / SEGMENT; s * SEGMENT < last; ++s) {
            compute_segment(p, in, head, tile.sequence, s, items, weighted, maximum, sum, upcoming, values_next);
            for (int32_t n = 0; n < items.count; ++n)
                fold_segment(items.maximum[n], items.sum[n], items.weighted[n], maximum[n], sum[n], weighted[n],
                             in.width);
        }
        for (int32_t n = 0; n < items.count; ++n) {
            const int32_t row = tile.first + (first + n) / per_group;
            const int32_t h = head * per_group + (first + n) % per_group;
            finish_item(attention_row(p, in, row) + h * in.width, items.weighted[n], items.sum[n], in.width);
        }
    }
}

inline void merge_tile(ss_program &p, const Instr &in, int32_t index) {
    Step &step = p.step;
    const RowTile &tile = step.tiles[index];
    const int32_t per_group = in.heads / in.kv_heads;
    const Buffer &out = p.buffers[in.out];
    for (int32_t r = 0; r < tile.count; ++r) {
        float *row = attention_row(p, in, tile.first + r);
        for (int32_t h = 0; step.split && h < in.heads; ++h) {
            float maximum = -INFINITY, sum = -1.0f, weighted[256];
            for (int32_t s = step.first_segment[index]; s < step.first_segment[index + 1]; ++s) {
                const float *part = partial_of(p, in, s, h / per_group, r * per_group + h % per_group);
                fold_segment(maximum, sum, weighted, part[0], part[1], part + 2, in.width);
            }
            finish_item(row + h * in.width, weighted, sum, in.width);
        }
        if (out.q8) quantise_row(row, out.width, out.row<Q8Block>(tile.first + r));
    }
}

inline void run_attend_merge(ss_program &p, const Instr &in, int32_t piece) {
    if (merges_apart(p)) return merge_tile(p, in, piece);
    for (int32_t index = 0; index < int32_t(p.step.tiles.size()); ++index) merge_tile(p, in, index);
}
