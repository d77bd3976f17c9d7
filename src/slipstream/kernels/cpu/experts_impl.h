// Mixture of experts in three steps: the router's choice, both first halves of every chosen expert, their second
// halves. An expert that is chosen is read once, whatever the number of rows that chose it.

inline float *shares_of(ss_program &p, const Instr &in, int32_t row) {
    return p.step.shares.data() + int64_t(row) * in.experts;
}

inline uint8_t *expert_input(ss_program &p, const Instr &in, int32_t row) {
    const int64_t blocks = (p.buffers[in.in].width + BLOCK - 1) / BLOCK;
    return p.step.expert_input.data() + row * blocks * Q8_BLOCK_BYTES;
}

inline uint8_t *expert_hidden(ss_program &p, const Instr &in, int32_t slot) {
    const Weight &down = p.weights[in.down];
    const int64_t blocks = (down.inputs + BLOCK - 1) / BLOCK;
    return p.step.expert_hidden.data() + slot * blocks * (info(down.kind).integer ? Q8_BLOCK_BYTES : 4 * BLOCK);
}

inline void choose_experts(ss_program &p, const Instr &in, int32_t row) {
    const Weight &router = p.weights[in.router];
    float *share = shares_of(p, in, row);
    Rows x;
    x.at[0] = info(router.kind).integer ? expert_input(p, in, row) : p.buffers[in.in].row<uint8_t>(row);
    float highest = -INFINITY;
    F y[2][GROUP];
    for (int32_t t = 0; t < router.tiles; ++t) {
        if (t % 2 == 0) product(router, t / 2, x, 1, Pass{0, 1, router.tile(t + 2)}, y);
        const int32_t left = in.experts - t * LANES;
        store_n(share + t * LANES, y[t % 2][0], left < LANES ? left : LANES);
    }
    for (int32_t e = 0; e < in.experts; ++e) highest = share[e] > highest ? share[e] : highest;
    F sum = splat(0.0f);
    for (int32_t e = 0; e < in.experts; e += LANES) {
        const int32_t left = in.experts - e < LANES ? in.experts - e : LANES;
        const F weight = keep_first(exp16(sub(load_n(share + e, left), splat(highest))), left, splat(0.0f));
        store_n(share + e, weight, left);
        sum = add(sum, weight);
    }
    const float total = fold_add(sum);
    for (int32_t e = 0; e < in.experts; ++e) share[e] = share[e] / total;
    // The largest shares, equal ones by index; chosen ones are marked by their sign while others are looked for.
    for (int32_t k = 0; k < in.top_k; ++k) {
        int32_t best = -1;
        for (int32_t e = 0; e < in.experts; ++e)
            if (!std::signbit(share[e]) && (best < 0 || share[e] > share[best])) best = e;
        if (best < 0) break;
        share[best] = -share[best];
    }
    float chosen = 0;
    for (int32_t e = 0; e < in.experts; ++e)
        if (std::signbit(share[e])) chosen = chosen + -share[e];
    for (int32_t e = 0; e < in.experts; ++e) {
        if (!std::signbit(share[e])) share[e] = -1.0f;
        else share[e] = in.renormalise ? -share[e] / chosen : -share[e];
    }
}

inline void run_moe_route(ss_program &p, const Instr &in, int32_t piece) {
    const Buffer &from = p.buffers[in.in];
    const bool quantised = info(p.weights[in.router].kind).integer || info(p.weights[in.gate].kind).integer;
    const Range range = row_range(p.step.batch.num_rows, piece);
    for (int32_t r = range.begin; r < range.end; ++r) {
        if (quantised)
            quantise_row(from.row<float>(r), from.width, reinterpret_cast<Q8Block *>(expert_input(p, in, r)));
        choose_experts(p, in, r);
    }
}

inline void run_moe_gateup(ss_program &p, const Instr &in, int32_t piece) {
    const ExpertUse &use = p.step.uses[piece / p.step.pieces_per_expert];
    const Weight &gate = p.weights[in.gate + use.expert], &up = p.weights[in.up + use.expert];
    const bool quantised = info(gate.kind).integer, to_q8 = info(p.weights[in.down].kind).integer;
    const int32_t units = (gate.tiles + 1) / 2;
    const Range range = unit_range(units, p.step.units_per_piece, piece % p.step.pieces_per_expert);
    const Choice *choices = p.step.choices.data() + use.begin;
    in_panels(range, use.count, [&](int32_t unit, int32_t first, int32_t count, int32_t number, int32_t of) {
        const Pass in_gate{number, of, gate.tile(2 * unit + 2)}, in_up{number, of, up.tile(2 * unit + 2)};
        Rows x;
        for (int32_t r = 0; r < count; ++r) {
            const int32_t row = choices[first + r].row;
            x.at[r] = quantised ? expert_input(p, in, row) : p.buffers[in.in].row<uint8_t>(row);
        }
        F y[2][GROUP];
        gated_unit(p, in, gate, up, unit, x, count, in_gate, in_up, y);
        for (int32_t r = 0; r < count; ++r) {
            uint8_t *hidden = expert_hidden(p, in, choices[first + r].slot);
            if (to_q8) {
                quantise(y[0][r], y[1][r], reinterpret_cast<Q8Block *>(hidden) + unit);
            } else {
                store(reinterpret_cast<float *>(hidden) + 32 * unit, y[0][r]);
                store(reinterpret_cast<float *>(hidden) + 32 * unit + 16, y[1][r]);
            }
        }
    });
}

inline void run_moe_down(ss_program &p, const Instr &in, int32_t piece, Crew crew) {
    const Weight &any = p.weights[in.down];
    const Buffer &out = p.buffers[in.out];
    const int32_t rows = p.step.batch.num_rows;
    const Cut cut = cut_of(p, in, crew.workers);
    const Range range = unit_range(cut.units, cut.in_piece, piece);
    for (int32_t unit = range.begin; unit < range.end; ++unit) {
        const int32_t at = unit * 2 * LANES, tiles = any.tiles - 2 * unit < 2 ? 1 : 2;
        for (int32_t r = 0; r < rows; ++r)
            for (int32_t t = 0; t < tiles; ++t) store(out.row<float>(r) + at + t * LANES, splat(0.0f));
        for (const ExpertUse &use : p.step.uses) {
            const Choice *choices = p.step.choices.data() + use.begin;
            for (int32_t first = 0; first < use.count; first += GROUP) {
                const int32_t count = first + GROUP < use.count ? GROUP : use.count - first;
                Rows x;
                for (int32_t r = 0; r < count; ++r) x.at[r] = expert_hidden(p, in, choices[first + r].slot);
                F y[2][GROUP];
                const Weight &down = p.weights[in.down + use.expert];
                const Pass pass{first / GROUP, (use.count + GROUP - 1) / GROUP, down.tile(2 * unit + 2)};
                product(down, unit, x, count, pass, y);
                for (int32_t r = 0; r < count; ++r) {
                    const F share = splat(choices[first + r].share);
                    float *sum = out.row<float>(choices[first + r].row) + at;
                    for (int32_t t = 0; t < tiles; ++t, sum += LANES) store(sum, fma(share, y[t][r], load(sum)));
                }
            }
        }
    }
}
