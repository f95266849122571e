#include "attention.h"

#include <limits>

#include "attention_amx.h"
#include "attention_tile.h"

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int SPLIT_ROWS = 4;  // sequences with at most this many new rows are cut along positions

void Attention::plan(const Shape& shape, const Batch& batch, int threads) {
    shape_ = shape, batch_ = batch;
    padded_ = int(round_up(shape.head_dim, 2 * VL));
    fold_ = shape.heads / shape.kv_heads;
    block_ = fold_ >= MAX_COMBOS ? 1 : MAX_COMBOS / fold_;
    state_ = round_up(padded_ + 2, 16);
    const int rows = block_ > SPLIT_ROWS ? block_ : SPLIT_ROWS;
    states_ = rows * shape.heads * state_;
    int64_t splits = 0;
    for (int s = 0; s < batch.sequences; ++s) splits += (batch.context_lens[s] + SPLIT - 1) / SPLIT;
    // A task with all KV heads reads memory in order; with few tasks each head is a separate task.
    const int together = splits >= threads * 4 ? shape.kv_heads : 1;
    tasks_.clear();
    int32_t partials = 0, groups = 0;
    for (int s = 0; s < batch.sequences; ++s) add_tasks(s, together, partials, groups);
    partials_.need<float>(partials * states_);
    memset(done_.need<int32_t>(groups), 0, groups * sizeof(int32_t));
}

void Attention::add_tasks(int sequence, int together, int32_t& partials, int32_t& groups) {
    const int begin = batch_.query_starts[sequence], rows = batch_.query_starts[sequence + 1] - begin;
    const int splits = (batch_.context_lens[sequence] + SPLIT - 1) / SPLIT;
    if (rows <= 0) return;
    if (rows > SPLIT_ROWS) {
        for (int row = (rows - 1) / block_ * block_; row >= 0; row -= block_)  // longest first
            for (int head = 0; head < shape_.kv_heads; ++head)
                tasks_.push_back({sequence, head, 1, begin + row, rows - row < block_ ? rows - row : block_,
                                  0, splits, -1, 0, 0});
        return;
    }
    for (int head = 0; head < shape_.kv_heads; head += together) {
        if (splits == 1) {
            tasks_.push_back({sequence, head, together, begin, rows, 0, 1, -1, 0, 0});
            continue;
        }
        for (int split = 0; split < splits; ++split)
            tasks_.push_back({sequence, head, together, begin, rows, split, 1, partials + split, groups, splits});
        partials += splits;
        ++groups;
    }
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

// Where a task's (KV head, combo) lies in q and out, counted in heads.
int64_t Attention::index(const AttentionTask& task, int head, int combo) const {
    return int64_t(task.row + combo / fold_) * shape_.heads + (task.kv_head + head) * fold_ + combo % fold_;
}

void Attention::write_out(const AttentionTask& task, const AttentionCall& call, const float* states) const {
    const int combos = task.rows * fold_;
    for (int i = 0; i < combos * task.kv_heads; ++i) {
        const float* state = states + i * state_;
        const float inverse = 1.0f / state[padded_ + 1];
        float* out = call.out + index(task, i / combos, i % combos) * shape_.head_dim;
        for (int d = 0; d < shape_.head_dim; ++d) out[d] = state[d] * inverse;
    }
}

void Attention::finish(const AttentionTask& task, const AttentionCall& call) {
    float* total = partials_.at<float>() + (task.partial - task.first_split) * states_;
    for (int32_t split = 1; split < task.group_tasks; ++split)
        for (int i = 0; i < task.rows * fold_ * task.kv_heads; ++i)
            merge(total + i * state_, total + split * states_ + i * state_, padded_);
    write_out(task, call, total);
}

struct Attention::Work {
    TileWork tile;
    float* states;  // of every KV head of the task
    float* stage;
    bool staged;
    uint16_t* queries;  // packed for AMX tiles; null: vectors
};

#if CT_AMX
// Reads the rows of one KV head in pairs; blocks have whole pairs.
struct PairWalk {
    const KvView<uint16_t>& view;
    const int32_t* block;
    int64_t at = 0, left = 0;

    PairWalk(const KvView<uint16_t>& from, int start) : view(from), block(from.table + start / from.block_size) {}
    int64_t next() {
        if (left == 0) at = *block++ * view.block_stride, left = view.block_size;
        const int64_t here = at;
        at += 2 * view.dim, left -= 2;
        return here;
    }
};

struct Ahead {  // what to prefetch for the next tile
    KvView<uint16_t> view;
    int start, count;
};

// One tile's values paired, and its keys pointed at, or copied where blocks are short or padded.
static void run_amx_tile(const TileWork& work, const KvView<uint16_t>& view, const uint16_t* q, uint16_t* stage, const Ahead& ahead) {
    AmxTile t{work.combos, work.dim, work.width, work.state, q, work.limit, work.start, work.count, {}, work.dim * 2, stage};
    uint16_t* keys = stage + TILE * work.dim;
    const bool whole = view.block_size % 16 == 0 && view.dim == work.dim;
    const int64_t bytes = view.dim * sizeof(uint16_t), rest = (work.dim - view.dim) * sizeof(uint16_t);
    alignas(64) uint16_t rows[2][MAX_TILE_DIM] = {};
    PairWalk walk(view, work.start), later(ahead.view, ahead.start);
    for (int i = 0; i < work.count; i += 2) {
        const int64_t at = walk.next();
        if (i < ahead.count) {
            const int64_t soon = later.next();
            for (int64_t d = 0; d < 2 * view.dim; d += 32) {
                __builtin_prefetch(ahead.view.keys + soon + d, 0, 2);
                __builtin_prefetch(ahead.view.values + soon + d, 0, 2);
            }
        }
        const uint16_t *first = view.values + at, *second = i + 1 < work.count ? first + view.dim : nullptr;
        if (rest) {
            memcpy(rows[0], first, bytes), first = rows[0];
            if (second) memcpy(rows[1], second, bytes), second = rows[1];
        }
        amx_pair_rows(first, second, work.dim, stage + i * work.dim);
        if (whole) {
            if (i % 16 == 0) t.keys[i / 16] = view.keys + at;
            continue;
        }
        t.keys[i / 16] = keys + i / 16 * 16 * work.dim;
        for (int j = 0; j < 2; ++j) {  // values past the end have weight 0
            memcpy(keys + (i + j) * work.dim, view.keys + at + j * view.dim, bytes);
            memset(keys + (i + j) * work.dim + view.dim, 0, rest);
        }
    }
    const int end = int(round_up(work.count, 2));
    memset(stage + end * work.dim, 0, (round_up(work.count, 32) - end) * work.dim * sizeof(uint16_t));
    keep_stores(stage);
    amx_attend_tile(t);
}
#endif

// One split of all the task's KV heads, tile by tile.
template <class T>
void Attention::run_split(const AttentionTask& task, const AttentionCall& call, int split, Work& work) {
    TileWork& tile = work.tile;
    const int combos = tile.combos, most = tile.limit[combos - 1];
    const float* q[MAX_ROW_HEADS];
    tile.q = q;
    const int end = (split + 1) * SPLIT < most ? (split + 1) * SPLIT : most;
    for (int start = split * SPLIT; start < end; start += TILE)
        for (int head = 0; head < task.kv_heads; ++head) {
            tile.start = start, tile.count = end - start < TILE ? end - start : TILE;
            tile.state = work.states + head * combos * state_;
            for (int c = 0; c < combos; ++c) q[c] = call.q + index(task, head, c) * padded_;
            const KvView<T> view(*call.cache, shape_, batch_, task.sequence, task.kv_head + head);
#if CT_AMX
            if constexpr (sizeof(T) == 2)
                if (work.queries) {
                    const bool last = head + 1 == task.kv_heads;
                    const int from = last ? start + TILE : start, left = combos > COMBOS ? 0 : end - from;
                    const Ahead ahead{{*call.cache, shape_, batch_, task.sequence, task.kv_head + (last ? 0 : head + 1)},
                                      left > 0 ? from : start, left < TILE ? left : TILE};
                    run_amx_tile(tile, view, work.queries + head * queries(combos), reinterpret_cast<uint16_t*>(work.stage), ahead);
                    continue;
                }
#endif
            if (work.staged) {
                TileRows<float> rows;
                view.stage(tile, work.stage, rows);
                attend_tile(tile, rows);
                continue;
            }
            TileRows<T> rows;
            view.point(start, tile.count, rows.keys, rows.values);
            rows.step = shape_.head_dim, rows.fetch = true;
            const bool last = head + 1 == task.kv_heads;
            const int from = last ? start + TILE : start, left = end - from;
            const int next = left < 0 ? 0 : left < tile.count ? left : tile.count;
            rows.next = (next + 3) / 4;
            KvView<T>(*call.cache, shape_, batch_, task.sequence, task.kv_head + (last ? 0 : head + 1))
                .point(from, next, rows.next_keys, nullptr);
            attend_tile(tile, rows);
        }
}

// Packed queries of one KV head, as 16-bit words.
int64_t Attention::queries(int combos) const { return round_up(combos, 16) * padded_; }

void Attention::pack_queries(const AttentionTask& task, const AttentionCall& call, uint16_t* out) const {
#if CT_AMX
    const int combos = task.rows * fold_;
    const float* q[MAX_ROW_HEADS];
    for (int head = 0; head < task.kv_heads; ++head) {
        for (int c = 0; c < combos; ++c) q[c] = call.q + index(task, head, c) * padded_;
        amx_pack_queries(q, combos, padded_, out + head * queries(combos));
    }
    keep_stores(out);
    load_config(64, 16);
#endif
}

template <class T> void Attention::run_task(const AttentionTask& task, const AttentionCall& call) {
    static thread_local Buffer scratch;
    const int combos = task.rows * fold_, all = combos * task.kv_heads;
    const bool tiles = CT_AMX && sizeof(T) == 2 && padded_ % 32 == 0 && padded_ <= MAX_TILE_DIM && amx_ready();
    const int64_t spare = 16 * state_;  // tiles read and rewrite whole blocks of states
    float* mine = scratch.need<float>(2 * states_ + spare + int64_t(combos) * TILE + 2 * TILE * padded_ +
                                      (tiles ? task.kv_heads * queries(combos) / 2 : 0));
    float* total = mine + states_ + spare;
    float* scores = total + states_;
    int limit[MAX_ROW_HEADS];
    for (int c = 0; c < combos; ++c) limit[c] = visible(task, c / fold_);
    Work work{{combos, padded_, state_, mine, scores, nullptr, limit, 0, 0}, mine, scores + combos * TILE,
              combos > 2 * QK_ROWS || padded_ != shape_.head_dim || batch_.block_size % 4,
              tiles ? reinterpret_cast<uint16_t*>(scores + combos * TILE + 2 * TILE * padded_) : nullptr};
    if (tiles) pack_queries(task, call, work.queries);
#if CT_AMX
    const TileScope scope{tiles};
#endif
    for (int split = task.first_split; split < task.first_split + task.splits; ++split) {
        clear(mine, all, state_, padded_);
        run_split<T>(task, call, split, work);
        if (task.partial >= 0 || task.splits == 1) break;
        if (split == 0) memcpy(total, mine, all * state_ * sizeof(float));
        else
            for (int i = 0; i < all; ++i) merge(total + i * state_, mine + i * state_, padded_);
    }
    if (task.partial < 0) return write_out(task, call, task.splits == 1 ? mine : total);
    memcpy(partials_.at<float>() + task.partial * states_, mine, all * state_ * sizeof(float));
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
