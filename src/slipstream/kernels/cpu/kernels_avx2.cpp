// The kernels for AVX2 with FMA and F16C.

#include <math.h>
#include <string.h>

#include <cmath>

#include "kernels.h"
#include "scalar.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Not a compiler flag: one build holds all instruction sets, and only this file's functions may use these.
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

// Loops over registers must be unrolled before the compiler decides what lives in memory.
#define SS_UNROLL _Pragma("GCC unroll 64")

namespace ss {

namespace {

namespace avx2 {

#include "lanes_avx2.h"

#include "kernels_impl.h"

}  // namespace avx2

}  // namespace

const ss_kernels AVX2_KERNELS = {avx2::run};

}  // namespace ss

#pragma GCC pop_options
#endif
