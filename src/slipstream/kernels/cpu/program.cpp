// Reading a program's text, with every operand checked, so that running it needs no checks.

#include "program.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

namespace ss {

namespace {

const KindInfo KINDS[] = {
    {"q4_0", 256, 32, false, true},  {"q4_1", 256, 64, false, true},  {"q8_0", 512, 32, false, true},
    {"q8_1", 512, 64, false, true},  {"q8_f", 512, 128, false, true}, {"q4_k", 256, 320, true, true},
    {"q6_k", 384, 288, true, true},  {"bf16", 1024, 0, false, false}, {"f32", 2048, 0, false, false},
};

int64_t padded(int64_t bytes) { return (bytes + 63) & ~int64_t(63); }

// One line's words: a name and `key=value` pairs.
struct Line {
    int32_t number;
    std::vector<std::string> words;
    std::map<std::string, std::string> values;
    mutable std::map<std::string, bool> used;

    [[noreturn]] void fail(const std::string &what) const { throw "line " + std::to_string(number) + ": " + what; }

    bool has(const char *key) const { return values.count(key) != 0; }

    const std::string &text(const char *key) const {
        auto at = values.find(key);
        if (at == values.end()) fail(std::string(key) + " is missing");
        used[key] = true;
        return at->second;
    }

    int64_t whole(const char *key, int64_t low, int64_t high) const {
        const std::string &value = text(key);
        char *end = nullptr;
        const long long number_read = std::strtoll(value.c_str(), &end, 10);
        if (value.empty() || *end != 0 || number_read < low || number_read > high)
            fail(std::string(key) + "=" + value + " must be from " + std::to_string(low) + " to " +
                 std::to_string(high));
        return number_read;
    }

    float real(const char *key) const {
        const std::string &value = text(key);
        char *end = nullptr;
        const float number_read = std::strtof(value.c_str(), &end);
        if (value.empty() || *end != 0) fail(std::string(key) + "=" + value + " is not a number");
        return number_read;
    }

    void check_all_used() const {
        for (auto &pair : values)
            if (!used[pair.first]) fail(pair.first + " is not known here");
    }
};

struct Parser {
    ss_program &p;
    const uint8_t *weights;
    int64_t weight_bytes;
    std::map<int32_t, int64_t> slots;  // bytes of a row in each slot
    bool ended = false;

    void buffer(const Line &line) {
        Buffer b;
        const std::string &kind = line.text("kind");
        if (kind != "f32" && kind != "q8") line.fail("kind=" + kind + " is not a kind of buffer");
        b.q8 = kind == "q8";
        b.width = int32_t(line.whole("width", 1, 1 << 24));
        b.slot = int32_t(line.whole("slot", 0, 1 << 20));
        const std::string &rows = line.text("rows");
        if (rows != "all" && rows != "wanted") line.fail("rows=" + rows + " is neither all nor wanted");
        b.wanted = rows == "wanted";
        const int64_t blocks = (b.width + BLOCK - 1) / BLOCK;
        b.row_bytes = b.q8 ? blocks * Q8_BLOCK_BYTES : padded(4LL * b.width);
        int64_t &largest = slots[b.slot];
        if (b.row_bytes > largest) largest = b.row_bytes;
        p.buffers.push_back(b);
    }

    const uint8_t *stored(const Line &line, int64_t bytes) {
        const int64_t offset = line.whole("offset", 0, INT64_MAX / 2);
        if (offset % 64) line.fail("offset is not a multiple of 64");
        if (bytes > weight_bytes || offset > weight_bytes - bytes) line.fail("lies outside of the weights");
        return weights + offset;
    }

    void weight(const Line &line) {
        Weight w;
        const std::string &kind = line.text("kind");
        int32_t index = 0;
        while (index < 9 && kind != KINDS[index].name) ++index;
        if (index == 9) line.fail("kind=" + kind + " is not a kind of weight");
        w.kind = Kind(index);
        const KindInfo &known = KINDS[index];
        w.outputs = int32_t(line.whole("outputs", 1, 1 << 28));
        w.inputs = int32_t(line.whole("inputs", 1, 1 << 24));
        const int32_t unit = known.super ? 8 * BLOCK : BLOCK;
        w.blocks = (w.inputs + unit - 1) / unit * (unit / BLOCK);
        w.tiles = (w.outputs + LANES - 1) / LANES;
        w.scales_at = padded(int64_t(w.blocks) * known.quant_bytes);
        w.tile_bytes = w.scales_at + padded(int64_t(known.super ? w.blocks / 8 : w.blocks) * known.scale_bytes);
        const int64_t bytes = w.tile_bytes * w.tiles;
        if (line.whole("bytes", 0, INT64_MAX / 2) != bytes) line.fail("bytes should be " + std::to_string(bytes));
        w.data = stored(line, bytes);
        p.weights.push_back(w);
    }

    void vector(const Line &line) {
        Vector v;
        v.count = int32_t(line.whole("count", 1, 1 << 28));
        v.data = reinterpret_cast<const float *>(stored(line, 4LL * v.count));
        p.vectors.push_back(v);
    }

    void cache(const Line &line) {
        Cache c;
        c.heads = int32_t(line.whole("heads", 1, 1 << 16));
        c.width = int32_t(line.whole("width", 1, 1 << 16));
        const std::string &kind = line.text("kind");
        if (kind != "bf16" && kind != "int8") line.fail("kind=" + kind + " is not a kind of cache");
        c.int8 = kind == "int8";
        p.caches.push_back(c);
    }

    // Operands -------------------------------------------------------------------------------------------------------

    template <class T> static int32_t id(const Line &line, const char *key, const std::vector<T> &all) {
        return int32_t(line.whole(key, 0, int64_t(all.size()) - 1));
    }

    int32_t floats(const Line &line, const char *key, int64_t width, bool any_width = false) {
        const int32_t i = id(line, key, p.buffers);
        if (p.buffers[i].q8) line.fail(std::string(key) + " must be a f32 buffer");
        if (!any_width && p.buffers[i].width != width)
            line.fail(std::string(key) + " should be " + std::to_string(width) + " wide");
        return i;
    }

    int32_t either(const Line &line, const char *key, int64_t width) {
        const int32_t i = id(line, key, p.buffers);
        if (p.buffers[i].width != width) line.fail(std::string(key) + " should be " + std::to_string(width) + " wide");
        return i;
    }

    int32_t vec(const Line &line, const char *key, int64_t count) {
        if (!line.has(key)) return -1;
        const int32_t i = id(line, key, p.vectors);
        if (p.vectors[i].count != count) line.fail(std::string(key) + " should have " + std::to_string(count));
        return i;
    }

    // A weight that multiplies buffer `in`.
    int32_t factor(const Line &line, const char *key, int32_t in, int64_t outputs, int32_t plus = 0) {
        int32_t i = id(line, key, p.weights);
        if (i + plus >= int32_t(p.weights.size())) line.fail(std::string(key) + " has too few weights behind it");
        const Weight &w = p.weights[i + plus];
        const Buffer &b = p.buffers[in];
        if (w.inputs != b.width) line.fail(std::string(key) + " does not fit its input's width");
        if (info(w.kind).integer != b.q8) line.fail(std::string(key) + " does not fit its input's kind");
        if (outputs >= 0 && w.outputs != outputs)
            line.fail(std::string(key) + " should give " + std::to_string(outputs) + " outputs");
        return i;
    }

    void heads(const Line &line, Instr &i, bool grouped) {
        i.heads = int32_t(line.whole("heads", 1, 1 << 16));
        i.width = int32_t(line.whole("width", 2, 1 << 14));
        if (i.width % LANES) line.fail("width must be a multiple of 16");
        if (!grouped) return;
        i.kv_heads = int32_t(line.whole("kv_heads", 1, 1 << 16));
        if (i.heads % i.kv_heads) line.fail("heads must be a multiple of kv_heads");
        i.cache = id(line, "cache", p.caches);
        const Cache &c = p.caches[i.cache];
        if (c.heads != i.kv_heads || c.width != i.width) line.fail("the cache has other heads");
    }

    void same_rows(const Line &line, std::initializer_list<int32_t> ids) {
        int32_t first = -1;
        for (int32_t i : ids) {
            if (i < 0) continue;
            if (first < 0) first = i;
            if (p.buffers[i].wanted != p.buffers[first].wanted) line.fail("buffers have different rows");
        }
    }

    void instruction(const Line &line) {
        if (line.words.size() != 2) line.fail("`do` needs one name");
        const std::string &name = line.words[1];
        Instr i;
        i.line = p.num_lines++;
        p.first_of_line.push_back(int32_t(p.instrs.size()));
        if (name == "embed") {
            i.op = Op::embed;
            i.weight = id(line, "weight", p.weights);
            i.out = floats(line, "out", p.weights[i.weight].inputs);
            same_rows(line, {i.out});
        } else if (name == "rope_table") {
            i.op = Op::rope_table;
            i.out = floats(line, "out", 0, true);
            i.inv_freq = vec(line, "inv_freq", p.buffers[i.out].width / 2);
            if (i.inv_freq < 0) line.fail("inv_freq is missing");
            i.scale = line.real("scale");
        } else if (name == "norm") {
            i.op = Op::norm;
            i.in = floats(line, "in", 0, true);
            const int32_t width = p.buffers[i.in].width;
            i.heads = line.has("heads") ? int32_t(line.whole("heads", 1, width)) : 1;
            if (width % i.heads) line.fail("heads must divide the width");
            if (i.heads > 1 && width / i.heads % LANES) line.fail("a head's width must be a multiple of 16");
            i.out = either(line, "out", width);
            i.weight = vec(line, "weight", width / i.heads);
            if (i.weight < 0) line.fail("weight is missing");
            i.eps = line.real("eps");
            if (i.heads > 1 && p.buffers[i.out].q8) line.fail("out must be a f32 buffer where there are heads");
            same_rows(line, {i.in, i.out});
        } else if (name == "quant") {
            i.op = Op::quant;
            i.in = floats(line, "in", 0, true);
            i.out = either(line, "out", p.buffers[i.in].width);
            if (!p.buffers[i.out].q8) line.fail("out must be a q8 buffer");
            same_rows(line, {i.in, i.out});
        } else if (name == "linear") {
            i.op = Op::linear;
            i.in = id(line, "in", p.buffers);
            i.weight = factor(line, "weight", i.in, -1);
            const int32_t outputs = p.weights[i.weight].outputs;
            if (line.text("out") != "-1") i.out = floats(line, "out", outputs);
            else if (!p.buffers[i.in].wanted) line.fail("logits come from rows that want them");
            i.bias = vec(line, "bias", outputs);
            if (line.has("add")) i.add = floats(line, "add", outputs);
            same_rows(line, {i.in, i.out, i.add});
        } else if (name == "qkv") {
            i.op = Op::qkv;
            heads(line, i, true);
            i.in = id(line, "in", p.buffers);
            i.q = factor(line, "q", i.in, int64_t(i.heads) * i.width);
            i.k = factor(line, "k", i.in, int64_t(i.kv_heads) * i.width);
            i.v = factor(line, "v", i.in, int64_t(i.kv_heads) * i.width);
            i.q_bias = vec(line, "q_bias", int64_t(i.heads) * i.width);
            i.k_bias = vec(line, "k_bias", int64_t(i.kv_heads) * i.width);
            i.v_bias = vec(line, "v_bias", int64_t(i.kv_heads) * i.width);
            i.q_norm = vec(line, "q_norm", i.width);
            i.k_norm = vec(line, "k_norm", i.width);
            if (i.q_norm >= 0 || i.k_norm >= 0) i.eps = line.real("eps");
            i.table = floats(line, "table", i.width);
            i.query = floats(line, "query", int64_t(i.heads) * i.width);
            same_rows(line, {i.in, i.table, i.query});
            if (i.width % (2 * LANES)) line.fail("width must be a multiple of 32");
            if (i.width > 256) line.fail("width must be at most 256");
        } else if (name == "rope") {
            i.op = Op::rope;
            heads(line, i, false);
            i.in = floats(line, "in", int64_t(i.heads) * i.width);
            i.out = floats(line, "out", int64_t(i.heads) * i.width);
            i.table = floats(line, "table", i.width);
            same_rows(line, {i.in, i.out, i.table});
            if (i.width % (2 * LANES)) line.fail("width must be a multiple of 32");
        } else if (name == "write_kv") {
            i.op = Op::write_kv;
            i.cache = id(line, "cache", p.caches);
            const Cache &c = p.caches[i.cache];
            i.key = floats(line, "key", int64_t(c.heads) * c.width);
            i.value = floats(line, "value", int64_t(c.heads) * c.width);
            if (c.width % LANES) line.fail("a head's width must be a multiple of 16");
        } else if (name == "attend") {
            i.op = Op::attend;
            heads(line, i, true);
            i.query = floats(line, "query", int64_t(i.heads) * i.width);
            i.out = either(line, "out", int64_t(i.heads) * i.width);
            i.scale = line.real("scale");
            i.window = int32_t(line.whole("window", 0, INT32_MAX));
            same_rows(line, {i.query, i.out});
            if (p.buffers[i.query].wanted) line.fail("attention needs all rows");
            if (i.width > 256) line.fail("width must be at most 256");
            if (i.heads * i.width > p.most_heads_width) p.most_heads_width = i.heads * i.width;
            p.instrs.push_back(i);
            i.op = Op::attend_merge;
        } else if (name == "gateup") {
            i.op = Op::gateup;
            i.in = id(line, "in", p.buffers);
            i.out = id(line, "out", p.buffers);
            i.gate = factor(line, "gate", i.in, p.buffers[i.out].width);
            i.up = factor(line, "up", i.in, p.buffers[i.out].width);
            i.gate_bias = vec(line, "gate_bias", p.buffers[i.out].width);
            i.up_bias = vec(line, "up_bias", p.buffers[i.out].width);
            same_rows(line, {i.in, i.out});
        } else if (name == "silu_mul") {
            i.op = Op::silu_mul;
            i.gate = floats(line, "gate", 0, true);
            i.up = floats(line, "up", p.buffers[i.gate].width);
            i.out = floats(line, "out", p.buffers[i.gate].width);
            same_rows(line, {i.gate, i.up, i.out});
        } else if (name == "add") {
            i.op = Op::add;
            i.a = floats(line, "a", 0, true);
            i.b = floats(line, "b", p.buffers[i.a].width);
            i.out = floats(line, "out", p.buffers[i.a].width);
            same_rows(line, {i.a, i.b, i.out});
        } else if (name == "select") {
            i.op = Op::select;
            i.in = floats(line, "in", 0, true);
            i.out = floats(line, "out", p.buffers[i.in].width);
            if (p.buffers[i.in].wanted || !p.buffers[i.out].wanted) line.fail("select goes from all rows to wanted ones");
        } else if (name == "moe") {
            moe(line, i);
        } else if (name == "reference") {
            i.op = Op::reference;
            for (const char *key : {"op", "in", "out"})
                if (line.has(key)) line.text(key);
        } else {
            line.fail(name + " is not an instruction");
        }
        p.instrs.push_back(i);
    }

    void moe(const Line &line, Instr &i) {
        i.experts = int32_t(line.whole("experts", 1, 1 << 16));
        i.top_k = int32_t(line.whole("top_k", 1, i.experts));
        i.renormalise = int32_t(line.whole("renormalise", 0, 1));
        i.in = floats(line, "in", 0, true);
        const int32_t hidden = p.buffers[i.in].width;
        i.out = floats(line, "out", hidden);
        if (p.buffers[i.in].wanted || p.buffers[i.out].wanted) line.fail("experts need all rows");
        i.router = id(line, "router", p.weights);
        if (p.weights[i.router].inputs != hidden || p.weights[i.router].outputs != i.experts)
            line.fail("the router does not fit");
        const char *const keys[3] = {"gate", "up", "down"};
        int32_t *const first[3] = {&i.gate, &i.up, &i.down};
        for (int32_t part = 0; part < 3; ++part) {
            *first[part] = id(line, keys[part], p.weights);
            if (*first[part] + i.experts > int32_t(p.weights.size())) line.fail("has too few weights behind it");
        }
        const Weight &gate = p.weights[i.gate], &down = p.weights[i.down];
        for (int32_t e = 0; e < i.experts; ++e) {
            const Weight &g = p.weights[i.gate + e], &u = p.weights[i.up + e], &d = p.weights[i.down + e];
            if (g.inputs != hidden || u.inputs != hidden || d.outputs != hidden || d.inputs != g.outputs ||
                u.outputs != g.outputs || g.outputs != gate.outputs)
                line.fail("expert " + std::to_string(e) + " has other shapes");
            if (info(g.kind).integer != info(gate.kind).integer || info(u.kind).integer != info(gate.kind).integer ||
                info(d.kind).integer != info(down.kind).integer)
                line.fail("experts mix integer and float weights");
        }
        for (Op part : {Op::moe_route, Op::moe_gateup}) {
            i.op = part;
            p.instrs.push_back(i);
        }
        i.op = Op::moe_down;
    }

    void line(const Line &line) {
        const std::string &what = line.words[0];
        if (ended) line.fail("stands behind the end");
        const int64_t counts[4] = {int64_t(p.buffers.size()), int64_t(p.weights.size()), int64_t(p.vectors.size()),
                                   int64_t(p.caches.size())};
        const char *const kinds[4] = {"buffer", "weight", "vector", "cache"};
        for (int32_t k = 0; k < 4; ++k) {
            if (what != kinds[k]) continue;
            if (line.words.size() < 2 || line.words[1] != std::to_string(counts[k]))
                line.fail("the next " + what + " is number " + std::to_string(counts[k]));
        }
        if (what == "buffer") buffer(line);
        else if (what == "weight") weight(line);
        else if (what == "vector") vector(line);
        else if (what == "cache") cache(line);
        else if (what == "do") instruction(line);
        else if (what == "end") ended = true;
        else line.fail(what + " is not known");
        line.check_all_used();
    }
};

}  // namespace

const KindInfo &info(Kind kind) { return KINDS[int32_t(kind)]; }

void parse(ss_program &program, const char *text, const uint8_t *weights, int64_t weight_bytes) {
    Parser parser{program, weights, weight_bytes, {}, false};
    std::istringstream stream(text);
    std::string raw;
    bool begun = false;
    for (int32_t number = 1; std::getline(stream, raw); ++number) {
        const size_t comment = raw.find('#');
        if (comment != std::string::npos) raw.resize(comment);
        Line line{number, {}, {}, {}};
        std::istringstream words(raw);
        for (std::string word; words >> word;) {
            const size_t equals = word.find('=');
            if (equals == std::string::npos) line.words.push_back(word);
            else line.values[word.substr(0, equals)] = word.substr(equals + 1);
        }
        if (line.words.empty() && line.values.empty()) continue;
        if (line.words.empty()) line.fail("begins with no name");
        if (!begun) {
            if (line.words.size() != 2 || line.words[0] != "slipstream-program" || line.words[1] != "1")
                line.fail("is not the beginning of a program of version 1");
            begun = true;
            continue;
        }
        parser.line(line);
    }
    if (!begun) throw std::string("the program is empty");
    program.first_of_line.push_back(int32_t(program.instrs.size()));

    std::map<int32_t, int64_t> offsets;
    int64_t total = 0;
    for (auto &slot : parser.slots) {
        offsets[slot.first] = total;
        total += padded(slot.second * program.max_rows) + 64;
    }
    program.memory.reset(new uint8_t[total + 64]());
    uint8_t *base = program.memory.get();
    base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
    for (Buffer &buffer : program.buffers) buffer.base = base + offsets[buffer.slot];
}

}  // namespace ss
