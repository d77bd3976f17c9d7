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

constexpr int32_t FETCHED_LINES = 256;
constexpr auto SPIN = std::chrono::microseconds(50);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// All that a worker must know of the open phase, in one word, so that it costs one transfer between cores: a number that
// only grows (high 32 bits), which phase of the task it is (15 bits), its pieces (16 bits), and whether the task has ended.
struct State {
    uint64_t word;

    static State of(uint32_t number, int32_t phase, int32_t pieces) {
        return {(uint64_t(number) << 32) | (uint64_t(phase) << 17) | (uint64_t(pieces) << 1)};
    }
    uint32_t number() const { return uint32_t(word >> 32); }
    int32_t phase() const { return int32_t(word >> 17) & MOST_PHASES; }
    int32_t pieces() const { return int32_t(word >> 1) & MOST_PIECES; }
    bool ended() const { return word & 1; }
    State end() const { return {(uint64_t(number() + 1) << 32) | 1}; }

    static constexpr int32_t MOST_PHASES = 0x7FFF, MOST_PIECES = 0xFFFF;
};

// What is left of a worker's part of a phase's pieces: the phase's number (high 32 bits), the next piece and the end
// (16 bits each). Who takes from it first in a phase also sets it; until then it holds an earlier phase's number.
struct alignas(64) Range {
    std::atomic<uint64_t> word{0};
};

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
        state.store(current().end().word);
        wake();
        for (auto &helper : helpers) helper.join();
    }

    void run(ss_phases &work, int32_t first, int32_t last) {
        keep_apart();
        task.store(&work, std::memory_order_relaxed);
        end_of_task.store(last, std::memory_order_relaxed);
        if (!advance(current(), first)) return;
        State seen = current();
        while (!seen.ended()) {
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

    alignas(64) std::atomic<uint64_t> state{1};
    alignas(64) std::atomic<int32_t> done{0};
    alignas(64) std::atomic<ss_phases *> task{nullptr};
    std::atomic<int32_t> end_of_task{0};
    std::atomic<bool> stopping{false};
    std::atomic<int32_t> sleeping{0};
    std::mutex mutex;
    std::condition_variable changed;

    State current() const { return {state.load(std::memory_order_acquire)}; }

    // Opens the first phase from `next` on that is worth sharing, after running those before it. False: none was left.
    bool advance(State before, int32_t next) {
        ss_phases &work = *task.load(std::memory_order_relaxed);
        const int32_t last = end_of_task.load(std::memory_order_relaxed);
        const int32_t worker = me;
        for (; next < last; ++next) {
            const int32_t count = work.pieces(next);
            if (threads > 1 && count > 1 && count <= State::MOST_PIECES && next <= State::MOST_PHASES) {
                done.store(0, std::memory_order_relaxed);
                state.store(State::of(before.number() + 1, next, count).word, std::memory_order_seq_cst);
                wake();
                return true;
            }
            for (int32_t piece = 0; piece < count; ++piece) work.run(next, piece, worker);
        }
        return false;
    }

    void wake() {
        if (sleeping.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            changed.notify_all();
        }
    }

    // Takes a piece of the phase `seen` from the part of `owner`; -1 if none is left or the phase is over.
    int32_t take(int32_t owner, State seen) {
        Range &range = ranges[owner];
        uint64_t word = range.word.load(std::memory_order_relaxed);
        for (;;) {
            const int32_t age = int32_t(seen.number() - uint32_t(word >> 32));
            if (age < 0) return -1;
            uint32_t begin = (word >> 16) & 0xFFFF, end = word & 0xFFFF;
            if (age > 0) {
                begin = uint32_t(int64_t(seen.pieces()) * owner / threads);
                end = uint32_t(int64_t(seen.pieces()) * (owner + 1) / threads);
            }
            const bool none = begin >= end;
            if (none && age == 0) return -1;
            // An empty part is noted too, so that no word grows so old that its number looks like a later one.
            if (range.word.compare_exchange_weak(word, packed(seen.number(), none ? begin : begin + 1, end),
                                                 std::memory_order_relaxed))
                return none ? -1 : int32_t(begin);
        }
    }

    void take_part(int32_t worker, State seen) {
        if (seen.ended()) return;
        const int32_t running = seen.phase();
        ss_phases *work = task.load(std::memory_order_relaxed);
        int32_t own = 0;
        for (int32_t other = 0; other < threads; ++other) {
            const int32_t owner = (worker + other) % threads;
            for (int32_t piece; (piece = take(owner, seen)) >= 0; ++own) work->run(running, piece, worker);
        }
        if (own == 0) return;
        // Asked for before the addition: behind it, others may already have ended the task.
        const uint8_t *ahead = work->ahead(running, worker);
        if (done.fetch_add(own, std::memory_order_acq_rel) + own == seen.pieces()) {
            me = worker;
            if (!advance(seen, running + 1)) {
                state.store(seen.end().word, std::memory_order_seq_cst);
                wake();
            }
            return;
        }
        if (ahead == nullptr) return;
        for (int32_t line = 0; line < FETCHED_LINES; ++line) {
            if (line % 16 == 0 && state.load(std::memory_order_relaxed) != seen.word) return;
            __builtin_prefetch(ahead + 64 * line);
        }
    }

    // Waits until the state is another than `seen`, and returns it.
    State wait_beyond(State seen) {
        const auto begin = std::chrono::steady_clock::now();
        for (;;) {
            for (int32_t i = 0; i < 64; ++i) {
                const State now = current();
                if (now.word != seen.word) return now;
                relax();
            }
            if (std::chrono::steady_clock::now() - begin > SPIN) break;
        }
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1, std::memory_order_seq_cst);
        changed.wait(lock, [&] { return state.load(std::memory_order_seq_cst) != seen.word; });
        sleeping.fetch_sub(1, std::memory_order_seq_cst);
        return current();
    }

    void help(int32_t worker) {
        me = worker;
        State seen{1};
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
