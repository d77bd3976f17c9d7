// What sampling needs of an instruction set: passes over whole rows. All give the same bits.
#pragma once

#include <stdint.h>

namespace ss {

constexpr int32_t GROUP_DEPTH = 16;  // vectors whose elements in one lane make a group
constexpr int32_t CUTS = 6;

struct Best {
    float score;
    int32_t token;
};

struct SampleKernels {
    // The largest of x, and of each of its groups (`ss::groups_of(n)` of them). False: some value is NaN or +inf.
    bool (*scan)(const float *x, int32_t n, float *groups, float *largest);
    // The first place of `value` in x; n if there is none.
    int32_t (*find)(const float *x, int32_t n, float value);
    // Sums of weights of (x - best) / temperature: of x at least cuts[i] (falling), of all in sums[CUTS]; and their number.
    void (*weigh)(const float *x, int32_t n, float best, float temperature, const float *cuts, int64_t *sums,
                  int32_t *counts);
    // Places where x is at least `cut` (finite) and below `end`, ascending -> how many. `groups` are from `scan`.
    int32_t (*gather)(const float *x, int32_t n, float cut, float end, const float *groups, int32_t *places);
    // exp of `count` values; both arrays have room up to the next multiple of 16.
    void (*exps)(const float *x, int32_t count, float *out);
    int32_t (*count_above)(const float *x, int32_t n, float value);
    // The best of (x - best) / temperature plus noise where the former is at least `least`, and of `known`.
    Best (*draw)(const float *x, int32_t n, float best, float temperature, float least, uint32_t key0, uint32_t key1,
                 Best known);
};

// logit + Gumbel noise of a hash; the only logarithms of a draw.
float score_of(float logit, uint32_t hashed);

constexpr uint32_t FIRST = 0x21F0AAAD, SECOND = 0x735A2D97;
constexpr float LOG_2 = 0.6931472f;
constexpr float SLACK = 0.01f;  // more than the float32 error of a score and of a bound on it
constexpr float WEIGHTLESS = -28.0f;  // below 2^-40 of the best

inline int32_t groups_of(int32_t n) { return (n + 16 * GROUP_DEPTH - 1) / (16 * GROUP_DEPTH) * 16; }

}  // namespace ss
