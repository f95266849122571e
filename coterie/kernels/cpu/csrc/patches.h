// What adapters add behind a product, for some of its rows: y = out_scale * y + shift + (x a^T) b.
// A row's bits depend on its own patch alone. Knows no adapter kind and no layer.
#pragma once
#include <vector>

#include "activations.h"

// Rows first .. first + rows of y, columns column .. column + width.
struct Piece {
    const Patch* patch;
    int64_t first, rows;
    int64_t column, width;
    int64_t inner;  // where its rows' x a^T lie: [rows][inner_width]
};

CT_INLINE int64_t inner_width(const Patch& patch) { return round_up(patch.rank, 4); }

// y (+)= what the pieces add; x [rows][k], y [rows][n]. `aside`: null, or where the rows of y lie that
// pieces with an out_scale were told to start from (y then holds the product alone).
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
