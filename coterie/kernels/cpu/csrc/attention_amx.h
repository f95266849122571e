// Attention over a bf16 cache on AMX tiles, for every number of rows (so that bits do not depend on
// it): scores = (K Q^T)^T, softmax by row as on vectors, mixed += P V. Queries and weights are rounded to bf16; sums are fp32.
#pragma once
#include "amx.h"
#include "attention.h"

#if CT_AMX
constexpr int COMBOS = 16;  // (row, head) pairs of one tile

struct AmxTile {
    int combos, dim;        // pairs of the task; head_dim, a multiple of 32
    int64_t width;          // floats of one state
    float* state;           // [combos][width]: values, max, sum
    const uint16_t* q;      // [ceil(combos / 16)][dim / 2][16][2]
    const int* limit;       // [combos]: positions that pair may see
    int start, count;       // first position, positions in this tile
    const uint16_t* keys[TILE / 16];  // the first of each 16 positions
    int64_t key_stride;               // bytes between positions
    const uint16_t* values;           // [TILE / 2][dim][2], zero past the end
};

// A task's queries, rounded, in the order AMX reads them.
void amx_pack_queries(const float* const* q, int combos, int dim, uint16_t* out);
// Two neighbouring positions side by side; `second` may be null (zeros).
void amx_pair_rows(const uint16_t* first, const uint16_t* second, int dim, uint16_t* out);
void amx_attend_tile(const AmxTile& tile);
#endif
