// Sixteen lanes in plain C++. What the other instruction sets compute in one go, written out: the specification.
// No include guard: included once per instruction set, inside its namespace.

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };

#define SS_EACH for (int i = 0; i < 16; ++i)

inline F load(const float *p) { F r; SS_EACH r.v[i] = p[i]; return r; }
inline F load_n(const float *p, int n) { F r; SS_EACH r.v[i] = i < n ? p[i] : 0.0f; return r; }
inline void store(float *p, F a) { SS_EACH p[i] = a.v[i]; }
inline void store_n(float *p, F a, int n) { SS_EACH if (i < n) p[i] = a.v[i]; }
inline F splat(float x) { F r; SS_EACH r.v[i] = x; return r; }
inline F add(F a, F b) { F r; SS_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
inline F sub(F a, F b) { F r; SS_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
inline F mul(F a, F b) { F r; SS_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
inline F div(F a, F b) { F r; SS_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
inline F fma(F a, F b, F c) { F r; SS_EACH r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return r; }
inline F neg(F a) { F r; SS_EACH r.v[i] = -a.v[i]; return r; }
inline F max(F a, F b) { F r; SS_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }  // b where one is NaN
inline F min(F a, F b) { F r; SS_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
inline F pick_less(F a, F b, F yes, F no) { F r; SS_EACH r.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; return r; }
inline F pick_nan(F a, F yes, F no) { F r; SS_EACH r.v[i] = a.v[i] != a.v[i] ? yes.v[i] : no.v[i]; return r; }
inline F keep_first(F a, int n, F other) { F r; SS_EACH r.v[i] = i < n ? a.v[i] : other.v[i]; return r; }
inline F keep_from(F a, int n, F other) { F r; SS_EACH r.v[i] = i >= n ? a.v[i] : other.v[i]; return r; }

// To the nearest, ties to even. Where the value does not fit the result does not matter.
inline int32_t nearest(float x) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23
    if (!(x > -4.0e6f && x < 4.0e6f)) return INT32_MIN;
    return int32_t((x + rounder) - rounder);
}
inline I to_int(F a) { I r; SS_EACH r.v[i] = nearest(a.v[i]); return r; }
inline F to_float(I a) { F r; SS_EACH r.v[i] = float(a.v[i]); return r; }
inline I isplat(int32_t x) { I r; SS_EACH r.v[i] = x; return r; }
inline I iadd(I a, I b) { I r; SS_EACH r.v[i] = int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i])); return r; }
template <int N> inline I shift_left(I a) { I r; SS_EACH r.v[i] = int32_t(uint32_t(a.v[i]) << N); return r; }
inline F times_power(F a, I n) {  // a * 2^n for normal results
    F r;
    SS_EACH {
        uint32_t bits;
        memcpy(&bits, &a.v[i], 4);
        bits += uint32_t(n.v[i]) << 23;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline I magnitude(F a) { I r; memcpy(&r, &a, 64); SS_EACH r.v[i] &= 0x7FFFFFFF; return r; }
inline I umax(I a, I b) { I r; SS_EACH r.v[i] = uint32_t(a.v[i]) > uint32_t(b.v[i]) ? a.v[i] : b.v[i]; return r; }
inline void store_bytes(int8_t *p, I a) { SS_EACH p[i] = int8_t(a.v[i]); }  // of values that fit
struct Sums { int32_t low, high; };
// Stores 32 values that fit in bytes, and sums either half.
inline Sums store_both(int8_t *p, I low, I high) {
    Sums sums = {0, 0};
    SS_EACH p[i] = int8_t(low.v[i]), sums.low += low.v[i];
    SS_EACH p[16 + i] = int8_t(high.v[i]), sums.high += high.v[i];
    return sums;
}

inline float fold_add(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
    return a.v[0];
}
inline float fold_max(F a) {  // of values without NaN
    float r = a.v[0];
    SS_EACH if (a.v[i] > r) r = a.v[i];
    return r;
}
inline uint32_t fold_umax(I a) {
    uint32_t r = 0;
    SS_EACH if (uint32_t(a.v[i]) > r) r = uint32_t(a.v[i]);
    return r;
}

inline F load_bf16(const uint16_t *p) {
    F r;
    SS_EACH {
        const uint32_t bits = uint32_t(p[i]) << 16;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline F load_f16(const uint16_t *p) { F r; SS_EACH r.v[i] = half_to_float(p[i]); return r; }
inline F load_u8(const uint8_t *p) { F r; SS_EACH r.v[i] = float(p[i]); return r; }
inline F load_i8(const int8_t *p) { F r; SS_EACH r.v[i] = float(p[i]); return r; }
inline void store_bf16(uint16_t *p, F a) { SS_EACH p[i] = float_to_bf16(a.v[i]); }

inline B load_b(const uint8_t *p) { B r; memcpy(&r, p, 64); return r; }
inline B low_nibbles(B a) { B r; for (int i = 0; i < 64; ++i) r.v[i] = a.v[i] & 15; return r; }
inline B high_nibbles(B a) { B r; for (int i = 0; i < 64; ++i) r.v[i] = a.v[i] >> 4; return r; }
template <int N> inline B two_bits(B a) {  // bits 2N and 2N+1 of each byte, times 16
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = uint8_t(((a.v[i] >> (2 * N)) & 3) << 4);
    return r;
}
inline B bor(B a, B b) { B r; for (int i = 0; i < 64; ++i) r.v[i] = a.v[i] | b.v[i]; return r; }
// sum + the four products of a lane's bytes with x[0..3], as whole numbers
inline I dot4(I sum, B a, const int8_t *x) {
    SS_EACH for (int k = 0; k < 4; ++k) sum.v[i] += int32_t(a.v[4 * i + k]) * x[k];
    return sum;
}
inline void fetch(const void *) {}

constexpr int GROUP = 2;  // rows that share a pass over two tiles of weights
constexpr bool MANY_REGISTERS = false;

#undef SS_EACH
