// Scalar conversions and functions that every instruction set shares as they are.
#pragma once

#include <stdint.h>
#include <string.h>

namespace ss {

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7FFF;
    uint32_t bits;
    if (rest >= 0x7C00) bits = sign | 0x7F800000 | (uint32_t(rest & 0x3FF) << 13) | (rest > 0x7C00 ? 0x400000 : 0);
    else if (rest >= 0x0400) bits = sign | ((rest << 13) + (uint32_t(112) << 23));
    else {
        // A denormal half is rest * 2^-24, exactly.
        const float value = float(rest) * 5.9604644775390625e-8f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return uint16_t((bits | 0x400000) >> 16);
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

struct SinCos {
    float sin, cos;
};

// In double precision, so that the results are the nearest float32 but for rare ties, for angles up to some millions.
SinCos sin_cos(float angle);

}  // namespace ss
