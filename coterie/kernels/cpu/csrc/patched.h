// The products of a decoder layer with patches. A product runs as without patches, but its input is
// stored; afterwards the patches are added. Rows without a patch do not change in any bit.
#pragma once
#include "patches.h"

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

    // Stores columns from..to of a row's input before the product reads them.
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
