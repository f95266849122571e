#include "patched.h"

void PatchSpace::prepare(const Segment* given, int64_t num_segments, int64_t rows, int64_t widest) {
    segments = given, count = num_segments;
    if (!count) return;
    of_row.assign(rows, nullptr);
    int64_t ranks = 0;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t row = given[i].first; row < given[i].last; ++row) of_row[row] = given + i;
        ranks += (given[i].last - given[i].first) * round_up(given[i].most_ranks, 4);
    }
    x.need<float>(rows * widest);
    inner.need<float>(3 * ranks);
    aside.need<float>(rows * widest), again.need<float>(rows * widest);
}

static std::vector<Piece>& own_pieces() {
    static thread_local std::vector<Piece> mine;
    return mine;
}

Patched::Patched(PatchSpace& space, const Matrix& matrix, const Site& site)
    : space_(space), matrix_(matrix), site_(site), pieces_(own_pieces()) {
    pieces_.clear();
    int64_t inner = 0;
    for (int64_t i = 0; i < space.count; ++i) {
        const Segment& segment = space.segments[i];
        int64_t column = 0;
        for (int part = 0; part < site.parts; column += site.widths[part++]) {
            const Patch& p = patch(segment, part);
            if (!p.present) continue;
            pieces_.push_back({&p, segment.first, segment.last - segment.first, column, site.widths[part], inner});
            inner += pieces_.back().rows * inner_width(p);
        }
    }
}

void Patched::keep(int64_t row, int64_t from, int64_t to, float* x, float* y) {
    memcpy(space_.x.at<float>() + row * matrix_.k + from, x, (to - from) * sizeof(float));
    if (site_.parts > 1) return;
    const Patch& p = patch(*space_.of_row[row], 0);
    if (p.in_scale)
        for (int64_t i = from; i < to; ++i) x[i - from] *= p.in_scale[i];
    if (!site_.adds || !p.out_scale || from) return;
    float* const mine = y + row * matrix_.n;
    memcpy(space_.aside.at<float>() + row * matrix_.n, mine, matrix_.n * sizeof(float));
    memset(mine, 0, matrix_.n * sizeof(float));
}

// A part of a fused product whose input is scaled: computes its rows again, with the scaled input.
void Patched::redo(Team& team, InputBuffers& input, int part, float* y) {
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < int64_t(space_.of_row.size()); ++row)
        if (space_.of_row[row] && patch(*space_.of_row[row], part).in_scale) rows.push_back(row);
    if (rows.empty()) return;
    int64_t column = 0;
    for (int before = 0; before < part; ++before) column += site_.widths[before];
    const int64_t count = int64_t(rows.size()), k = matrix_.k, n = matrix_.n;
    float* const again = space_.again.at<float>();
    Encoder encoder(input, matrix_);
    gemm(team, matrix_, encoder.fill(team, count, [&](int64_t i, int64_t from, int64_t to, float* out) {
        const float* x = space_.x.at<float>() + rows[i] * k;
        const float* scale = patch(*space_.of_row[rows[i]], part).in_scale;
        for (int64_t j = from; j < to; ++j) out[j - from] = x[j] * scale[j];
    }), count, again, STORE);
    team.share(count, 1, [&](int64_t i, int64_t) {
        memcpy(y + rows[i] * n + column, again + i * n + column, site_.widths[part] * sizeof(float));
    });
}

void Patched::finish(Team& team, InputBuffers& input, float* y) {
    if (pieces_.empty()) return;
    if (site_.parts > 1)
        for (int part = 0; part < site_.parts; ++part) redo(team, input, part, y);
    add_patches(team, {pieces_, space_.x.at<float>(), matrix_.k, space_.inner.at<float>(), y, matrix_.n,
                       site_.adds ? space_.aside.at<float>() : nullptr});
}
