// What adapters change in a product, for some of its rows:
//   y = out_scale * (W (in_scale * x)) + shift + (x a^T) b
// The product itself runs as ever; its input is kept on the way in, and the rest is added behind it.
// A row's bits depend on its own patch alone. Knows no adapter kind and no layer's meaning.
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

// One call's patches: made before the team starts.
struct PatchSpace {
    const Segment* segments;
    int64_t count = 0;  // 0: no row has a patch
    std::vector<const Segment*> of_row;  // null: none
    Buffer x, inner, aside, again;
    void prepare(const Segment* given, int64_t num_segments, int64_t rows, int64_t widest);
};

// The parts of one layer that one product computes.
struct Site {
    int64_t layer;
    int first, parts;      // of PARTS
    int64_t widths[3];     // columns of each part
    bool adds;             // y += ..., else y = ...
};

constexpr int LAYER_PARTS = 7;  // q, k, v, o, gate, up, down: kernels/patch.py
constexpr int PATCH_PHASES = 4 * ADD_PHASES + 5 * 3;  // of a layer; 3: a fused part with an in_scale

// The patches of one product, as one thread sees them.
class Patched {
  public:
    Patched(PatchSpace& space, const Matrix& matrix, const Site& site);

    // Columns from..to of a row's input on their way into the product.
    void pass(int64_t row, int64_t from, int64_t to, float* x, float* y) {
        if (!pieces_.empty() && space_.of_row[row]) keep(row, from, to, x, y);
    }
    // Once y has the product of all rows.
    void finish(Team& team, InputBuffers& input, float* y);

  private:
    const Patch& patch(const Segment& segment, int part) const {
        return segment.patches[site_.layer * LAYER_PARTS + site_.first + part];
    }
    void keep(int64_t row, int64_t from, int64_t to, float* x, float* y);
    void redo(Team& team, InputBuffers& input, int part, float* y);

    PatchSpace& space_;
    const Matrix& matrix_;
    Site site_;
    std::vector<Piece>& pieces_;
};
