// Sixteen lanes in AVX2 with FMA and F16C, as two halves. See lanes_portable.h for what each function computes.
// No include guard: included once per instruction set, inside its namespace.

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };

inline __m256i lanes_below(int n) {  // all ones in the first n of 8 lanes
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load_n(const float *p, int n) {
    return {_mm256_maskload_ps(p, lanes_below(n)), _mm256_maskload_ps(p + 8, lanes_below(n - 8))};
}
inline void store(float *p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline void store_n(float *p, F x, int n) {
    _mm256_maskstore_ps(p, lanes_below(n), x.a), _mm256_maskstore_ps(p + 8, lanes_below(n - 8), x.b);
}
inline F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F neg(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
}
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F pick_less(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline F pick_nan(F x, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
inline F keep_first(F x, int n, F other) {
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(lanes_below(n))),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(lanes_below(n - 8)))};
}
inline F keep_from(F x, int n, F other) { return keep_first(other, n, x); }

inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I isplat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
template <int N> inline I shift_left(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
inline F times_power(F x, I n) {
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), _mm256_slli_epi32(n.a, 23))),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.b), _mm256_slli_epi32(n.b, 23)))};
}
inline I magnitude(F x) {
    const __m256i rest = _mm256_set1_epi32(0x7FFFFFFF);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), rest), _mm256_and_si256(_mm256_castps_si256(x.b), rest)};
}
inline I umax(I x, I y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
inline __m128i narrowed(__m256i x) {  // the low 16 bits of 8 numbers that fit in them
    const __m256i pairs = _mm256_packs_epi32(x, x);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}
inline void store_bytes(int8_t *p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(narrowed(x.a), narrowed(x.b)));
}

struct Sums { int32_t low, high; };
inline Sums store_both(int8_t *p, I low, I high) {
    const __m128i first = _mm_packs_epi16(narrowed(low.a), narrowed(low.b));
    const __m256i bytes = _mm256_set_m128i(_mm_packs_epi16(narrowed(high.a), narrowed(high.b)), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), bytes);
    const __m256i above = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    const __m256i eights = _mm256_sad_epu8(above, _mm256_setzero_si256());
    const __m256i pairs = _mm256_add_epi64(eights, _mm256_shuffle_epi32(eights, 0x4E));
    return {_mm256_extract_epi32(pairs, 0) - 2048, _mm256_extract_epi32(pairs, 4) - 2048};
}

inline float fold_add(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float fold_max(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline uint32_t fold_umax(I x) {
    const __m256i eight = _mm256_max_epu32(x.a, x.b);
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xB1))));
}
inline __m128i half(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
inline F load_bf16(const uint16_t *p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(p + 8)), 16))};
}
inline F load_f16(const uint16_t *p) { return {_mm256_cvtph_ps(half(p)), _mm256_cvtph_ps(half(p + 8))}; }
inline F load_u8(const uint8_t *p) {
    const __m128i x = half(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F load_i8(const int8_t *p) {
    const __m128i x = half(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline __m256i bf16_bits(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
}
inline void store_bf16(uint16_t *p, F x) {
    const __m256i both = _mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permute4x64_epi64(both, 0xD8));
}

inline B load_b(const uint8_t *p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 32))};
}
inline B low_nibbles(B x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline B high_nibbles(B x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
template <int N> inline __m256i two_bits_half(__m256i x) {
    const __m256i moved = N == 0   ? _mm256_slli_epi16(x, 4)
                          : N == 1 ? _mm256_slli_epi16(x, 2)
                          : N == 2 ? x
                                   : _mm256_srli_epi16(x, 2);
    return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
}
template <int N> inline B two_bits(B x) { return {two_bits_half<N>(x.a), two_bits_half<N>(x.b)}; }
inline B bor(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline __m256i dot4_half(__m256i sum, __m256i x, __m256i y) {
    // Even and odd bytes apart, in 16 bits: the instruction that adds products of bytes saturates.
    const __m256i low = _mm256_set1_epi16(0xFF);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, low), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline I dot4(I sum, B x, const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    const __m256i y = _mm256_set1_epi32(four);
    return {dot4_half(sum.a, x.a, y), dot4_half(sum.b, x.b, y)};
}
inline void fetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

constexpr int GROUP = 2;  // rows that share a pass over two tiles of weights
constexpr bool MANY_REGISTERS = false;
