// The passes of sample_kernels.h over sixteen lanes. Included once per instruction set, inside its namespace, behind its
// lanes_*.h and the further functions that sample.cpp gives each set. Values that do not fill a vector are followed by
// -inf, which weighs nothing and never wins.

#include "exp_impl.h"

inline F load_row(const float *x, int32_t left) {
    return left >= 16 ? load(x) : keep_first(load_n(x, left), left, splat(-INFINITY));
}

inline bool scan(const float *x, int32_t n, float *groups, float *largest) {
    F top = splat(-INFINITY);
    bool sound = true;
    for (int32_t k = 0; k < n;) {
        F group = splat(-INFINITY);
        const int32_t end = n - k < 16 * GROUP_DEPTH ? n : k + 16 * GROUP_DEPTH;
        uint32_t fine = 0xFFFF;
        for (; k < end; k += 16) {
            const F v = load_row(x + k, n - k);
            fine &= less_bits(v, splat(INFINITY));
            group = max(v, group);
        }
        sound &= fine == 0xFFFF;
        store(groups, group);
        groups += 16;
        top = max(group, top);
    }
    float lanes[16];
    store(lanes, top);
    *largest = lanes[0];
    for (int i = 1; i < 16; ++i) *largest = lanes[i] > *largest ? lanes[i] : *largest;
    return sound;
}

inline int32_t find(const float *x, int32_t n, float value) {
    for (int32_t k = 0; k < n; k += 16) {
        const uint32_t found = at_least_bits(load_row(x + k, n - k), splat(value));
        if (found) return k + __builtin_ctz(found);
    }
    return n;
}

inline void weigh(const float *x, int32_t n, float best, float temperature, const float *cuts, int64_t *sums,
                  int32_t *counts) {
    Weights all{}, above[CUTS]{};
    const F weightless = splat(best + WEIGHTLESS * temperature), zero = splat(0.0f), divisor = splat(temperature);
    const F highest = splat(best);
    for (int i = 0; i < CUTS; ++i) counts[i] = 0;
    for (int32_t k = 0; k < n; k += 16) {
        const F v = load_row(x + k, n - k);
        if (!at_least_bits(v, weightless)) continue;
        F logit = sub(v, highest);
        if (temperature != 1.0f) logit = div(logit, divisor);
        const F e = exp16(logit);
        add_weights(all, e);
        for (int i = CUTS - 1; i >= 0; --i) {
            const F cut = splat(cuts[i]);
            const uint32_t found = at_least_bits(v, cut);
            if (!found) break;
            add_weights(above[i], pick_less(v, cut, zero, e));
            counts[i] += __builtin_popcount(found);
        }
    }
    for (int i = 0; i < CUTS; ++i) sums[i] = total(above[i]);
    sums[CUTS] = total(all);
}

inline int32_t gather(const float *x, int32_t n, float cut, float end, const float *groups, int32_t *places) {
    int32_t count = 0;
    const F least = splat(cut), beyond = splat(end);
    for (int32_t begin = 0; begin < n; begin += 16 * GROUP_DEPTH, groups += 16) {
        if (!at_least_bits(load(groups), least)) continue;
        const int32_t stop = n - begin < 16 * GROUP_DEPTH ? n : begin + 16 * GROUP_DEPTH;
        for (int32_t k = begin; k < stop; k += 16) {
            const F v = load_row(x + k, n - k);
            uint32_t found = at_least_bits(v, least) & less_bits(v, beyond);
            for (; found; found &= found - 1) places[count++] = k + __builtin_ctz(found);
        }
    }
    return count;
}

inline void exps(const float *x, int32_t count, float *out) {
    for (int32_t k = 0; k < count; k += 16) store(out + k, exp16(load_row(x + k, count - k)));
}

inline int32_t count_above(const float *x, int32_t n, float value) {
    int32_t count = 0;
    for (int32_t k = 0; k < n; k += 16) count += __builtin_popcount(less_bits(splat(value), load_row(x + k, n - k)));
    return count;
}

template <int N> inline I mixed(I x) { return ixor(x, shift_right<N>(x)); }

inline I finalised(I x) {
    x = imul(mixed<16>(x), isplat(int32_t(FIRST)));
    return mixed<15>(imul(mixed<15>(x), isplat(int32_t(SECOND))));
}

inline Best draw(const float *x, int32_t n, float best, float temperature, float least, uint32_t key0, uint32_t key1,
                 Best known) {
    const F floor = splat(least);
    const F highest = splat(best), divisor = splat(temperature), log_2 = splat(LOG_2);
    I ids = iadd(lane_numbers(), isplat(int32_t(key0)));
    F bar = splat(known.score - SLACK);
    for (int32_t k = 0; k < n; k += 16, ids = iadd(ids, isplat(16))) {
        F logit = sub(load_row(x + k, n - k), highest);
        if (temperature != 1.0f) logit = div(logit, divisor);
        const I hashed = finalised(ixor(finalised(ids), isplat(int32_t(key1))));
        // Noise is at most -log(u), and that at most as many log(2) as the hash has leading zeros, plus one.
        const F exponent = to_float(shift_right<23>(bits_of(to_float(shift_right<1>(hashed)))));
        uint32_t able = at_least_bits(fma(sub(splat(158.0f), exponent), log_2, logit), bar);
        able &= at_least_bits(logit, floor);
        if (!able) continue;
        float logits[16];
        int32_t hashes[16];
        store(logits, logit);
        store_ints(hashes, hashed);
        for (; able; able &= able - 1) {
            const int32_t lane = __builtin_ctz(able);
            const float score = score_of(logits[lane], uint32_t(hashes[lane]));
            if (score > known.score || (score == known.score && k + lane < known.token)) {
                known = {score, k + lane};
                bar = splat(score - SLACK);
            }
        }
    }
    return known;
}

const SampleKernels KERNELS = {scan, find, weigh, gather, exps, count_above, draw};
