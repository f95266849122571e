// Products with packed weights. A tile is [panels][rows][16] floats in thread-private scratch;
// an output element is always accumulated over k in ascending order by one lane, so that its bits
// do not depend on how many rows or panels were computed beside it.
#pragma once
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
    int64_t height = INT64_MAX;  // rows of weights from the first panel on; blocks are not padded
};

void run_tile(int32_t kind, const TileJob& job);  // the kernel for this kind, machine and shape
void f32_tile(const TileJob& job);
void f32_span(const TileJob& job, int64_t from, int64_t to);  // one panel, which begins at k = from
void q4k_tile(const TileJob& job);
void q6k_tile(const TileJob& job);
void widen_block(int32_t kind, const uint8_t* const* rows, float* out);  // 16 rows -> [256][16]
void bf16_tile(const TileJob& job);
template <bool INT4> void quant_tile(const TileJob& job);
#if CT_AMX
void amx_bf16_tile(const TileJob& job);
template <bool INT4> void amx_quant_tile(const TileJob& job);
#endif

enum Epilogue { STORE, ADD };

// y[rows, n] (=, +=) in W^T, shared among the team.
void gemm(Team& team, const Matrix& matrix, const Input& in, int64_t rows, float* y, Epilogue epilogue);
