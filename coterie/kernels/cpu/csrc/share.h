// The CPU's share of one MoE layer: for some (row, expert) pairs the first channels of the expert's
// inner products, from records in the device's layout. Four phases: encode the rows; gate and up;
// activate and encode; down, summed over the pairs of each row in their order.
#pragma once
#include "device_rows.h"
#include "team.h"

// The records of one layer by expert (null: none). Places as in device_record.py.
struct ShareLayer {
    const uint8_t* const* records;
    int64_t down_at, gate_up_scales_at, down_scales_at;
    int32_t kind, experts, hidden, intermediate;
};

struct SharePair {
    int32_t expert, row;
    int32_t taken;  // channels, in whole groups
    float weight;
};

struct ShareJob {
    const ShareLayer* layer;
    const SharePair* pairs;
    int64_t num_pairs, rows;
    const float* x;  // [rows][hidden]
    float* out;      // [rows][hidden]
};

constexpr int64_t SHARE_PHASES = 4;

class ShareRun {
  public:
    // Room for every job of these layers; nothing is allocated later.
    void reserve(const ShareLayer* layers, int64_t count, int64_t max_rows, int64_t max_pairs);
    // Sorts the pairs by expert; those that are not valid are left out. Returns the bytes of weights.
    int64_t prepare(const ShareJob& job);
    void operator()(Team& team);

  private:
    struct Block {  // pairs of one expert with the same channels
        const uint8_t* record;
        int64_t first, count, taken, units;  // units: all of the blocks before it
    };
    template <int KIND> void run(Team& team);
    template <int KIND> void encode(Team& team);
    template <int KIND> void gate_up(Team& team);
    template <int KIND> void activate(Team& team);
    template <int KIND> void down(Team& team);
    bool valid(const SharePair& pair) const;

    ShareJob job_{};
    int64_t max_rows_ = 0, max_pairs_ = 0, inner_ = 0, x_bytes_ = 0, act_bytes_ = 0;
    int64_t num_pairs_ = 0, num_blocks_ = 0, units_ = 0;
    std::vector<SharePair> pairs_;
    std::vector<Block> blocks_;
    Buffer x_, gates_, ups_, acts_;
};
