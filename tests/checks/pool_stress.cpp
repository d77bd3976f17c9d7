// pool_stress THREADS RUNS: many runs of short phases over one pool. Prints "ok" if every piece ran exactly once and
// after all pieces of the phase before it.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pool.h"

namespace {

struct Phases final : ss_phases {
    explicit Phases(const std::vector<int32_t> &sizes) : counts(sizes), ran(sizes.size()) {}

    int32_t pieces(int32_t phase) override { return counts[phase]; }

    void run(int32_t phase, int32_t piece, int32_t) override {
        if (phase > 0 && ran[phase - 1].load() != counts[phase - 1]) early.fetch_add(1);
        for (volatile int32_t i = 0; i < 20 * (piece % 3); i = i + 1) {
        }
        ran[phase].fetch_add(1);
    }

    std::vector<int32_t> counts;
    std::vector<std::atomic<int32_t>> ran;
    std::atomic<int32_t> early{0};
};

}  // namespace

int main(int count, char **words) {
    if (count != 3) return 2;
    const int32_t cpus[2] = {0, 1};
    ss_pool *const pool = ss_pool_create(std::atoi(words[1]), cpus, 2);
    std::mt19937 random(1);
    for (int32_t i = 0; i < std::atoi(words[2]); ++i) {
        std::vector<int32_t> sizes(1 + random() % 30);
        for (int32_t &size : sizes) size = int32_t(random() % 12);
        Phases work(sizes);
        ss_pool_run(pool, work, 0, int32_t(sizes.size()));
        for (size_t phase = 0; phase < sizes.size(); ++phase) {
            if (work.ran[phase] == sizes[phase] && work.early == 0) continue;
            std::printf("run %d, phase %zu: %d of %d pieces ran, %d pieces of all phases too early\n", i, phase,
                        work.ran[phase].load(), sizes[phase], work.early.load());
            return 1;
        }
    }
    ss_pool_destroy(pool);
    std::puts("ok");
    return 0;
}
