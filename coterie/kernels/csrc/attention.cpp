#include "attention.h"

#include <limits>

#include "attention_tile.h"

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int SPLIT_ROWS = 4;  // sequences with at most this many new rows are cut along positions

void Attention::plan(const Shape& shape, const Batch& batch) {
    shape_ = shape, batch_ = batch;
    padded_ = int(round_up(shape.head_dim, 2 * VL));
    fold_ = shape.heads / shape.kv_heads;
    state_ = round_up(padded_ + 2, 16);
    const int block = fold_ >= MAX_COMBOS ? 1 : MAX_COMBOS / fold_;
    combos_ = block * fold_ > SPLIT_ROWS * fold_ ? block * fold_ : SPLIT_ROWS * fold_;
    tasks_.clear();
    int32_t partials = 0, groups = 0;
    for (int s = 0; s < batch.sequences; ++s) {
        const int begin = batch.query_starts[s], rows = batch.query_starts[s + 1] - begin;
        const int splits = (batch.context_lens[s] + SPLIT - 1) / SPLIT;
        if (rows <= 0) continue;
        for (int head = 0; head < shape.kv_heads; ++head) {
            if (rows > SPLIT_ROWS || splits == 1) {
                for (int row = (rows - 1) / block * block; row >= 0; row -= block)  // longest first
                    tasks_.push_back({s, head, begin + row, rows - row < block ? rows - row : block,
                                      0, splits, -1, 0, 0});
                continue;
            }
            for (int split = 0; split < splits; ++split)
                tasks_.push_back({s, head, begin, rows, split, 1, partials + split, groups, splits});
            partials += splits;
            ++groups;
        }
    }
    partials_.need<float>(int64_t(partials) * combos_ * state_);
    memset(done_.need<int32_t>(groups), 0, groups * sizeof(int32_t));
}

int Attention::visible(const AttentionTask& task, int row) const {
    const int n = batch_.query_starts[task.sequence + 1] - batch_.query_starts[task.sequence];
    const int index = task.row + row - batch_.query_starts[task.sequence];
    return batch_.context_lens[task.sequence] - n + index + 1;
}

// Folds a later split's state into `into`: values, max, sum.
static void merge(float* into, const float* from, int dim) {
    if (from[dim] == NEVER) return;
    if (into[dim] == NEVER) {
        memcpy(into, from, (dim + 2) * sizeof(float));
        return;
    }
    const float top = into[dim] > from[dim] ? into[dim] : from[dim];
    alignas(64) float factor[VL] = {into[dim] - top, from[dim] - top};
    vstore(factor, vexp(vload(factor)));
    for (int d = 0; d < dim; ++d) into[d] = into[d] * factor[0] + from[d] * factor[1];
    into[dim] = top;
    into[dim + 1] = into[dim + 1] * factor[0] + from[dim + 1] * factor[1];
}

static void clear(float* state, int combos, int64_t width, int dim) {
    for (int c = 0; c < combos; ++c) {
        memset(state + c * width, 0, width * sizeof(float));
        state[c * width + dim] = NEVER;
    }
}

static void write_out(const float* state, int padded, int dim, float* out) {
    const float inverse = 1.0f / state[padded + 1];
    for (int d = 0; d < dim; ++d) out[d] = state[d] * inverse;
}

void Attention::finish(const AttentionTask& task, const AttentionCall& call) {
    const int32_t first = task.partial - task.first_split;
    const int combos = task.rows * fold_;
    float* states = partials_.at<float>();
    for (int c = 0; c < combos; ++c) {
        float* total = states + (int64_t(first) * combos_ + c) * state_;
        for (int32_t i = 1; i < task.group_tasks; ++i)
            merge(total, states + (int64_t(first + i) * combos_ + c) * state_, padded_);
        const int64_t at = int64_t(task.row + c / fold_) * shape_.heads + task.kv_head * fold_ + c % fold_;
        write_out(total, padded_, shape_.head_dim, call.out + at * shape_.head_dim);
    }
}

template <class T> void Attention::run_task(const AttentionTask& task, const AttentionCall& call) {
    static thread_local Buffer scratch;
    const int combos = task.rows * fold_;
    const bool staged = combos > 2 * QK_ROWS || padded_ != shape_.head_dim;
    const int64_t states = combos_ * state_, scores = int64_t(combos_) * TILE;
    float* mine = scratch.need<float>(2 * states + scores + 2 * TILE * padded_);
    float* total = mine + states;
    TileWork work{combos, padded_, state_, mine, total + states, nullptr, nullptr, 0, 0};
    float* stage = work.scores + scores;
    const float* q[MAX_ROW_HEADS];
    int limit[MAX_ROW_HEADS];
    for (int c = 0; c < combos; ++c) {
        const int64_t head = int64_t(task.row + c / fold_) * shape_.heads + task.kv_head * fold_ + c % fold_;
        q[c] = call.q + head * padded_;
        limit[c] = visible(task, c / fold_);
    }
    work.q = q, work.limit = limit;
    const KvView<T> view(*call.cache, shape_, batch_, task.sequence, task.kv_head);
    const int most = limit[combos - 1];
    for (int split = task.first_split; split < task.first_split + task.splits; ++split) {
        clear(mine, combos, state_, padded_);
        const int end = (split + 1) * SPLIT < most ? (split + 1) * SPLIT : most;
        for (int start = split * SPLIT; start < end; start += TILE) {
            work.start = start, work.count = end - start < TILE ? end - start : TILE;
            if (staged) {
                TileRows<float> rows;
                view.stage(work, stage, rows);
                attend_tile(work, rows);
            } else {
                TileRows<T> rows;
                const int left = end - start - work.count;
                view.point(work, left < TILE ? left : TILE, rows);
                attend_tile(work, rows);
            }
        }
        if (task.partial >= 0) break;
        for (int c = 0; c < combos; ++c) {
            float* into = total + c * state_;
            if (split == 0) memcpy(into, mine + c * state_, state_ * sizeof(float));
            else merge(into, mine + c * state_, padded_);
        }
    }
    if (task.partial < 0) {
        for (int c = 0; c < combos; ++c) {
            const int64_t at = int64_t(task.row + c / fold_) * shape_.heads + task.kv_head * fold_ + c % fold_;
            write_out(total + c * state_, padded_, shape_.head_dim, call.out + at * shape_.head_dim);
        }
        return;
    }
    memcpy(partials_.at<float>() + int64_t(task.partial) * combos_ * state_, mine, combos * state_ * sizeof(float));
    int32_t* done = done_.at<int32_t>() + task.group;
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) == task.group_tasks) {
        *done = 0;  // for the next layer
        finish(task, call);
    }
}

void Attention::run(Team& team, const AttentionCall& call) {
    team.share(int64_t(tasks_.size()), 1, [&](int64_t index, int64_t) {
        if (call.cache->is_bf16) run_task<uint16_t>(tasks_[index], call);
        else run_task<float>(tasks_[index], call);
    });
}
