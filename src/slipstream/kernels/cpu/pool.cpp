// Work is handed out in phases. Every worker has a range of a phase's pieces; it takes from the front of its own and,
// when that is empty, from the others', so a slow core delays the one piece that it holds. Who finishes a phase's last
// piece opens the next one; phases of a single piece it runs itself, which saves everybody the wait.

#include "pool.h"

#include <chrono>
#include <condition_variable>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr auto SPIN = std::chrono::microseconds(50);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A worker's range of the open phase in one word, so that it is taken from and replaced as a whole:
// the phase's number (high 32 bits), the next piece and the end (16 bits each).
struct alignas(64) Range {
    std::atomic<uint64_t> word{0};
};

constexpr int32_t MOST_PIECES = 0xFFFF;
constexpr uint64_t ENDED = 1;

uint64_t packed(uint32_t number, uint32_t begin, uint32_t end) {
    return (uint64_t(number) << 32) | (uint64_t(begin) << 16) | end;
}

}  // namespace

struct ss_pool {
    explicit ss_pool(int32_t count, std::vector<int32_t> allowed)
        : threads(count), cpus(std::move(allowed)), ranges(new Range[count]), pinned(count, -1) {
        for (int32_t worker = 1; worker < threads; ++worker) {
            helpers.emplace_back([this, worker] { help(worker); });
            pin(worker, worker < int32_t(cpus.size()) ? cpus[worker] : -1);
        }
    }

    ~ss_pool() {
        stopping.store(true);
        state.fetch_add(2);
        wake();
        for (auto &helper : helpers) helper.join();
    }

    void run(ss_phases &work, int32_t first, int32_t last) {
        keep_apart();
        task = &work;
        end_of_task = last;
        if (!advance(first)) return;
        uint64_t seen = state.load(std::memory_order_acquire);
        while (!(seen & ENDED)) {
            take_part(0, seen);
            seen = wait_beyond(seen);
        }
    }

    const int32_t threads;

  private:
    const std::vector<int32_t> cpus;
    std::unique_ptr<Range[]> ranges;
    std::vector<int32_t> pinned;
    std::vector<std::thread> helpers;

    // Twice the number of the open phase; plus one when the task has ended. It only grows.
    alignas(64) std::atomic<uint64_t> state{ENDED};
    alignas(64) std::atomic<int32_t> done{0};
    alignas(64) std::atomic<int32_t> total{0};
    std::atomic<int32_t> phase{0};
    std::atomic<ss_phases *> task{nullptr};
    std::atomic<int32_t> end_of_task{0};
    std::atomic<bool> stopping{false};
    std::atomic<int32_t> sleeping{0};
    std::mutex mutex;
    std::condition_variable changed;

    // Opens the first phase from `next` on that is worth sharing, after running those before it. False: none was left.
    bool advance(int32_t next) {
        ss_phases &work = *task.load(std::memory_order_relaxed);
        const int32_t last = end_of_task.load(std::memory_order_relaxed);
        const int32_t worker = me;
        for (; next < last; ++next) {
            const int32_t count = work.pieces(next);
            if (threads > 1 && count > 1 && count <= MOST_PIECES) {
                open(next, count);
                return true;
            }
            for (int32_t piece = 0; piece < count; ++piece) work.run(next, piece, worker);
        }
        return false;
    }

    void open(int32_t next, int32_t count) {
        const uint64_t number = (state.load(std::memory_order_relaxed) >> 1) + 1;
        phase.store(next, std::memory_order_relaxed);
        total.store(count, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
        for (int32_t worker = 0; worker < threads; ++worker) {
            const uint32_t begin = uint32_t(int64_t(count) * worker / threads);
            const uint32_t end = uint32_t(int64_t(count) * (worker + 1) / threads);
            ranges[worker].word.store(packed(uint32_t(number), begin, end), std::memory_order_relaxed);
        }
        state.store(number << 1, std::memory_order_seq_cst);
        wake();
    }

    void wake() {
        if (sleeping.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            changed.notify_all();
        }
    }

    // Takes a piece of phase `number` from a range; -1 if it has none left or the range belongs to another phase.
    static int32_t take(Range &range, uint64_t number) {
        uint64_t word = range.word.load(std::memory_order_relaxed);
        for (;;) {
            if (uint32_t(word >> 32) != uint32_t(number)) return -1;
            const uint32_t begin = (word >> 16) & 0xFFFF, end = word & 0xFFFF;
            if (begin >= end) return -1;
            if (range.word.compare_exchange_weak(word, packed(uint32_t(number), begin + 1, end),
                                                 std::memory_order_relaxed))
                return int32_t(begin);
        }
    }

    void take_part(int32_t worker, uint64_t seen) {
        if (seen & ENDED) return;
        const uint64_t number = seen >> 1;
        const int32_t running = phase.load(std::memory_order_relaxed);
        ss_phases *work = task.load(std::memory_order_relaxed);
        int32_t own = 0;
        for (int32_t other = 0; other < threads; ++other) {
            Range &range = ranges[(worker + other) % threads];
            for (int32_t piece; (piece = take(range, number)) >= 0; ++own) work->run(running, piece, worker);
        }
        if (own == 0) return;
        // Read before the addition: behind it, another worker may already have opened the next phase.
        const int32_t all = total.load(std::memory_order_relaxed);
        if (done.fetch_add(own, std::memory_order_acq_rel) + own == all) {
            me = worker;
            if (!advance(running + 1)) {
                state.store(((number + 1) << 1) | ENDED, std::memory_order_seq_cst);
                wake();
            }
        }
    }

    // Waits until the state is another than `seen`, and returns it.
    uint64_t wait_beyond(uint64_t seen) {
        const auto begin = std::chrono::steady_clock::now();
        for (;;) {
            for (int32_t i = 0; i < 64; ++i) {
                const uint64_t now = state.load(std::memory_order_acquire);
                if (now != seen) return now;
                relax();
            }
            if (std::chrono::steady_clock::now() - begin > SPIN) break;
        }
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1, std::memory_order_seq_cst);
        changed.wait(lock, [&] { return state.load(std::memory_order_seq_cst) != seen; });
        sleeping.fetch_sub(1, std::memory_order_seq_cst);
        return state.load(std::memory_order_acquire);
    }

    void help(int32_t worker) {
        me = worker;
        uint64_t seen = ENDED;
        while (!stopping.load()) {
            seen = wait_beyond(seen);
            if (stopping.load()) return;
            take_part(worker, seen);
        }
    }

    void pin(int32_t worker, int32_t cpu) {
#if defined(__linux__)
        if (cpu < 0) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        if (pthread_setaffinity_np(helpers[worker - 1].native_handle(), sizeof(set), &set) == 0) pinned[worker] = cpu;
#else
        (void)worker, (void)cpu;
#endif
    }

    // The caller is not pinned: it runs other code as well. A helper that is pinned to the caller's CPU moves away.
    void keep_apart() {
#if defined(__linux__)
        if (threads == 1) return;
        const int32_t here = sched_getcpu();
        for (int32_t worker = 1; worker < threads; ++worker) {
            if (pinned[worker] != here) continue;
            for (const int32_t cpu : cpus) {
                bool taken = cpu == here;
                for (int32_t other = 1; other < threads; ++other) taken = taken || pinned[other] == cpu;
                if (!taken) {
                    pin(worker, cpu);
                    return;
                }
            }
        }
#endif
    }

    static thread_local int32_t me;
};

thread_local int32_t ss_pool::me = 0;

ss_pool *ss_pool_create(int32_t threads, const int32_t *cpus, int32_t num_cpus) {
    if (threads < 1 || threads > 1024) return nullptr;
    return new ss_pool(threads, std::vector<int32_t>(cpus, cpus + (cpus == nullptr ? 0 : num_cpus)));
}

void ss_pool_destroy(ss_pool *pool) { delete pool; }

int32_t ss_pool_threads(const ss_pool *pool) { return pool == nullptr ? 1 : pool->threads; }

void ss_pool_run(ss_pool *pool, ss_phases &phases, int32_t first, int32_t last) {
    if (pool != nullptr) {
        pool->run(phases, first, last);
        return;
    }
    for (int32_t phase = first; phase < last; ++phase) {
        const int32_t count = phases.pieces(phase);
        for (int32_t piece = 0; piece < count; ++piece) phases.run(phase, piece, 0);
    }
}

namespace {

struct Each final : ss_phases {
    Each(int32_t n, void (*f)(void *, int32_t, int32_t), void *c) : count(n), fn(f), context(c) {}
    int32_t pieces(int32_t) override { return count; }
    void run(int32_t, int32_t piece, int32_t worker) override { fn(context, piece, worker); }
    int32_t count;
    void (*fn)(void *, int32_t, int32_t);
    void *context;
};

}  // namespace

void ss_pool_each(ss_pool *pool, int32_t pieces, void (*fn)(void *context, int32_t piece, int32_t worker),
                  void *context) {
    Each each(pieces, fn, context);
    ss_pool_run(pool, each, 0, 1);
}
