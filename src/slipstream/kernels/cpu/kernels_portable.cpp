// The kernels for any processor.

#include <math.h>
#include <string.h>

#include <cmath>

#include "kernels.h"
#include "scalar.h"

#define SS_UNROLL  // here lanes live in memory

namespace ss {

namespace {

namespace portable {

#include "lanes_portable.h"

#include "kernels_impl.h"

}  // namespace portable

}  // namespace

const ss_kernels PORTABLE_KERNELS = {portable::run};

}  // namespace ss
