#include "share.h"

#include <algorithm>

#include "activations.h"

static int64_t matrix_bytes(int32_t kind, int64_t elements) {
    return kind == KIND_F32 ? elements * 4 : kind == KIND_BF16 ? elements * 2 : kind == KIND_INT8 ? elements : elements / 2;
}
static int64_t scale_bytes(int32_t kind, int64_t elements) {
    return kind == KIND_INT8 ? elements / GROUP * 2 : kind == KIND_INT4 ? elements / GROUP * 4 : 0;
}

void ShareRun::reserve(const ShareLayer* layers, int64_t count, int64_t max_rows, int64_t max_pairs) {
    int64_t hidden = 0;
    for (int64_t i = 0; i < count; ++i) {
        hidden = std::max<int64_t>(hidden, layers[i].hidden);
        inner_ = std::max<int64_t>(inner_, layers[i].intermediate);
    }
    // no kind has more than four bytes a column, or longer steps
    x_bytes_ = 4 * round_up(hidden, 4 * VB), act_bytes_ = 4 * round_up(inner_, 4 * VB);
    max_rows_ = max_rows, max_pairs_ = max_pairs;
    x_.need<uint8_t>(max_rows * x_bytes_), acts_.need<uint8_t>(max_pairs * act_bytes_);
    gates_.need<float>(max_pairs * inner_), ups_.need<float>(max_pairs * inner_);
    pairs_.resize(max_pairs), blocks_.resize(max_pairs);
}

bool ShareRun::valid(const SharePair& pair) const {
    const ShareLayer& layer = *job_.layer;
    return pair.expert >= 0 && pair.expert < layer.experts && layer.records[pair.expert] && pair.row >= 0 && pair.row < job_.rows && pair.taken > 0 &&
           pair.taken <= layer.intermediate && pair.taken % GROUP == 0;
}

int64_t ShareRun::prepare(const ShareJob& job) {
    job_ = job, num_pairs_ = 0, units_ = 0;
    job_.rows = std::min(job.rows, max_rows_);
    for (int64_t i = 0; i < std::min(job.num_pairs, max_pairs_); ++i)
        if (valid(job.pairs[i])) pairs_[num_pairs_++] = job.pairs[i];
    // few: by insertion, which keeps the order of the rows
    const auto before = [](const SharePair& a, const SharePair& b) {
        return a.expert != b.expert ? a.expert < b.expert : a.taken < b.taken;
    };
    for (int64_t i = 1; i < num_pairs_; ++i)
        for (int64_t j = i; j > 0 && before(pairs_[j], pairs_[j - 1]); --j) std::swap(pairs_[j], pairs_[j - 1]);
    const ShareLayer& layer = *job.layer;
    int64_t blocks = 0, bytes = 0;
    for (int64_t i = 0, end; i < num_pairs_; i = end) {
        const SharePair& first = pairs_[i];
        for (end = i; end < num_pairs_ && !before(first, pairs_[end]);) ++end;
        blocks_[blocks++] = {layer.records[first.expert], i, end - i, first.taken, units_};
        units_ += first.taken / AT_ONCE;
        const int64_t elements = 3 * int64_t(first.taken) * layer.hidden;
        bytes += matrix_bytes(layer.kind, elements) + scale_bytes(layer.kind, elements);
    }
    num_blocks_ = blocks;
    return bytes;
}

static int64_t grain_of(int64_t count, const Team& team) { return std::max<int64_t>(1, count / team.size()); }

// f(rows of x from m on, as a constant) over all rows.
template <class F> CT_INLINE void by_rows(int64_t count, F f) {
    int64_t m = 0;
    if constexpr (VECTORS)  // one at a time elsewhere: the compiler would take minutes
        for (; m + 4 <= count; m += 4) f(m, std::integral_constant<int, 4>{});
    for (; m < count; ++m) f(m, std::integral_constant<int, 1>{});
}

// Groups of x that are encoded for `columns`: those of whole steps, the last of them zero.
template <int KIND> static int64_t groups_of(int64_t columns) {
    return round_up(columns, std::max(Rows<KIND>::COLUMNS, GROUP)) / GROUP;
}

template <int KIND> void ShareRun::encode(Team& team) {
    const int64_t hidden = job_.layer->hidden, groups = groups_of<KIND>(hidden), tasks = job_.rows * groups;
    team.share(tasks, grain_of(tasks, team), [&](int64_t task, int64_t end) {
        static constexpr float none[GROUP] = {};
        for (; task < end; ++task) {
            const int64_t row = task / groups, at = task % groups * GROUP;
            Rows<KIND>::encode(at < hidden ? job_.x + row * hidden + at : none, at, x_.at<uint8_t>() + row * x_bytes_);
        }
    });
}

template <int KIND> void ShareRun::gate_up(Team& team) {
    const ShareLayer& layer = *job_.layer;
    const int64_t hidden = layer.hidden, inner = layer.intermediate;
    const int64_t stride = matrix_bytes(KIND, hidden), scale_stride = scale_bytes(KIND, hidden);
    // units of one block: channels from `from` to `from + AT_ONCE * step`
    const auto products = [&](const Block& block, int64_t from, int64_t step) {
        const RowMatrix matrix{block.record, block.record + layer.gate_up_scales_at, stride, scale_stride};
        for (int64_t channel = from; channel < from + step; ++channel)
            by_rows(block.count, [&](int64_t m, auto count) {
                constexpr int M = decltype(count)::value;
                const uint8_t* x[M];
                float gate[AT_ONCE * M], up[AT_ONCE * M];
                for (int i = 0; i < M; ++i) x[i] = x_.at<uint8_t>() + pairs_[block.first + m + i].row * x_bytes_;
                row_products<KIND, M>(matrix, channel, step, hidden, x, gate);
                row_products<KIND, M>(matrix, inner + channel, step, hidden, x, up);
                for (int i = 0; i < M; ++i)
                    for (int r = 0; r < AT_ONCE; ++r) {
                        const int64_t at = (block.first + m + i) * inner_ + channel + r * step;
                        gates_.at<float>()[at] = gate[r * M + i], ups_.at<float>()[at] = up[r * M + i];
                    }
            });
    };
    team.share_shrinking(units_, [&](int64_t unit, int64_t end) {
        int64_t index = num_blocks_ - 1;
        while (blocks_[index].units > unit) --index;
        for (; unit < end; ++index) {
            const Block& block = blocks_[index];
            const int64_t to = std::min(end, block.units + block.taken / AT_ONCE);
            products(block, (unit - block.units) * AT_ONCE, to - unit);
            unit = to;
        }
    });
}

template <int KIND> void ShareRun::activate(Team& team) {
    const int64_t groups = groups_of<KIND>(job_.layer->intermediate), tasks = num_blocks_ * groups;
    team.share(tasks, grain_of(tasks, team), [&](int64_t task, int64_t end) {
        alignas(64) float acts[GROUP];
        for (; task < end; ++task) {
            const Block& block = blocks_[task / groups];
            const int64_t at = task % groups * GROUP;
            if (at >= groups_of<KIND>(block.taken) * GROUP) continue;
            for (int64_t pair = block.first; pair < block.first + block.count; ++pair) {
                const int64_t place = pair * inner_ + at;
                memset(acts, 0, sizeof(acts));
                if (at < block.taken) silu_product(gates_.at<float>() + place, ups_.at<float>() + place, GROUP, acts);
                Rows<KIND>::encode(acts, at, acts_.at<uint8_t>() + pair * act_bytes_);
            }
        }
    });
}

template <int KIND> void ShareRun::down(Team& team) {
    const ShareLayer& layer = *job_.layer;
    const int64_t hidden = layer.hidden, units = hidden / AT_ONCE;
    const int64_t stride = matrix_bytes(KIND, layer.intermediate), scale_stride = scale_bytes(KIND, layer.intermediate);
    team.share_shrinking(units, [&](int64_t unit, int64_t end) {
        const int64_t from = unit * AT_ONCE, step = end - unit;
        for (int64_t row = 0; row < job_.rows; ++row)
            memset(job_.out + row * hidden + from, 0, AT_ONCE * step * sizeof(float));
        // expert after expert: the rows of one are neighbours
        for (int64_t index = 0; index < num_blocks_; ++index) {
            const Block& block = blocks_[index];
            const RowMatrix matrix{block.record + layer.down_at, block.record + layer.down_scales_at, stride, scale_stride};
            for (int64_t at = from; at < from + step; ++at)
                by_rows(block.count, [&](int64_t m, auto count) {
                    constexpr int M = decltype(count)::value;
                    const uint8_t* x[M];
                    float sums[AT_ONCE * M];
                    for (int i = 0; i < M; ++i) x[i] = acts_.at<uint8_t>() + (block.first + m + i) * act_bytes_;
                    row_products<KIND, M>(matrix, at, step, block.taken, x, sums);
                    for (int i = 0; i < M; ++i) {
                        const SharePair& pair = pairs_[block.first + m + i];
                        for (int r = 0; r < AT_ONCE; ++r) job_.out[pair.row * hidden + at + r * step] += pair.weight * sums[r * M + i];
                    }
                });
        }
    });
}

template <int KIND> void ShareRun::run(Team& team) {
    encode<KIND>(team);
    gate_up<KIND>(team);
    activate<KIND>(team);
    down<KIND>(team);
}

void ShareRun::operator()(Team& team) {
    switch (job_.layer->kind) {
        case KIND_F32: return run<KIND_F32>(team);
        case KIND_BF16: return run<KIND_BF16>(team);
        case KIND_INT8: return run<KIND_INT8>(team);
        default: return run<KIND_INT4>(team);
    }
}
