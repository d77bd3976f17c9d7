#include "scalar.h"

#include <math.h>

namespace ss {

SinCos sin_cos(float angle) {
    const double a = angle;
    const double n = rint(a * 0.6366197723675814);
    double r = fma(-n, 1.5707963267948966, a);
    r = fma(-n, 6.123233995736766e-17, r);
    const double z = r * r;
    // Taylor's series; on [-pi/4, pi/4] the first term left out is beneath 1e-15.
    double s = -1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    const double sine = r + r * z * s;
    double c = 1.0 / 20922789888000.0;
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 1.0 / 2.0;
    const double cosine = 1.0 + z * c;
    switch (int64_t(n) & 3) {
        case 0: return {float(sine), float(cosine)};
        case 1: return {float(cosine), float(-sine)};
        case 2: return {float(-sine), float(-cosine)};
        default: return {float(-cosine), float(sine)};
    }
}

}  // namespace ss
