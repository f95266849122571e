// Products with packed weights. A tile is [panels][rows][16] floats in thread-private scratch;
// an output element is always accumulated over k in ascending order by one lane, so that its bits
// do not depend on how many rows or panels were computed beside it.
#pragma once
#include "formats.h"
#include "team.h"

constexpr int ROW_BLOCK = 64;     // rows of one task: their activations stay in the L2 cache
constexpr int PANELS_AT_ONCE = 4; // most panels of one kernel call

struct TileJob {
    const uint8_t* panel;  // first panel
    int64_t panel_stride;  // bytes from one panel to the next
    int panels;            // <= PANELS_AT_ONCE
    const Input* in;
    int64_t row;           // first row of the block
    int rows;
    int64_t k;
    float* tile;
};

void run_tile(int32_t kind, const TileJob& job);  // the kernel for this kind, machine and shape
void f32_tile(const TileJob& job);
void bf16_tile(const TileJob& job);
void quant_tile(int32_t kind, const TileJob& job, int first = 0);  // the rows from `first` on
#if CT_AMX
void amx_bf16_tile(const TileJob& job);
int amx_quant_tile(int32_t kind, const TileJob& job);  // how many rows it did: runs of 16, or none
#endif

// sum += scale * dot + minimum * (sum of the activations), where `dot` is the exact integer of one part of
// a group and `at` the place of the group and row in what `in` says of groups.
template <class F>
CT_INLINE vf add_dot(vf sum, vi dot, vf scale, vf minimum, const Input& in, int64_t at, int part) {
    sum = vfma(sum, vint_to_float(dot, F::MINIMUM ? 0 : in.isum[at]), vmul(scale, vset(in.scale[at])));
    if (!F::MINIMUM) return sum;
    return vfma(sum, minimum, vset(F::SCALES == 2 ? in.half_sum[2 * at + part] : in.sum[at]));
}

enum Epilogue { STORE, ADD };

// y[rows, n] (=, +=) in W^T, shared among the team.
void gemm(Team& team, const Matrix& matrix, const Input& in, int64_t rows, float* y, Epilogue epilogue);
