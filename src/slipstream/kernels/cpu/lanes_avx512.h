// Sixteen lanes in AVX-512 with VNNI. See lanes_portable.h for what each function computes.
// No include guard: included once per instruction set, inside its namespace.

struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };

inline F load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline F load_n(const float *p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline void store(float *p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float *p, F a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
inline F splat(float x) { return {_mm512_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F neg(F a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F pick_less(F a, F b, F yes, F no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline F pick_nan(F a, F yes, F no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), no.v, yes.v)};
}
inline F keep_first(F a, int n, F other) {
    return {_mm512_mask_blend_ps(__mmask16(n >= 16 ? 0xFFFF : (1u << (n < 0 ? 0 : n)) - 1), other.v, a.v)};
}
inline F keep_from(F a, int n, F other) {
    return {_mm512_mask_blend_ps(__mmask16(n >= 16 ? 0xFFFF : (1u << (n < 0 ? 0 : n)) - 1), a.v, other.v)};
}

inline I to_int(F a) { return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I isplat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
template <int N> inline I shift_left(I a) { return {N == 0 ? a.v : _mm512_slli_epi32(a.v, N)}; }
inline F times_power(F a, I n) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
inline I magnitude(F a) { return {_mm512_and_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF))}; }
inline I umax(I a, I b) { return {_mm512_max_epu32(a.v, b.v)}; }
inline void store_bytes(int8_t *p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a.v));
}

struct Sums { int32_t low, high; };
inline Sums store_both(int8_t *p, I low, I high) {
    const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high.v), _mm512_cvtepi32_epi8(low.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), bytes);
    // Sums of eight unsigned bytes each, of the values plus 128.
    const __m256i above = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    const __m256i eights = _mm256_sad_epu8(above, _mm256_setzero_si256());
    const __m256i pairs = _mm256_add_epi64(eights, _mm256_shuffle_epi32(eights, 0x4E));
    return {_mm256_extract_epi32(pairs, 0) - 2048, _mm256_extract_epi32(pairs, 4) - 2048};
}

inline float fold_add(F a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float fold_max(F a) { return _mm512_reduce_max_ps(a.v); }
inline uint32_t fold_umax(I a) {
    const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xB1))));
}

inline F load_bf16(const uint16_t *p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F load_f16(const uint16_t *p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
inline F load_u8(const uint8_t *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
}
inline F load_i8(const int8_t *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
}
inline void store_bf16(uint16_t *p, F a) {
    // Round to nearest even by adding half of the last kept place; a NaN keeps its top bits and stays one.
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

inline B load_b(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
inline B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline B high_nibbles(B a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
template <int N> inline B two_bits(B a) {
    const __m512i moved = N == 0   ? _mm512_slli_epi16(a.v, 4)
                          : N == 1 ? _mm512_slli_epi16(a.v, 2)
                          : N == 2 ? a.v
                                   : _mm512_srli_epi16(a.v, 2);
    return {_mm512_and_si512(moved, _mm512_set1_epi8(0x30))};
}
inline B bor(B a, B b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I dot4(I sum, B a, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return {_mm512_dpbusd_epi32(sum.v, a.v, _mm512_set1_epi32(four))};
}
inline void fetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

constexpr int GROUP = 4;  // rows that share a pass over two tiles of weights
constexpr bool MANY_REGISTERS = true;
