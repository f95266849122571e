// One MoE layer in one call: every (row, expert) pair whose expert is in the table, grouped by
// expert. Three phases: encode the rows; gate and up with their activation, encoded for the next
// product as it leaves the tiles; down, straight into the pair's output row. An element is summed
// as in gemm.h, so a pair's bits depend neither on other pairs nor on other experts.
#pragma once
#include <algorithm>
#include <vector>

#include "activations.h"

struct Block {  // some rows of one expert
    const uint8_t* record;
    int64_t first;  // in the order of `pairs`
    int rows;
};

// A phase's work as one sequence (block after block, unit after unit), divided so that each thread
// reads long runs first and short ones at the end.
class Cuts {
  public:
    static constexpr int CHEAPEST = 8;  // fewer rows cost as much: the weights' bytes
    void plan(const std::vector<Block>& blocks) {
        before_.assign(1, 0);
        for (const Block& block : blocks) before_.push_back(before_.back() + std::max(block.rows, CHEAPEST));
    }
    // Where run `index` of threads * LEVELS begins, for blocks of `units` each.
    int64_t start(int64_t index, int64_t threads, int64_t units) const {
        const int64_t blocks = int64_t(before_.size()) - 1;
        if (index >= threads * LEVELS) return blocks * units;
        const double at = part_before(index, threads) * double(before_.back());
        const int64_t block = std::upper_bound(before_.begin(), before_.end(), int64_t(at)) - before_.begin() - 1;
        const double share = (at - double(before_[block])) / double(before_[block + 1] - before_[block]);
        return block * units + int64_t(share * double(units));
    }

  private:
    std::vector<int64_t> before_;  // cost of the blocks before each
};

struct ExpertSpace {
    InputBuffers rows, inner;
    std::vector<int32_t> starts, pairs;
    std::vector<Block> blocks;
    Cuts cuts;
};

// Sorts the pairs by expert (stable) and cuts each expert's rows into blocks.
static inline void group(ExpertSpace& s, const ExpertCall& call) {
    const int64_t all = call.tokens * call.top_k;
    const auto expert_of = [&](int64_t pair) {
        const int32_t id = call.ids[pair];
        return id >= 0 && id < call.num_experts && call.records[id] ? id : -1;
    };
    s.starts.assign(call.num_experts + 1, 0);
    for (int64_t pair = 0; pair < all; ++pair)
        if (const int32_t id = expert_of(pair); id >= 0) ++s.starts[id + 1];
    for (int64_t e = 0; e < call.num_experts; ++e) s.starts[e + 1] += s.starts[e];
    s.pairs.resize(s.starts.back());
    s.blocks.clear();
    for (int64_t e = 0; e < call.num_experts; ++e) {
        const int64_t rows = s.starts[e + 1] - s.starts[e], count = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        const int64_t step = count ? round_up((rows + count - 1) / count, 4) : 1;
        for (int64_t row = 0; row < rows; row += step)
            s.blocks.push_back({call.records[e], s.starts[e] + row, int(std::min(step, rows - row))});
    }
    for (int64_t pair = 0; pair < all; ++pair)
        if (const int32_t id = expert_of(pair); id >= 0) s.pairs[s.starts[id]++] = int32_t(pair);
    s.cuts.plan(s.blocks);
}

struct RowView {
    Input in;
    int64_t row;  // of the block's first
};

// The encoded rows of a block, contiguous: in place, or copied into this thread's scratch.
class Gather {
  public:
    RowView rows(const Input& in, unsigned forms, const int32_t* pairs, int count, int64_t top_k) {
        bool together = true;
        for (int m = 1; m < count; ++m) together &= pairs[m] / top_k == pairs[0] / top_k + m;
        if (together) return {in, pairs[0] / top_k};
        RowView view{in, 0};
        const auto copy = [&](auto& from, int64_t width, Buffer& to) {
            using T = std::remove_const_t<std::remove_reference_t<decltype(*from)>>;
            T* out = to.need<T>(count * width);
            for (int m = 0; m < count; ++m) memcpy(out + m * width, from + pairs[m] / top_k * width, width * sizeof(T));
            from = out;
        };
        if (forms & FORM_F32) copy(view.in.x, in.ldx, x_);
        if (forms & FORM_BF16) copy(view.in.bf16, in.ld_bf16, bf16_);
        if (forms & FORM_PLANES) {
            copy(view.in.planes, in.ld_groups * 2 * GROUP, planes_);
            copy(view.in.scale, in.ld_groups, scale_);
            copy(view.in.sum, in.ld_groups, sum_);
            copy(view.in.isum, in.ld_groups, isum_);
        }
        if (forms & FORM_HALVES) copy(view.in.half_sum, 2 * in.ld_groups, half_sum_);
        return view;
    }

  private:
    Buffer x_, bf16_, planes_, scale_, sum_, isum_, half_sum_;
};

constexpr int WIDTH = PANELS_AT_ONCE * PANEL;      // columns of one tile
constexpr int64_t TILE_FLOATS = int64_t(WIDTH) * ROW_BLOCK;

static inline void part_tile(const ExpertPart& part, const Block& block, const RowView& view, int64_t k, int64_t panel, int panels, float* tile) {
    const int64_t bytes = panel_bytes(part.kind, k);
    const TileJob job{block.record + part.offset + panel * bytes, bytes, panels, &view.in, view.row,
                      block.rows, k, tile};
    run_tile(part.kind, job);
}

// Columns 0 .. width of row m of a tile, with the bias of the columns from `column` on.
static inline void tile_row(const float* tile, int rows, int m, const Block& block, const ExpertPart& part, int64_t column, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += PANEL)
        memcpy(out + i, tile + (i / PANEL * rows + m) * PANEL, std::min<int64_t>(PANEL, width - i) * sizeof(float));
    if (part.bias < 0) return;
    const float* bias = reinterpret_cast<const float*>(block.record + part.bias) + column;
    for (int64_t i = 0; i < width; ++i) out[i] += bias[i];
}

class ExpertRun {
  public:
    ExpertRun(const ExpertCall& call, ExpertSpace& space)
        : call_(call), shape_(call.shape), space_(space),
          inner_parts_{{shape_.inner[0].kind, 0, nullptr}, {shape_.inner[shape_.num_inner - 1].kind, 0, nullptr}},
          outer_part_{shape_.outer.kind, 0, nullptr}, inner_{2, 0, shape_.hidden, 0, inner_parts_},
          outer_{1, 0, shape_.intermediate, 0, &outer_part_} {}

    // Before the team starts: room for the rows and for `pairs` of them.
    void reserve(int64_t pairs) {
        space_.rows.reserve(inner_, call_.tokens);
        space_.inner.reserve(outer_, pairs);
    }

    void operator()(Team& team) {
        Encoder rows(space_.rows, inner_), between(space_.inner, outer_);
        rows.fill(team, call_.tokens, [&](int64_t row, int64_t from, int64_t to, float* out) {
            memcpy(out, call_.x + row * shape_.hidden + from, (to - from) * sizeof(float));
        });
        share(team, (shape_.intermediate + GROUP - 1) / GROUP, [&](const Block& block, int64_t from, int64_t to) {
            static thread_local Gather gather;
            const RowView view = gather.rows(rows.input(), rows.forms(), pairs(block), block.rows, call_.top_k);
            for (; from < to; from += WIDTH / GROUP)
                inner(block, view, between, from * GROUP, std::min<int64_t>({to, from + WIDTH / GROUP}) * GROUP);
        });
        share(team, (shape_.hidden + PANEL - 1) / PANEL, [&](const Block& block, int64_t from, int64_t to) {
            const RowView view{between.input(), block.first};
            for (; from < to; from += PANELS_AT_ONCE)
                outer(block, view, from, int(std::min<int64_t>(PANELS_AT_ONCE, to - from)));
        });
    }

  private:
    const int32_t* pairs(const Block& block) const { return space_.pairs.data() + block.first; }

    // run(block, from, to) over the units of every block.
    template <class Run> void share(Team& team, int64_t units, Run run) {
        const int64_t threads = team.size();
        team.share(threads * LEVELS, 1, [&](int64_t task, int64_t) {
            int64_t at = space_.cuts.start(task, threads, units);
            const int64_t end = space_.cuts.start(task + 1, threads, units);
            while (at < end) {
                const int64_t from = at % units, to = std::min(units, from + end - at);
                run(space_.blocks[at / units], from, to);
                at += to - from;
            }
        });
    }

    // Columns from .. to of the inner products, activated and encoded for the outer one.
    void inner(const Block& block, const RowView& view, Encoder& between, int64_t from, int64_t to) {
        alignas(64) float tile[2][TILE_FLOATS], row[2][WIDTH];
        to = std::min<int64_t>(to, shape_.intermediate);
        const int panels = int((to - from + PANEL - 1) / PANEL);
        for (int i = 0; i < shape_.num_inner; ++i)
            part_tile(shape_.inner[i], block, view, shape_.hidden, from / PANEL, panels, tile[i]);
        for (int m = 0; m < block.rows; ++m) {
            for (int i = 0; i < shape_.num_inner; ++i)
                tile_row(tile[i], block.rows, m, block, shape_.inner[i], from, to - from, row[i]);
            between.put(block.first + m, from, to, [&](int64_t, int64_t, int64_t, float* out) {
                if (shape_.num_inner == 2) silu_product(row[0], row[1], to - from, out);
                else gelu(row[0], to - from, out);
            });
        }
    }

    void outer(const Block& block, const RowView& view, int64_t panel, int panels) {
        alignas(64) float tile[TILE_FLOATS];
        part_tile(shape_.outer, block, view, shape_.intermediate, panel, panels, tile);
        const int64_t column = panel * PANEL, width = std::min<int64_t>(panels * PANEL, shape_.hidden - column);
        for (int m = 0; m < block.rows; ++m)
            tile_row(tile, block.rows, m, block, shape_.outer, column, width,
                     call_.out + pairs(block)[m] * int64_t(shape_.hidden) + column);
    }

    const ExpertCall& call_;
    const ExpertShape& shape_;
    ExpertSpace& space_;
    Part inner_parts_[2], outer_part_;
    Matrix inner_, outer_;  // for their kinds and widths alone
};

// total[i] = sum over k, in its order, of weights[k] * rows[k][i].
static inline void combine_row(const float* rows, const float* weights, int64_t top_k, int64_t width, float* total) {
    for (int64_t i = 0; i < width; ++i) total[i] = weights[0] * rows[i];
    for (int64_t k = 1; k < top_k; ++k)
        for (int64_t i = 0; i < width; ++i) total[i] += weights[k] * rows[k * width + i];
}
