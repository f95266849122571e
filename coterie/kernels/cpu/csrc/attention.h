// Paged attention with a fixed order of summation: positions are processed in tiles of 64 and splits
// of 512 counted from position 0. So a row's bits depend neither on the batch, nor on the number of
// threads, nor on how its prompt was divided into chunks.
#pragma once
#include <vector>

#include "team.h"

constexpr int TILE = 64;           // positions scored at once
constexpr int SPLIT = 512;         // positions folded into one partial result
constexpr int MAX_COMBOS = 48;     // (row, head) pairs of one task, unless one row has more heads

struct AttentionTask {
    int32_t sequence;
    int32_t kv_head, kv_heads;   // first, and how many: neighbours lie side by side in a block
    int32_t row, rows;           // first query row (in the batch) and how many
    int32_t first_split, splits; // which splits this task processes
    int32_t partial;             // index of its partial result, -1: it processes all splits
    int32_t group, group_tasks;  // tasks whose partials belong together, and the first one's index
};

struct AttentionCall {
    const float* q;  // [rows][heads][padded_dim], rotated and scaled, zero-padded
    float* out;      // [rows][heads][head_dim]
    const Cache* cache;
};

class Attention {
  public:
    // Divides the batch into tasks; the plan is the same for every layer of one call.
    void plan(const Shape& shape, const Batch& batch, int threads);
    void run(Team& team, const AttentionCall& call);
    int padded_dim() const { return padded_; }

  private:
    struct Work;  // one task's scratch
    template <class T> void run_task(const AttentionTask& task, const AttentionCall& call);
    template <class T> void run_split(const AttentionTask& task, const AttentionCall& call, int split, Work& work);
    void finish(const AttentionTask& task, const AttentionCall& call);
    void write_out(const AttentionTask& task, const AttentionCall& call, const float* states) const;
    int visible(const AttentionTask& task, int row) const;
    int64_t index(const AttentionTask& task, int head, int combo) const;
    int64_t queries(int combos) const;
    void pack_queries(const AttentionTask& task, const AttentionCall& call, uint16_t* out) const;
    void add_tasks(int sequence, int heads_at_once, int32_t& partials, int32_t& groups);

    Shape shape_{};
    Batch batch_{};
    int padded_ = 0, fold_ = 1, block_ = 1;
    int64_t state_ = 0;   // floats of one (row, head): the mixed values, max, sum
    int64_t states_ = 0;  // floats of one task's states
    std::vector<AttentionTask> tasks_;
    Buffer partials_, done_;
};
