// The input of a product: fp32 values, and the forms that packed weights read.
#pragma once
#include "gemm.h"

// FORM_HALVES: planes, and the sums of half groups
enum Form : unsigned { FORM_F32 = 1, FORM_BF16 = 2, FORM_PLANES = 4, FORM_HALVES = 8 };

// Scratch for the input of one product at a time.
struct InputBuffers {
    Buffer x, bf16, planes, scale, sum, isum, half_sum;
    void reserve(const Matrix& matrix, int64_t rows);
};

// One product's input in every form its parts read: a view into buffers already reserved.
class Encoder {
  public:
    Encoder(InputBuffers& buffers, const Matrix& matrix);
    const Input& input() const { return in_; }
    unsigned forms() const { return forms_; }

    // Fills all rows, shared among the team. `make(row, from, to, out)` writes columns from..to of a
    // row to out[0..]; columns come in spans of whole groups.
    template <class Make> const Input& fill(Team& team, int64_t rows, Make make) {
        const int64_t spans = spans_of(team, rows), groups = round_up(k_, GROUP) / GROUP;
        const int64_t width = (groups + spans - 1) / spans * GROUP;
        const int64_t tasks = rows * spans, grain = tasks / (team.size() * 4);
        team.share(tasks, grain < 1 ? 1 : grain, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) {
                const int64_t row = task / spans, from = task % spans * width;
                put(row, from, from + width < k_ ? from + width : k_, make);
            }
        });
        return in_;
    }

    // One span of one row, in whole groups (the row's end excepted).
    template <class Make> void put(int64_t row, int64_t from, int64_t to, Make make) {
        if (from >= to) return;
        // the whole row, so that what a row needs once (its norm) is computed once
        float* out = forms_ & FORM_F32 ? x_ + row * in_.ldx + from : row_scratch(to - from);
        make(row, from, to, out);
        if (forms_ != FORM_F32)
            for (int64_t at = from; at < to; at += GROUP)
                encode(row, at, at + GROUP < to ? at + GROUP : to, out + (at - from));
        if (to == k_) pad(row);
    }

  private:
    int64_t spans_of(const Team& team, int64_t rows) const;
    static float* row_scratch(int64_t width);
    void encode(int64_t row, int64_t from, int64_t to, const float* x);
    void pad(int64_t row);

    unsigned forms_ = 0;
    int64_t k_;
    Input in_{};
    float *x_, *scale_, *sum_, *half_sum_;
    uint16_t* bf16_;
    int8_t* planes_;
    int32_t* isum_;
};

float rms_factor(const float* x, int64_t n, float eps);
void scaled_product(const float* x, const float* weight, float factor, int64_t n, float* out);
void gelu(const float* x, int64_t n, float* out);  // x * (1 + erf(x / sqrt(2))) / 2
void silu_product(const float* gate, const float* up, int64_t n, float* out);
