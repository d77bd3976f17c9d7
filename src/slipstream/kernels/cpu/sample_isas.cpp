// The passes of sampling for each instruction set.

#include <math.h>
#include <string.h>

#include <cmath>

#include "sample_kernels.h"
#include "scalar.h"

namespace ss {

extern const SampleKernels PORTABLE_SAMPLING;
#if defined(__x86_64__)
extern const SampleKernels AVX2_SAMPLING, AVX512_SAMPLING;
#endif

namespace {

namespace portable {

#include "lanes_portable.h"

#define SS_EACH for (int i = 0; i < 16; ++i)
inline uint32_t less_bits(F a, F b) { uint32_t r = 0; SS_EACH r |= uint32_t(a.v[i] < b.v[i]) << i; return r; }
inline uint32_t at_least_bits(F a, F b) { uint32_t r = 0; SS_EACH r |= uint32_t(a.v[i] >= b.v[i]) << i; return r; }
inline I imul(I a, I b) { I r; SS_EACH r.v[i] = int32_t(uint32_t(a.v[i]) * uint32_t(b.v[i])); return r; }
inline I ixor(I a, I b) { I r; SS_EACH r.v[i] = a.v[i] ^ b.v[i]; return r; }
template <int N> inline I shift_right(I a) { I r; SS_EACH r.v[i] = int32_t(uint32_t(a.v[i]) >> N); return r; }
inline I bits_of(F a) { I r; memcpy(&r, &a, 64); return r; }
inline I lane_numbers() { I r; SS_EACH r.v[i] = i; return r; }
inline void store_ints(int32_t *p, I a) { memcpy(p, &a, 64); }
struct Weights { int64_t sum; };
// Of values from 0 to 1, in units of 2^-40, cut to whole numbers.
inline void add_weights(Weights &w, F e) { SS_EACH w.sum += int64_t(e.v[i] * 0x1p40f); }
inline int64_t total(Weights w) { return w.sum; }
#undef SS_EACH

#include "sample_impl.h"

}  // namespace portable

}  // namespace

const SampleKernels PORTABLE_SAMPLING = portable::KERNELS;

}  // namespace ss

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,popcnt")

namespace ss {

namespace {

namespace avx2 {

#include "lanes_avx2.h"

inline uint32_t both_bits(__m256 a, __m256 b) {
    return uint32_t(_mm256_movemask_ps(a)) | uint32_t(_mm256_movemask_ps(b)) << 8;
}
inline uint32_t less_bits(F x, F y) {
    return both_bits(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ));
}
inline uint32_t at_least_bits(F x, F y) {
    return both_bits(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
inline I imul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N> inline I shift_right(I x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
inline I bits_of(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline I lane_numbers() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline void store_ints(int32_t *p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + 8), x.b);
}
struct Weights { __m256i sum = _mm256_setzero_si256(); };
inline void add_four(Weights &w, __m128i bits) {
    // The significand, moved so that exponent 0 is 2^40, then down by what the exponent is below 0.
    const __m128i significand =
        _mm_or_si128(_mm_and_si128(bits, _mm_set1_epi32(0x7FFFFF)), _mm_set1_epi32(0x800000));
    const __m128i below = _mm_sub_epi32(_mm_set1_epi32(127), _mm_srli_epi32(bits, 23));
    const __m256i whole = _mm256_slli_epi64(_mm256_cvtepu32_epi64(significand), 17);
    w.sum = _mm256_add_epi64(w.sum, _mm256_srlv_epi64(whole, _mm256_cvtepu32_epi64(below)));
}
inline void add_weights(Weights &w, F e) {
    const __m256i a = _mm256_castps_si256(e.a), b = _mm256_castps_si256(e.b);
    add_four(w, _mm256_castsi256_si128(a));
    add_four(w, _mm256_extracti128_si256(a, 1));
    add_four(w, _mm256_castsi256_si128(b));
    add_four(w, _mm256_extracti128_si256(b, 1));
}
inline int64_t total(Weights w) {
    int64_t four[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(four), w.sum);
    return four[0] + four[1] + four[2] + four[3];
}

#include "sample_impl.h"

}  // namespace avx2

}  // namespace

const SampleKernels AVX2_SAMPLING = avx2::KERNELS;

}  // namespace ss

#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,popcnt")

namespace ss {

namespace {

namespace avx512 {

#include "lanes_avx512.h"

inline uint32_t less_bits(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline uint32_t at_least_bits(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline I imul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I ixor(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N> inline I shift_right(I a) { return {_mm512_srli_epi32(a.v, N)}; }
inline I bits_of(F a) { return {_mm512_castps_si512(a.v)}; }
inline I lane_numbers() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline void store_ints(int32_t *p, I a) { _mm512_storeu_si512(p, a.v); }
struct Weights { __m512i sum = _mm512_setzero_si512(); };
inline void add_weights(Weights &w, F e) {
    const __m512 units = _mm512_mul_ps(e.v, _mm512_set1_ps(0x1p40f));
    w.sum = _mm512_add_epi64(w.sum, _mm512_cvttps_epi64(_mm512_castps512_ps256(units)));
    w.sum = _mm512_add_epi64(w.sum, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(units, 1)));
}
inline int64_t total(Weights w) { return _mm512_reduce_add_epi64(w.sum); }

#include "sample_impl.h"

}  // namespace avx512

}  // namespace

const SampleKernels AVX512_SAMPLING = avx512::KERNELS;

}  // namespace ss

#pragma GCC pop_options
#endif
