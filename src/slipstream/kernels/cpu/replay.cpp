// Runs a step that `dump.py` wrote, without Python: for sanitizers, profilers and debuggers.
//
//   replay DUMP_DIR [isa] [threads] [repeats]
//
// Prints checksums of the logits, of the caches without their scratch page and of the buffers, then the time of a run.
// Not part of the library: compile it with the other sources of this folder.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "slipstream.h"

namespace {

std::string folder;

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "replay: %s\n", what.c_str());
    std::exit(1);
}

// A file's bytes in a block of exactly their size, so that a sanitizer sees a read past the end; aligned to 64.
struct Bytes {
    size_t size = 0;
    std::unique_ptr<uint8_t, decltype(&std::free)> data{nullptr, &std::free};

    explicit Bytes(const std::string &name) {
        std::ifstream file(folder + "/" + name, std::ios::binary);
        if (!file) fail("cannot open " + folder + "/" + name);
        const std::vector<char> read{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
        void *memory = nullptr;
        if (posix_memalign(&memory, 64, read.size() + 1)) fail("no memory");
        data.reset(static_cast<uint8_t *>(memory));
        size = read.size();
        std::memcpy(memory, read.data(), size);
        data.get()[size] = 0;  // ends a text
    }
};

// FNV-1a over bytes.
struct Checksum {
    uint64_t value = 0xcbf29ce484222325u;
    void add(const void *data, size_t size) {
        for (size_t i = 0; i < size; ++i) value = (value ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3u;
    }
};

}  // namespace

int main(int count, char **words) {
    if (count < 2) fail("usage: replay DUMP_DIR [isa] [threads] [repeats]");
    folder = words[1];
    const int isa = count > 2 ? std::atoi(words[2]) : ss_best_isa();
    const int threads = count > 3 ? std::atoi(words[3]) : 1;
    const int repeats = count > 4 ? std::atoi(words[4]) : 1;
    if (isa < 0 || isa > ss_best_isa() || threads < 1 || repeats < 1) fail("this processor or these numbers will not do");

    // The order is that of `dump.py`: nine counts, three numbers per buffer, bytes of a page per cache, the arrays.
    const Bytes text("program.txt"), weights("weights.bin"), file("batch.bin");
    const int32_t *at = reinterpret_cast<const int32_t *>(file.data.get());
    const int32_t num_rows = at[0], num_wanted = at[1], page_size = at[2], stride = at[3], sequences = at[4];
    const int32_t max_rows = at[5], vocabulary = at[6], num_caches = at[7], num_buffers = at[8];
    const int32_t *const shapes = at + 9, *const page_bytes = shapes + 3 * num_buffers;
    const int32_t *const arrays = page_bytes + num_caches, *const table = arrays + 4 * num_rows;
    std::vector<Bytes> caches;
    std::vector<void *> addresses;
    for (int32_t c = 0; c < num_caches; ++c) {
        caches.emplace_back("cache" + std::to_string(c) + ".bin");
        addresses.push_back(caches.back().data.get());
    }
    std::vector<float> logits(size_t(num_wanted) * vocabulary);
    const ss_batch batch{num_rows, num_wanted, page_size, stride, arrays, arrays + num_rows, arrays + 2 * num_rows,
                         arrays + 3 * num_rows, table, reinterpret_cast<const uint8_t *>(table + stride * sequences),
                         addresses.data(), logits.data()};

    char error[512] = "";
    ss_program *const program =
        ss_program_create(reinterpret_cast<const char *>(text.data.get()), weights.data.get(), int64_t(weights.size),
                          isa, max_rows, error, sizeof error);
    if (!program) fail(error);
    std::vector<int32_t> cpus(std::thread::hardware_concurrency());
    for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = int32_t(i);
    ss_pool *const pool = ss_pool_create(threads, cpus.data(), int32_t(cpus.size()));
    if (!pool) fail("the threads could not be started");
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < repeats; ++r)
        if (ss_program_run(program, pool, &batch, 0, ss_program_length(program))) fail("the batch was refused");
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;

    Checksum of_logits, of_caches, of_buffers;
    of_logits.add(logits.data(), logits.size() * sizeof(float));
    for (int32_t c = 0; c < num_caches; ++c)
        of_caches.add(caches[c].data.get() + page_bytes[c], caches[c].size - size_t(page_bytes[c]));
    for (int32_t b = 0; b < num_buffers; ++b) {
        const bool q8 = shapes[3 * b];
        const int32_t width = shapes[3 * b + 1], rows = shapes[3 * b + 2] ? num_wanted : num_rows;
        int64_t row_bytes = 0;
        const uint8_t *const base = static_cast<const uint8_t *>(ss_program_buffer(program, b, &row_bytes));
        for (int32_t r = 0; r < rows; ++r) {
            const uint8_t *const row = base + r * row_bytes;
            if (!q8) of_buffers.add(row, size_t(width) * 4);
            // 32 numbers, two floats, three sums; the rest of a block means nothing.
            for (int32_t i = 0; q8 && i < (width + 31) / 32; ++i) of_buffers.add(row + 64 * i, 52);
        }
    }
    std::printf("logits %016llx caches %016llx buffers %016llx\n", (unsigned long long)of_logits.value,
                (unsigned long long)of_caches.value, (unsigned long long)of_buffers.value);
    std::printf("%.4f ms\n", time.count() / repeats);
    ss_pool_destroy(pool);
    ss_program_destroy(program);
    return 0;
}
