// The kernels for AVX-512 with VNNI.

#include <math.h>
#include <string.h>

#include <cmath>

#include "kernels.h"
#include "scalar.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Not a compiler flag: one build holds all instruction sets, and only this file's functions may use these.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

// Loops over registers must be unrolled before the compiler decides what lives in memory.
#define SS_UNROLL _Pragma("GCC unroll 64")

namespace ss {

namespace {

namespace avx512 {

#include "lanes_avx512.h"

#include "kernels_impl.h"

}  // namespace avx512

}  // namespace

const ss_kernels AVX512_KERNELS = {avx512::run};

}  // namespace ss

#pragma GCC pop_options
#endif
