// The CPU's share of one MoE layer: for some (row, expert) pairs the first channels of the expert's
// inner products, from records in the device's layout. Three phases: encode the rows; gate and up,
// activated and encoded by whoever finishes a group of channels; down, summed over the pairs of each
// row in their order. Every value of the answer has the job's number beside it: who reads it needs no
// other word to know that it is there. A thread that waits requests what it reads next. Two threads may
// compute the same part: both write the same values to the same places. Only when the answer was read,
// x may change; who is still inside the job then writes anything, to the job's own buffers and answer,
// which nobody reads until its space is settled.
#pragma once
#include <array>

#include "crew.h"
#include "device_rows.h"

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
    uint64_t* out;   // [rows][hidden]: a float, and above it the job's number; until its space is settled
    uint32_t number;
};

// Experts of which a job may come: a line that the device writes without a promise that what is read
// fits together.
struct ShareHint {
    static constexpr int32_t MOST = 13;
    int32_t layer, turn, count;  // turn: another one for every hint of a layer
    int32_t experts[MOST];       // those that the CPU would take first
};

// Requests memory into the caches of this core, a few lines at a time.
class ReadAhead {
  public:
    void clear() { count_ = next_ = 0; }
    void add(const uint8_t* begin, int64_t bytes) {
        if (bytes > 0 && count_ < int(ranges_.size())) ranges_[count_++] = {begin, begin + bytes};
    }
    // Whether there was anything.
    bool some() {
        for (int lines = 0; lines < AT_A_TIME; ++lines) {
            if (next_ == count_) return lines > 0;
            Range& range = ranges_[next_];
            prefetch_far(range.at);
            range.at += 64;
            if (range.at >= range.end) ++next_;
        }
        return true;
    }

  private:
    static constexpr int AT_A_TIME = 8;
    struct Range {
        const uint8_t *at, *end;
    };
    std::array<Range, 4 * ShareHint::MOST> ranges_;  // gate and up, with their scales
    int count_ = 0, next_ = 0;
};

// What the threads request between jobs, as hints name it.
class ShareHints {
  public:
    ShareHints(const ShareLayer* layers, int64_t count, int64_t threads) : layers_(layers), count_(count), waiting_(threads) {}
    // A thread requests its own part of the experts of a hint. Returns whether it did. It keeps a hint
    // until the job of that layer begins, or two others: where none comes, nobody needs what would be
    // read.
    bool read_ahead(const volatile ShareHint& hint, int thread);
    // Whether a hint had named this expert. Called by thread 0, before the job begins.
    bool named(const ShareLayer* layer, int32_t expert) const;
    // A job of this layer begins.
    void begin(const ShareLayer* layer);

  private:
    struct alignas(64) Waiting {  // what a thread requests, of which hint, behind how many jobs
        ReadAhead ahead;
        const ShareLayer* layer = nullptr;
        int32_t turn = 0, count = 0;
        int32_t experts[ShareHint::MOST];
        int64_t jobs = 0;
        bool free = true;  // for another hint
    };
    const ShareLayer* const layers_;
    const int64_t count_;
    std::vector<Waiting> waiting_;                  // by thread
    std::atomic<const ShareLayer*> last_{nullptr};  // of the last job
    std::atomic<int64_t> jobs_{0};
};

class ShareRun {
  public:
    // Room for every job of these layers.
    ShareRun(const ShareLayer* layers, int64_t count, int64_t max_rows, int64_t max_pairs);
    // Sorts the pairs by expert; those that are not valid are left out. Returns the bytes of weights.
    int64_t prepare(const ShareJob& job);
    void operator()(CrewTeam& team);
    // f(expert) for all experts of the job.
    template <class F> void each_expert(F f) const {
        for (int64_t i = 0; i < num_blocks_; ++i) f(pairs_[blocks_[i].first].expert);
    }

  private:
    struct Block {  // pairs of one expert with the same channels
        const uint8_t* record;
        int64_t first, count, taken;
        int64_t rest;  // units of the second half, of all blocks before it
        int64_t units() const { return taken / AT_ONCE; }
        int64_t half() const { return units() / 2; }
    };
    template <int KIND> void run(CrewTeam& team);
    template <int KIND> void encode(CrewTeam& team);
    template <int KIND> void gate_up(CrewTeam& team);
    template <int KIND> void activate(int64_t block, int64_t channel, int64_t end);
    template <int KIND> void down(CrewTeam& team);
    bool valid(const SharePair& pair) const;

    ShareJob job_{};
    int64_t max_rows_ = 0, max_pairs_ = 0, inner_ = 0, x_bytes_ = 0, act_bytes_ = 0;
    int64_t num_pairs_ = 0, num_blocks_ = 0, rest_ = 0;
    std::vector<SharePair> pairs_;
    std::vector<Block> blocks_;
    std::vector<int32_t> order_;                   // by expert: where it came first
    std::vector<std::atomic<uint32_t>> finished_;  // channels of each group of each block, a bit for each
    Buffer x_, gates_, ups_, acts_;
};
