// The rules of sampling, in the order and with the arithmetic of slipstream/ops/sample.py: filters are thresholds on
// values, probabilities are summed as whole numbers, noise is a function of key and token. So nothing depends on the
// order of summing or sorting, on the instruction set, on the number of threads, or on other rows.

#include "sample.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "pool.h"
#include "sample_kernels.h"

namespace ss {

extern const SampleKernels PORTABLE_SAMPLING;
#if defined(__x86_64__)
extern const SampleKernels AVX2_SAMPLING, AVX512_SAMPLING;
#endif

float score_of(float logit, uint32_t hashed) {
    float uniform = (float(hashed) + 0.5f) * 0x1p-32f;
    if (uniform > 1.0f - 0x1p-24f) uniform = 1.0f - 0x1p-24f;
    const float exponential = float(-log1p(double(-uniform)));
    return logit + float(-log(double(exponential)));
}

namespace {

enum Real { TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, FREQUENCY, PRESENCE, REALS };
enum Whole { TOP_K, KEY0, KEY1, SCORE_TOKEN, ONLY_ALLOWED, USES_GRAMMAR, WANTS_LOGPROBS, WHOLES };

constexpr float LARGEST = 3.4028234663852886e38f;
constexpr double ONE = 0x1p40;
constexpr int32_t FEW = 2048;  // tokens that are looked at one by one sooner than all together
constexpr int32_t DIGIT = 11;  // bits of a value that are looked at together

int64_t weight_of(float e) { return int64_t(e * float(ONE)); }

uint32_t finalised(uint32_t x) {
    x = (x ^ (x >> 16)) * FIRST;
    x = (x ^ (x >> 15)) * SECOND;
    return x ^ (x >> 15);
}

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// A list's entries by row, in the order in which they came.
struct Index {
    std::vector<int32_t> start, order;
    int64_t count = 0;

    // False: an entry names a row or token that is not there.
    bool build(const int64_t *entries, int64_t entry_count, int32_t columns, int32_t rows, int32_t vocab) {
        count = entry_count;
        if (count == 0) return true;
        start.assign(size_t(rows) + 1, 0);
        order.resize(size_t(count));
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = entries[i * columns], token = entries[i * columns + 1];
            if (row < 0) continue;
            if (row >= rows || token < 0 || token >= vocab) return false;
            start[size_t(row) + 1] += 1;
        }
        for (int32_t row = 0; row < rows; ++row) start[size_t(row) + 1] += start[size_t(row)];
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = entries[i * columns];
            if (row >= 0) order[size_t(start[size_t(row)]++)] = int32_t(i);
        }
        // `start` has moved on by one row.
        for (int32_t row = rows; row > 0; --row) start[size_t(row)] = start[size_t(row) - 1];
        start[0] = 0;
        return true;
    }

    int32_t begin(int32_t row) const { return count ? start[size_t(row)] : 0; }
    int32_t end(int32_t row) const { return count ? start[size_t(row) + 1] : 0; }
};

// What a worker needs to work on a row.
struct Scratch {
    explicit Scratch(int32_t vocab)
        : edited(size_t(vocab)), groups(size_t(groups_of(vocab))), places(size_t(vocab)), values(size_t(vocab) + 16),
          some(size_t(std::max(vocab, groups_of(vocab))) + 16), keys(size_t(vocab)), weights(size_t(vocab)),
          members(size_t(vocab)), sums(size_t(1) << DIGIT) {}

    std::vector<float> edited, groups;
    std::vector<int32_t> places;  // tokens that are left, ascending
    std::vector<float> values;    // and their (x - best) / temperature
    std::vector<float> some;
    std::vector<uint32_t> keys;
    std::vector<int64_t> weights;
    std::vector<int32_t> members;
    std::vector<int64_t> sums;
};

// The smallest of `keys` at which the sum of the weights of it and of all smaller keys reaches `wanted`, which the sum
// of all weights does. By digits of the keys, from the highest.
uint32_t border(Scratch &s, int32_t count, int64_t wanted) {
    const uint32_t *keys = s.keys.data();
    const int64_t *weights = s.weights.data();
    int32_t *members = s.members.data();
    uint32_t least = ~0u, most = 0;
    for (int32_t i = 0; i < count; ++i) least = std::min(least, keys[i]), most = std::max(most, keys[i]);
    int32_t bits = least == most ? 0 : 32 - __builtin_clz(least ^ most);  // the others are those of all keys
    uint32_t prefix = least - (least & uint32_t((uint64_t(1) << bits) - 1));
    bool all = true;
    while (bits > 0) {
        const int32_t shift = std::max(0, bits - DIGIT);
        const uint32_t mask = (1u << (bits - shift)) - 1;
        bits = shift;
        std::fill(s.sums.begin(), s.sums.begin() + mask + 1, 0);
        for (int32_t i = 0; i < count; ++i) {
            const int32_t at = all ? i : members[i];
            s.sums[(keys[at] >> shift) & mask] += weights[at];
        }
        uint32_t digit = 0;
        while (digit < mask && s.sums[digit] < wanted) wanted -= s.sums[digit++];
        if (wanted <= 0) {
            // Nothing is wanted: the first digit that occurs.
            digit = mask;
            for (int32_t i = 0; i < count; ++i) digit = std::min(digit, (keys[all ? i : members[i]] >> shift) & mask);
        }
        prefix |= digit << shift;
        int32_t kept = 0;
        for (int32_t i = 0; i < count; ++i) {
            const int32_t at = all ? i : members[i];
            if (((keys[at] >> shift) & mask) == digit) members[kept++] = at;
        }
        count = kept;
        all = false;
    }
    return prefix;
}

// share of a sum of weights, as the reference rounds it
int64_t part_of(int64_t sum, float share) { return int64_t(float(sum) * share); }

struct Row {
    const ss_sampler &sampler;
    const ss_sample_batch &batch;
    Scratch &s;
    int32_t row;

    const float *raw, *x, *real;
    const int64_t *whole;
    float best = 0.0f;
    int32_t left = 0;          // tokens in the scratch's lists
    float least = -INFINITY;   // of (x - best) / temperature, where there is no list

    Row(const ss_sampler &sampler, const ss_sample_batch &batch, Scratch &s, int32_t row);
    void sample();

  private:
    bool edit();
    void penalise(float *y, const int64_t *entry) const;
    int32_t drawn();
    bool filter();
    void take(float cut);
    void take(float cut, float end);
    void scale();
    int64_t weigh();
    bool keep_top_k();
    bool keep_top_p(bool listed);
    bool keep_top_p_of_all();
    void keep_until(uint32_t last);
    void keep_typical();
    float reached_by(int32_t count);
    void most_likely(const float *y, int32_t count);
    void report(int32_t token, float highest);
    template <class Wanted> void keep(Wanted wanted);
};

}  // namespace

}  // namespace ss

struct ss_sampler {
    int32_t vocab;
    const ss::SampleKernels *kernels;
    std::vector<ss::Scratch> scratch;
    ss::Index penalised, biased, banned, allowed;
};

namespace ss {

namespace {

Row::Row(const ss_sampler &sampler, const ss_sample_batch &batch, Scratch &s, int32_t row)
    : sampler(sampler), batch(batch), s(s), row(row), raw(batch.logits + int64_t(row) * sampler.vocab), x(raw),
      real(batch.reals + int64_t(row) * REALS), whole(batch.wholes + int64_t(row) * WHOLES) {}

void Row::sample() {
    const int32_t vocab = sampler.vocab;
    batch.logprobs[row] = NAN;
    batch.ranks[row] = 0;
    for (int64_t i = int64_t(row) * batch.num_top; i < int64_t(row + 1) * batch.num_top; ++i) {
        batch.top_ids[i] = -1;
        batch.top_logprobs[i] = NAN;
    }
    batch.tokens[row] = -1;
    float highest;
    if (!sampler.kernels->scan(raw, vocab, s.groups.data(), &highest)) return;
    best = highest;
    bool possible = true;
    if (edit()) {
        x = s.edited.data();
        possible = sampler.kernels->scan(x, vocab, s.groups.data(), &best);
    }
    const int32_t token = possible && best > -INFINITY ? drawn() : -1;
    batch.tokens[row] = token;
    if (whole[WANTS_LOGPROBS]) report(token, highest);
}

// Masks, bias and penalties, in `edited`. False: there are none.
bool Row::edit() {
    const bool grammar = whole[USES_GRAMMAR] && batch.grammar != nullptr, only = whole[ONLY_ALLOWED] != 0;
    const Index &bans = sampler.banned, &biases = sampler.biased, &penalties = sampler.penalised;
    if (!grammar && !only && bans.begin(row) == bans.end(row) && biases.begin(row) == biases.end(row) &&
        penalties.begin(row) == penalties.end(row))
        return false;
    const int32_t vocab = sampler.vocab;
    float *y = s.edited.data();
    if (only) {
        std::fill(y, y + vocab, -INFINITY);
        const Index &list = sampler.allowed;
        for (int32_t i = list.begin(row); i < list.end(row); ++i) {
            const int64_t token = batch.allowed[2 * int64_t(list.order[size_t(i)]) + 1];
            y[token] = raw[token];
        }
    } else {
        memcpy(y, raw, size_t(vocab) * sizeof(float));
    }
    if (grammar) {
        const int32_t *words = batch.grammar + int64_t(row) * ((vocab + 31) / 32);
        for (int32_t token = 0; token < vocab; ++token)
            if (!((uint32_t(words[token / 32]) >> (token % 32)) & 1)) y[token] = -INFINITY;
    }
    for (int32_t i = bans.begin(row); i < bans.end(row); ++i)
        y[batch.banned[2 * int64_t(bans.order[size_t(i)]) + 1]] = -INFINITY;
    for (int32_t i = biases.begin(row); i < biases.end(row); ++i) {
        const int64_t entry = biases.order[size_t(i)];
        y[batch.bias_at[2 * entry + 1]] += batch.bias_value[entry];
    }
    for (int32_t i = penalties.begin(row); i < penalties.end(row); ++i)
        penalise(y, batch.penalised + 4 * int64_t(penalties.order[size_t(i)]));
    return true;
}

void Row::penalise(float *y, const int64_t *entry) const {
    const float old = y[entry[1]];
    if (old == -INFINITY) return;
    const float repetition = entry[2] > 0 || entry[3] > 0 ? real[REPETITION] : 1.0f;
    float changed = old > 0 ? old / repetition : old * repetition;
    changed = changed - real[FREQUENCY] * float(entry[2]);
    changed = changed - (entry[2] > 0 ? real[PRESENCE] : 0.0f);
    // An extreme penalty must neither make a token impossible nor give +inf.
    y[entry[1]] = std::min(std::max(changed, -LARGEST), LARGEST);
}

int32_t Row::drawn() {
    const int32_t likeliest = sampler.kernels->find(x, sampler.vocab, best);
    const float temperature = real[TEMPERATURE];
    if (!(temperature > 0)) return likeliest;
    const uint32_t key0 = uint32_t(whole[KEY0]), key1 = uint32_t(whole[KEY1]);
    const auto hash = [&](int32_t token) { return finalised(finalised(uint32_t(token) + key0) ^ key1); };
    Best known = {score_of(0.0f, hash(likeliest)), likeliest};
    if (!filter())
        return sampler.kernels->draw(x, sampler.vocab, best, temperature, least, key0, key1, known).token;
    if (real[TYPICAL_P] < 1) known = {-INFINITY, sampler.vocab};  // the likeliest may be gone
    for (int32_t i = 0; i < left; ++i) {
        const int32_t token = s.places[size_t(i)];
        const uint32_t hashed = hash(token);
        // Noise is at most that many log(2); see the passes over whole rows.
        const float most = float(hashed ? 1 + __builtin_clz(hashed) : 33) * LOG_2;
        const float logit = s.values[size_t(i)];
        if (logit + most < known.score - SLACK) continue;
        const float score = score_of(logit, hashed);
        if (score > known.score || (score == known.score && token < known.token)) known = {score, token};
    }
    return known.token;
}

// The tokens that the filters leave, in `places` and `values`. False: all are left from `least` on.
bool Row::filter() {
    bool listed = keep_top_k();
    if (real[TOP_P] < 1) listed = keep_top_p(listed);
    if (real[MIN_P] > 0) {
        if (!listed) take(best + real[TEMPERATURE] * (logf(real[MIN_P]) - SLACK));
        listed = true;
        sampler.kernels->exps(s.values.data(), left, s.some.data());
        keep([&](int32_t i) { return s.some[size_t(i)] >= real[MIN_P]; });
    }
    if (real[TYPICAL_P] < 1) {
        if (!listed) take(-LARGEST);
        listed = true;
        keep_typical();
    }
    return listed;
}

// Start with the tokens whose x is at least `cut` (and below `end`).
void Row::take(float cut) {
    take(cut, INFINITY);
}

void Row::take(float cut, float end) {
    float *groups = s.groups.data();
    left = sampler.kernels->gather(x, sampler.vocab, std::max(cut, -LARGEST), end, groups, s.places.data());
    scale();
}

void Row::scale() {
    for (int32_t i = 0; i < left; ++i) s.values[size_t(i)] = (x[s.places[size_t(i)]] - best) / real[TEMPERATURE];
}

template <class Wanted> void Row::keep(Wanted wanted) {
    int32_t kept = 0;
    for (int32_t i = 0; i < left; ++i) {
        const bool it = wanted(i);
        s.places[size_t(kept)] = s.places[size_t(i)];
        s.values[size_t(kept)] = s.values[size_t(i)];
        kept += it;
    }
    left = kept;
}

bool Row::keep_top_k() {
    const int64_t top_k = whole[TOP_K];
    if (top_k <= 0 || top_k >= sampler.vocab) return false;
    most_likely(x, int32_t(top_k));
    scale();
    return true;
}

// Weights and keys of `values`, which are at most 0: the higher the key, the less likely. -> the sum of the weights.
int64_t Row::weigh() {
    sampler.kernels->exps(s.values.data(), left, s.some.data());
    int64_t sum = 0;
    for (int32_t i = 0; i < left; ++i) {
        s.keys[size_t(i)] = bits_of(s.values[size_t(i)]) & 0x7FFFFFFF;
        sum += s.weights[size_t(i)] = weight_of(s.some[size_t(i)]);
    }
    return sum;
}

// `listed`: some tokens were dropped before. -> whether there is a list now.
bool Row::keep_top_p(bool listed) {
    if (!listed) return keep_top_p_of_all();
    const int64_t sum = weigh(), wanted = part_of(sum, real[TOP_P]);
    if (wanted <= sum) keep_until(border(s, left, wanted));
    return true;
}

bool Row::keep_top_p_of_all() {
    // The border is looked for between two of these guesses only.
    static const float DEPTHS[CUTS] = {2, 4, 6, 8, 10, 13};
    const float temperature = real[TEMPERATURE];
    float cuts[CUTS];
    for (int32_t i = 0; i < CUTS; ++i) cuts[i] = best - DEPTHS[i] * temperature;
    int64_t sums[CUTS + 1];
    int32_t counts[CUTS];
    sampler.kernels->weigh(x, sampler.vocab, best, temperature, cuts, sums, counts);
    const int64_t wanted = part_of(sums[CUTS], real[TOP_P]);
    if (wanted > sums[CUTS]) return false;
    int32_t next = 0;
    while (next < CUTS && sums[next] < wanted) ++next;
    const float cut = next < CUTS ? cuts[next] : -LARGEST;
    const bool list = real[MIN_P] > 0 || real[TYPICAL_P] < 1 || (next < CUTS && counts[next] <= FEW);
    if (!list) {
        take(cut, next ? cuts[next - 1] : INFINITY);
        weigh();
        const uint32_t last = border(s, left, next ? wanted - sums[next - 1] : wanted) | 0x80000000;
        memcpy(&least, &last, 4);
        return false;
    }
    take(cut);
    weigh();
    uint32_t last = border(s, left, wanted);
    // A token below the guess may be tied with the border, since dividing can make two values one.
    if (next < CUTS && last >= (bits_of((cut - best) / temperature) & 0x7FFFFFFF)) {
        take(-LARGEST);
        weigh();
        last = border(s, left, wanted);
    }
    keep_until(last);
    return true;
}

void Row::keep_until(uint32_t last) {
    keep([&](int32_t i) { return s.keys[size_t(i)] <= last; });
}

// Meister et al., 2022: the tokens whose surprise is nearest to the mean surprise.
void Row::keep_typical() {
    const int64_t sum = weigh();
    int64_t moment = 0;
    for (int32_t i = 0; i < left; ++i)
        if (s.weights[size_t(i)] > 0) moment += weight_of(s.some[size_t(i)] * -s.values[size_t(i)]);
    const float mean = float(moment) / float(sum);
    for (int32_t i = 0; i < left; ++i) s.keys[size_t(i)] = bits_of(fabsf(-s.values[size_t(i)] - mean));
    const int64_t wanted = part_of(sum, real[TYPICAL_P]);
    if (wanted > sum) return;
    keep_until(border(s, left, wanted));
}

// A value that at least `count` of a row reach, and not many more if they are spread evenly: that of `count` groups'
// maxima. -inf if there are too few groups.
float Row::reached_by(int32_t count) {
    int32_t size = int32_t(s.groups.size());
    if (count > size) return -INFINITY;
    float *maxima = s.some.data();
    std::copy(s.groups.begin(), s.groups.end(), maxima);
    while (size % 2 == 0 && size / 2 >= 4 * count && size > 64) {
        size /= 2;
        for (int32_t i = 0; i < size; ++i) maxima[i] = std::max(maxima[i], maxima[i + size]);
    }
    std::nth_element(maxima, maxima + count - 1, maxima + size, std::greater<float>());
    return maxima[count - 1];
}

// The `count` largest of y, whose maxima are in `groups`, and those equal to the last of them; without -inf.
void Row::most_likely(const float *y, int32_t count) {
    const float cut = std::max(reached_by(count), -LARGEST);
    left = sampler.kernels->gather(y, sampler.vocab, cut, INFINITY, s.groups.data(), s.places.data());
    if (left <= count) return;
    float *values = s.some.data();
    for (int32_t i = 0; i < left; ++i) values[i] = y[s.places[size_t(i)]];
    std::nth_element(values, values + count - 1, values + left, std::greater<float>());
    const float last = values[count - 1];
    keep([&](int32_t i) { return y[s.places[size_t(i)]] >= last; });
}

// What log-softmax of the logits as given says of a token (of the one to be scored, if there is one).
void Row::report(int32_t token, float highest) {
    const int32_t vocab = sampler.vocab, top = batch.num_top;
    if (whole[SCORE_TOKEN] >= 0) token = int32_t(whole[SCORE_TOKEN]);
    if (token < 0 || highest == -INFINITY) return;
    float nowhere[CUTS];
    std::fill(nowhere, nowhere + CUTS, INFINITY);
    int64_t sums[CUTS + 1];
    int32_t counts[CUTS];
    sampler.kernels->weigh(raw, vocab, highest, 1.0f, nowhere, sums, counts);
    const float log_total = float(log(double(float(sums[CUTS])) / ONE));
    batch.logprobs[row] = (raw[token] - highest) - log_total;
    batch.ranks[row] = 1 + sampler.kernels->count_above(raw, vocab, raw[token]);
    if (top == 0) return;
    float again;
    if (x != raw) sampler.kernels->scan(raw, vocab, s.groups.data(), &again);
    most_likely(raw, top);
    int32_t *ids = s.places.data();
    std::sort(ids, ids + left, [&](int32_t a, int32_t b) { return raw[a] > raw[b] || (raw[a] == raw[b] && a < b); });
    for (int32_t other = 0; left < top; ++other)
        if (raw[other] == -INFINITY) ids[left++] = other;
    for (int32_t i = 0; i < top; ++i) {
        batch.top_ids[int64_t(row) * top + i] = ids[i];
        batch.top_logprobs[int64_t(row) * top + i] = (raw[ids[i]] - highest) - log_total;
    }
}

struct Call {
    ss_sampler *sampler;
    const ss_sample_batch *batch;
};

void sample_row(void *context, int32_t piece, int32_t worker) {
    const Call &call = *static_cast<Call *>(context);
    Row(*call.sampler, *call.batch, call.sampler->scratch[size_t(worker)], piece).sample();
}

}  // namespace

}  // namespace ss

ss_sampler *ss_sampler_create(int32_t vocab, int32_t isa, int32_t workers) {
    const ss::SampleKernels *kernels = &ss::PORTABLE_SAMPLING;
#if defined(__x86_64__)
    if (isa == SS_AVX2) kernels = &ss::AVX2_SAMPLING;
    if (isa == SS_AVX512) kernels = &ss::AVX512_SAMPLING;
#else
    (void)isa;
#endif
    try {
        auto sampler = std::make_unique<ss_sampler>();
        sampler->vocab = vocab;
        sampler->kernels = kernels;
        for (int32_t worker = 0; worker < workers; ++worker) sampler->scratch.emplace_back(vocab);
        return sampler.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void ss_sampler_destroy(ss_sampler *sampler) { delete sampler; }

int32_t ss_sampler_run(ss_sampler *sampler, ss_pool *pool, const ss_sample_batch *batch) {
    const int32_t rows = batch->rows, vocab = sampler->vocab;
    for (int32_t row = 0; row < rows; ++row)
        if (batch->wholes[int64_t(row) * ss::WHOLES + ss::SCORE_TOKEN] >= vocab) return -1;
    try {
        if (!sampler->penalised.build(batch->penalised, batch->num_penalised, 4, rows, vocab) ||
            !sampler->biased.build(batch->bias_at, batch->num_bias, 2, rows, vocab) ||
            !sampler->banned.build(batch->banned, batch->num_banned, 2, rows, vocab) ||
            !sampler->allowed.build(batch->allowed, batch->num_allowed, 2, rows, vocab))
            return -1;
    } catch (const std::bad_alloc &) {
        return -2;
    }
    ss::Call call = {sampler, batch};
    if (rows == 1) ss::sample_row(&call, 0, 0);
    else ss_pool_each(pool, rows, ss::sample_row, &call);
    return 0;
}
