#include "share.h"

#include <algorithm>

#include "activations.h"

static int64_t matrix_bytes(int32_t kind, int64_t elements) {
    return kind == KIND_F32 ? elements * 4 : kind == KIND_BF16 ? elements * 2 : kind == KIND_INT8 ? elements : elements / 2;
}
static int64_t scale_bytes(int32_t kind, int64_t elements) {
    return kind == KIND_INT8 ? elements / GROUP * 2 : kind == KIND_INT4 ? elements / GROUP * 4 : 0;
}

ShareRun::ShareRun(const ShareLayer* layers, int64_t count, int64_t max_rows, int64_t max_pairs) {
    int64_t hidden = 0, experts = 0;
    for (int64_t i = 0; i < count; ++i) {
        hidden = std::max<int64_t>(hidden, layers[i].hidden);
        inner_ = std::max<int64_t>(inner_, layers[i].intermediate);
        experts = std::max<int64_t>(experts, layers[i].experts);
    }
    // no kind has more than four bytes a column, or longer steps
    x_bytes_ = 4 * round_up(hidden, 4 * VB), act_bytes_ = 4 * round_up(inner_, 4 * VB);
    max_rows_ = max_rows, max_pairs_ = max_pairs;
    x_.need<uint8_t>(max_rows * x_bytes_), acts_.need<uint8_t>(max_pairs * act_bytes_);
    gates_.need<float>(max_pairs * inner_), ups_.need<float>(max_pairs * inner_);
    pairs_.resize(max_pairs), blocks_.resize(max_pairs), order_.resize(experts);
    finished_ = std::vector<std::atomic<uint32_t>>(max_pairs * (inner_ / GROUP));
}

bool ShareRun::valid(const SharePair& pair) const {
    const ShareLayer& layer = *job_.layer;
    return pair.expert >= 0 && pair.expert < layer.experts && layer.records[pair.expert] && pair.row >= 0 && pair.row < job_.rows && pair.taken > 0 &&
           pair.taken <= layer.intermediate && pair.taken % GROUP == 0;
}

int64_t ShareRun::prepare(const ShareJob& job) {
    job_ = job, num_pairs_ = 0, num_blocks_ = 0, rest_ = 0;
    job_.rows = std::min(job.rows, max_rows_);
    for (int64_t i = 0; i < std::min(job.num_pairs, max_pairs_); ++i)
        if (const SharePair pair = job.pairs[i]; valid(pair)) pairs_[num_pairs_++] = pair;
    for (int64_t i = num_pairs_ - 1; i >= 0; --i) order_[pairs_[i].expert] = int32_t(i);
    // experts in the order in which they come, as a hint has them; few: by insertion, which keeps the
    // order of the rows
    const auto before = [&](const SharePair& a, const SharePair& b) {
        return a.expert != b.expert ? order_[a.expert] < order_[b.expert] : a.taken < b.taken;
    };
    for (int64_t i = 1; i < num_pairs_; ++i)
        for (int64_t j = i; j > 0 && before(pairs_[j], pairs_[j - 1]); --j) std::swap(pairs_[j], pairs_[j - 1]);
    const ShareLayer& layer = *job.layer;
    int64_t bytes = 0;
    for (int64_t i = 0, end; i < num_pairs_; i = end) {
        const SharePair& first = pairs_[i];
        for (end = i; end < num_pairs_ && !before(first, pairs_[end]);) ++end;
        const Block& block = blocks_[num_blocks_++] = {layer.records[first.expert], i, end - i, first.taken, rest_};
        rest_ += block.units() - block.half();
        const int64_t elements = 3 * int64_t(first.taken) * layer.hidden;
        bytes += matrix_bytes(layer.kind, elements) + scale_bytes(layer.kind, elements);
    }
    for (int64_t i = 0; i < num_blocks_ * (inner_ / GROUP); ++i) finished_[i].store(0, std::memory_order_relaxed);
    return bytes;
}

struct Slice {  // rows of a matrix
    int64_t from, end;
};
// A thread's own part of the first half of a phase with so many units.
static Slice own_part(int64_t half, int64_t thread, int64_t threads) {
    return {half * thread / threads * AT_ONCE, half * (thread + 1) / threads * AT_ONCE};
}

static void add_rows(ReadAhead& ahead, const uint8_t* data, const uint8_t* scales, int32_t kind, int64_t columns, Slice rows) {
    const int64_t stride = matrix_bytes(kind, columns), scale_stride = scale_bytes(kind, columns);
    ahead.add(data + rows.from * stride, (rows.end - rows.from) * stride);
    ahead.add(scales + rows.from * scale_stride, (rows.end - rows.from) * scale_stride);
}
static void add_gate_up(ReadAhead& ahead, const ShareLayer& layer, const uint8_t* record, Slice rows) {
    for (const int64_t first : {int64_t(0), int64_t(layer.intermediate)})
        add_rows(ahead, record, record + layer.gate_up_scales_at, layer.kind, layer.hidden, {first + rows.from, first + rows.end});
}

bool ShareHints::read_ahead(const volatile ShareHint& hint, int thread) {
    Waiting& own = waiting_[thread];
    const int64_t jobs = jobs_, since = jobs - own.jobs;
    if (!own.free && (since > 1 || (since == 1 && last_ == own.layer))) own.free = true, own.ahead.clear();
    const int32_t number = hint.layer, turn = hint.turn, experts = hint.count;
    const bool is_new = experts > 0 && number >= 0 && number < count_ && (own.layer != layers_ + number || own.turn != turn);
    if (!own.free || !is_new) return own.ahead.some();
    const ShareLayer& layer = layers_[number];
    own.layer = &layer, own.turn = turn, own.count = 0, own.jobs = jobs, own.free = false;
    const Slice rows = own_part(layer.intermediate / AT_ONCE / 2, thread, int64_t(waiting_.size()));
    for (int i = 0; i < std::min(experts, ShareHint::MOST); ++i) {
        const int32_t expert = hint.experts[i];
        if (expert < 0 || expert >= layer.experts || !layer.records[expert]) continue;
        own.experts[own.count++] = expert;
        add_gate_up(own.ahead, layer, layer.records[expert], rows);
    }
    return own.ahead.some();
}

bool ShareHints::named(const ShareLayer* layer, int32_t expert) const {
    const Waiting& own = waiting_[0];
    const int32_t* const end = own.experts + own.count;
    return own.layer == layer && std::find(own.experts, end, expert) != end;
}

void ShareHints::begin(const ShareLayer* layer) {
    if (waiting_[0].layer == layer) waiting_[0].count = 0;
    last_ = layer, ++jobs_;
}

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

template <int KIND> void ShareRun::encode(CrewTeam& team) {
    const int64_t hidden = job_.layer->hidden, groups = groups_of<KIND>(hidden), tasks = job_.rows * groups;
    ReadAhead ahead;
    for (int64_t i = 0; i < std::min<int64_t>(num_blocks_, 2); ++i)
        add_gate_up(ahead, *job_.layer, blocks_[i].record, own_part(blocks_[i].half(), team.index(), team.size()));
    const auto own = [&](int64_t thread, int64_t) {
        static constexpr float none[GROUP] = {};
        for (int64_t task = tasks * thread / team.size(); task < tasks * (thread + 1) / team.size(); ++task) {
            const int64_t row = task / groups, at = task % groups * GROUP;
            Rows<KIND>::encode(at < hidden ? job_.x + row * hidden + at : none, at, x_.at<uint8_t>() + row * x_bytes_);
        }
    };
    team.work(1, own, 0, [](int64_t, int64_t) {}, true, [&] { return ahead.some(); });
}

template <int KIND> void ShareRun::gate_up(CrewTeam& team) {
    const ShareLayer& layer = *job_.layer;
    const int64_t hidden = layer.hidden, inner = layer.intermediate;
    const int64_t stride = matrix_bytes(KIND, hidden), scale_stride = scale_bytes(KIND, hidden);
    // channels from `from` to `end` of one block, AT_ONCE of them together
    const auto products = [&](int64_t index, Slice rows) {
        const Block& block = blocks_[index];
        const RowMatrix matrix{block.record, block.record + layer.gate_up_scales_at, stride, scale_stride};
        const int64_t step = (rows.end - rows.from) / AT_ONCE;
        for (int64_t channel = rows.from; channel < rows.from + step; ++channel)
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
        activate<KIND>(index, rows.from, rows.end);
    };
    const auto own = [&](int64_t thread, int64_t index) { products(index, own_part(blocks_[index].half(), thread, team.size())); };
    const auto rest = [&](int64_t unit, int64_t end) {
        int64_t index = num_blocks_ - 1;
        while (blocks_[index].rest > unit) --index;
        for (; unit < end; ++index) {
            const Block& block = blocks_[index];
            const int64_t first = block.half() - block.rest, to = std::min(end, block.units() - first);
            products(index, {(first + unit) * AT_ONCE, (first + to) * AT_ONCE});
            unit = to;
        }
    };
    ReadAhead ahead;
    const Slice rows = own_part(layer.hidden / AT_ONCE / 2, team.index(), team.size());
    for (int64_t i = 0; i < std::min<int64_t>(num_blocks_, 4); ++i) {
        const uint8_t* record = blocks_[i].record;
        add_rows(ahead, record + layer.down_at, record + layer.down_scales_at, KIND, inner, rows);
    }
    team.work(num_blocks_, own, rest_, rest, true, [&] { return ahead.some(); });
}

// Channels of a block are there: who finishes a group activates it and encodes it for `down`. Who comes
// with channels that were there already does so again, from the same values.
static_assert(GROUP == 32, "a bit for each channel of a group");
constexpr uint32_t ALL_CHANNELS = ~uint32_t(0);
template <int KIND> void ShareRun::activate(int64_t index, int64_t channel, int64_t end) {
    const Block& block = blocks_[index];
    alignas(64) float acts[GROUP];
    while (channel < end) {
        const int64_t group = channel / GROUP, next = std::min(end, (group + 1) * GROUP);
        const uint32_t own = uint32_t(((uint64_t(1) << (next - channel)) - 1) << (channel % GROUP));
        channel = next;
        may_lose_core();
        if ((finished_[index * (inner_ / GROUP) + group].fetch_or(own, std::memory_order_acq_rel) | own) != ALL_CHANNELS) continue;
        // behind the last one the rest of a step is zero
        const bool last = (group + 1) * GROUP == block.taken;
        const int64_t groups = last ? groups_of<KIND>(block.taken) : group + 1;
        for (int64_t pair = block.first; pair < block.first + block.count; ++pair)
            for (int64_t at = group * GROUP; at < groups * GROUP; at += GROUP) {
                const int64_t place = pair * inner_ + at;
                memset(acts, 0, sizeof(acts));
                if (at < block.taken) silu_product(gates_.at<float>() + place, ups_.at<float>() + place, GROUP, acts);
                Rows<KIND>::encode(acts, at, acts_.at<uint8_t>() + pair * act_bytes_);
            }
    }
}

template <int KIND> void ShareRun::down(CrewTeam& team) {
    const ShareLayer& layer = *job_.layer;
    const int64_t hidden = layer.hidden, units = hidden / AT_ONCE, half = units / 2;
    const int64_t stride = matrix_bytes(KIND, layer.intermediate), scale_stride = scale_bytes(KIND, layer.intermediate);
    const auto products = [&](Slice rows) {
        const int64_t from = rows.from, width = rows.end - rows.from, step = width / AT_ONCE;
        static thread_local Buffer sums;  // others may compute the same
        float* const total = sums.need<float>(job_.rows * width);
        memset(total, 0, job_.rows * width * sizeof(float));
        // expert after expert: the rows of one are neighbours
        for (int64_t index = 0; index < num_blocks_; ++index) {
            const Block& block = blocks_[index];
            const RowMatrix matrix{block.record + layer.down_at, block.record + layer.down_scales_at, stride, scale_stride};
            for (int64_t at = from; at < from + step; ++at)
                by_rows(block.count, [&](int64_t m, auto count) {
                    constexpr int M = decltype(count)::value;
                    const uint8_t* x[M];
                    float found[AT_ONCE * M];
                    for (int i = 0; i < M; ++i) x[i] = acts_.at<uint8_t>() + (block.first + m + i) * act_bytes_;
                    row_products<KIND, M>(matrix, at, step, block.taken, x, found);
                    for (int i = 0; i < M; ++i) {
                        const SharePair& pair = pairs_[block.first + m + i];
                        for (int r = 0; r < AT_ONCE; ++r) total[pair.row * width + at - from + r * step] += pair.weight * found[r * M + i];
                    }
                });
        }
        for (int64_t row = 0; row < job_.rows; ++row)
            for (int64_t at = 0; at < width; ++at) {
                if (at == width / 2) may_lose_core();
                uint32_t bits;
                memcpy(&bits, total + row * width + at, 4);
                __atomic_store_n(job_.out + row * hidden + from + at, uint64_t(job_.number) << 32 | bits, __ATOMIC_RELAXED);
            }
    };
    const auto own = [&](int64_t thread, int64_t) { products(own_part(half, thread, team.size())); };
    const auto rest = [&](int64_t unit, int64_t end) { products({(half + unit) * AT_ONCE, (half + end) * AT_ONCE}); };
    // thread 0 answers; the others have nothing to wait for
    team.work(1, own, units - half, rest, team.index() == 0, [] { return false; });
}

template <int KIND> void ShareRun::run(CrewTeam& team) {
    encode<KIND>(team);
    gate_up<KIND>(team);
    down<KIND>(team);
}

void ShareRun::operator()(CrewTeam& team) {
    switch (job_.layer->kind) {
        case KIND_F32: return run<KIND_F32>(team);
        case KIND_BF16: return run<KIND_BF16>(team);
        case KIND_INT8: return run<KIND_INT8>(team);
        default: return run<KIND_INT4>(team);
    }
}
