// What adapters add after a product, for some of its rows: y = out_scale * y + shift + (x a^T) b. A
// row's bits depend only on its own patch. This file knows no adapter kind and no layer.
#pragma once
#include <vector>

#include "activations.h"

// Rows first .. first + rows of y, columns column .. column + width.
struct Piece {
    const Patch* patch;
    int64_t first, rows;
    int64_t column, width;
    int64_t inner;  // position of its rows' x a^T: [rows][inner_width]
};

CT_INLINE int64_t inner_width(const Patch& patch) { return round_up(patch.rank, 4); }

// y (+)= what the pieces add; x [rows][k], y [rows][n]. `aside`: null, or the rows of y from before the
// product, which pieces with an out_scale start from (y then has only the product).
struct PatchJob {
    const std::vector<Piece>& pieces;
    const float* x;
    int64_t k;
    float* inner;
    float* y;
    int64_t n;
    const float* aside;
};
constexpr int ADD_PHASES = 2;
void add_patches(Team& team, const PatchJob& job);
