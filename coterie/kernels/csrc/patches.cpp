// Low-rank terms over segments of rows: dots along the input, then sums along the output. Every
// element is accumulated in one order, whatever is computed beside it.
#include "patches.h"

constexpr int TILE_RANKS = VL == 8 ? 2 : 4;  // with TILE_ROWS: as many accumulators as registers hold
constexpr int SHRINK_ROWS = 2, EXPAND_ROWS = 4;
constexpr int64_t RANKS_AT_ONCE = 8;     // of one task
constexpr int64_t ROWS_AT_ONCE = 64;     // likewise
constexpr int64_t COLUMNS_AT_ONCE = 768; // likewise
constexpr int64_t WIDEN_ROWS = 8;        // from here on, widening bf16 once for all rows pays

static float widened(float a) { return a; }
static float widened(uint16_t a) {
    const uint32_t bits = uint32_t(a) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// ------------------------------------------------------------------------------ x a^T
template <class T> struct Shrink {
    const T* a;  // [ranks][k]
    const float* x;
    int64_t k;
    float* out;  // [rows][ldo]
    int64_t ldo;
};

// MR rows x NR ranks; even and odd vectors have accumulators of their own.
template <class T, int MR, int NR> CT_FLAT static void dots(const Shrink<T>& s, int64_t row, int64_t rank) {
    const T* const a = s.a + rank * s.k;
    const float* const x = s.x + row * s.k;
    vf even[MR][NR], odd[MR][NR];
    each<MR>([&](auto m) { each<NR>([&](auto r) { even[m][r] = odd[m][r] = vset(0.0f); }); });
    int64_t i = 0;
    for (; i + 2 * VL <= s.k; i += 2 * VL) {
        vf x0[MR], x1[MR];
        each<MR>([&](auto m) { vload2(x + m * s.k + i, x0[m], x1[m]); });
        each<NR>([&](auto r) {
            vf a0, a1;
            vload2(a + r * s.k + i, a0, a1);
            each<MR>([&](auto m) { even[m][r] = vfma_acc(even[m][r], a0, x0[m]); });
            each<MR>([&](auto m) { odd[m][r] = vfma_acc(odd[m][r], a1, x1[m]); });
        });
    }
    each<MR>([&](auto m) {
        vf both[4];
        each<4>([&](auto r) { both[r] = r < NR ? vadd(even[m][r % NR], odd[m][r % NR]) : vset(0.0f); });
        float sums[4];
        vsum4(sums, both[0], both[1], both[2], both[3]);
        for (int r = 0; r < NR; ++r) {
            for (int64_t j = i; j < s.k; ++j) sums[r] = __builtin_fmaf(x[m * s.k + j], widened(a[r * s.k + j]), sums[r]);
            s.out[(row + m) * s.ldo + rank + r] = sums[r];
        }
    });
}

template <class T, int NR> static void dots_of_rows(const Shrink<T>& s, int64_t rows, int64_t rank) {
    int64_t row = 0;
    for (; row + SHRINK_ROWS <= rows; row += SHRINK_ROWS) dots<T, SHRINK_ROWS, NR>(s, row, rank);
    for (; row < rows; ++row) dots<T, 1, NR>(s, row, rank);
}

template <class T> static void shrink(const Shrink<T>& s, int64_t rows, int64_t ranks) {
    int64_t rank = 0;
    for (; rank + TILE_RANKS <= ranks; rank += TILE_RANKS) dots_of_rows<T, TILE_RANKS>(s, rows, rank);
    for (; rank < ranks; ++rank) dots_of_rows<T, 1>(s, rows, rank);
}

static void widen(const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 2 * VL <= count; i += 2 * VL) {
        vf low, high;
        vload2(from + i, low, high);
        vstore(to + i, low), vstore(to + i + VL, high);
    }
    for (; i < count; ++i) to[i] = widened(from[i]);
}

static int64_t blocks(int64_t count, int64_t at_once) { return (count + at_once - 1) / at_once; }

static void shrink_task(const PatchJob& job, const Piece& piece, int64_t task) {
    const Patch& patch = *piece.patch;
    const int64_t row_blocks = blocks(piece.rows, ROWS_AT_ONCE);
    const int64_t row = task % row_blocks * ROWS_AT_ONCE, rank = task / row_blocks * RANKS_AT_ONCE;
    const int64_t rows = piece.rows - row < ROWS_AT_ONCE ? piece.rows - row : ROWS_AT_ONCE;
    const int64_t ranks = patch.rank - rank < RANKS_AT_ONCE ? patch.rank - rank : RANKS_AT_ONCE;
    const int64_t ldo = inner_width(patch), from = rank * job.k;
    const float* x = job.x + (piece.first + row) * job.k;
    float* out = job.inner + piece.inner + row * ldo + rank;
    if (!patch.is_bf16) return shrink<float>({static_cast<const float*>(patch.a) + from, x, job.k, out, ldo}, rows, ranks);
    const uint16_t* a = static_cast<const uint16_t*>(patch.a) + from;
    if (rows < WIDEN_ROWS) return shrink<uint16_t>({a, x, job.k, out, ldo}, rows, ranks);
    static thread_local Buffer wide;
    widen(a, ranks * job.k, wide.need<float>(ranks * job.k));
    shrink<float>({wide.at<float>(), x, job.k, out, ldo}, rows, ranks);
}

// ------------------------------------------------------------------------------ (x a^T) b
template <class T> struct Expand {
    const T* b;  // [ranks][ldb]
    int64_t ldb;
    const float* inner;  // [rows][ldi]
    int64_t ldi;
    float* y;
    int64_t ldy, width;
};

// MR rows of y += NR ranks, in ascending order.
template <class T, int MR, int NR> CT_FLAT static void sums(const Expand<T>& s, int64_t row, int64_t rank) {
    const T* const b = s.b + rank * s.ldb;
    const float* const inner = s.inner + row * s.ldi + rank;
    float* const y = s.y + row * s.ldy;
    xq t[MR];
    each<MR>([&](auto m) { t[m] = xload(inner + m * s.ldi); });
    int64_t i = 0;
    for (; i + 2 * VL <= s.width; i += 2 * VL) {
        vf b0[NR], b1[NR];
        each<NR>([&](auto r) { vload2(b + r * s.ldb + i, b0[r], b1[r]); });
        each<MR>([&](auto m) {
            vf y0, y1;
            vload2(y + m * s.ldy + i, y0, y1);
            each<NR>([&](auto r) { y0 = vfma_at<r>(y0, b0[r], t[m]), y1 = vfma_at<r>(y1, b1[r], t[m]); });
            vstore(y + m * s.ldy + i, y0), vstore(y + m * s.ldy + i + VL, y1);
        });
    }
    for (; i < s.width; ++i)
        for (int m = 0; m < MR; ++m)
            for (int r = 0; r < NR; ++r)
                y[m * s.ldy + i] = __builtin_fmaf(inner[m * s.ldi + r], widened(b[r * s.ldb + i]), y[m * s.ldy + i]);
}

template <class T, int MR> static void sums_of_ranks(const Expand<T>& s, int64_t row, int64_t ranks) {
    int64_t rank = 0;
    for (; rank + 4 <= ranks; rank += 4) sums<T, MR, 4>(s, row, rank);
    switch (ranks - rank) {
        case 3: return sums<T, MR, 3>(s, row, rank);
        case 2: return sums<T, MR, 2>(s, row, rank);
        case 1: return sums<T, MR, 1>(s, row, rank);
    }
}

template <class T> static void expand(const Expand<T>& s, int64_t rows, int64_t ranks) {
    int64_t row = 0;
    for (; row + EXPAND_ROWS <= rows; row += EXPAND_ROWS) sums_of_ranks<T, EXPAND_ROWS>(s, row, ranks);
    for (; row + 2 <= rows; row += 2) sums_of_ranks<T, 2>(s, row, ranks);
    if (row < rows) sums_of_ranks<T, 1>(s, row, ranks);
}

static void rescale(const Patch& patch, int64_t from, int64_t width, float* y) {
    if (patch.out_scale)
        for (int64_t i = 0; i < width; ++i) y[i] *= patch.out_scale[from + i];
    if (patch.shift)
        for (int64_t i = 0; i < width; ++i) y[i] += patch.shift[from + i];
}

static int64_t column_blocks(const Piece& piece) { return blocks(piece.width, COLUMNS_AT_ONCE); }

static void expand_task(const PatchJob& job, const Piece& piece, int64_t task) {
    const Patch& patch = *piece.patch;
    const int64_t row_blocks = blocks(piece.rows, ROWS_AT_ONCE);
    const int64_t step = round_up(blocks(piece.width, column_blocks(piece)), 2 * VL);
    const int64_t row = task % row_blocks * ROWS_AT_ONCE, from = task / row_blocks * step;
    if (from >= piece.width) return;
    const int64_t rows = piece.rows - row < ROWS_AT_ONCE ? piece.rows - row : ROWS_AT_ONCE;
    const int64_t width = piece.width - from < step ? piece.width - from : step;
    const int64_t at = (piece.first + row) * job.n + piece.column + from, ldi = inner_width(patch);
    const float* inner = job.inner + piece.inner + row * ldi;
    float* const y = job.y + at;
    for (int64_t m = 0; m < rows; ++m) rescale(patch, from, width, y + m * job.n);
    if (patch.is_bf16)
        expand<uint16_t>({static_cast<const uint16_t*>(patch.b) + from, piece.width, inner, ldi, y, job.n, width}, rows, patch.rank);
    else
        expand<float>({static_cast<const float*>(patch.b) + from, piece.width, inner, ldi, y, job.n, width}, rows, patch.rank);
    if (!job.aside || !patch.out_scale) return;
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t i = 0; i < width; ++i) y[m * job.n + i] += job.aside[at + m * job.n + i];
}

// Runs tasks 0 .. count(piece) of every piece, in stretches of several.
template <class Count, class Run> static void spread(Team& team, const std::vector<Piece>& pieces, Count count, Run run) {
    int64_t total = 0;
    for (const Piece& piece : pieces) total += count(piece);
    if (!total) return;
    const int64_t grain = total / (team.size() * 8);
    team.share(total, grain < 1 ? 1 : grain, [&](int64_t begin, int64_t end) {
        const Piece* piece = pieces.data();
        for (int64_t task = begin, before = 0; task < end; ++task) {
            while (task - before >= count(*piece)) before += count(*piece++);
            run(*piece, task - before);
        }
    });
}

void add_patches(Team& team, const PatchJob& job) {
    const auto row_blocks = [](const Piece& piece) { return blocks(piece.rows, ROWS_AT_ONCE); };
    spread(team, job.pieces, [&](const Piece& p) { return blocks(p.patch->rank, RANKS_AT_ONCE) * row_blocks(p); },
           [&](const Piece& p, int64_t task) { shrink_task(job, p, task); });
    spread(team, job.pieces, [&](const Piece& p) { return column_blocks(p) * row_blocks(p); },
           [&](const Piece& p, int64_t task) { expand_task(job, p, task); });
}

// ------------------------------------------------------------------------------ inside a decoder
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

// A part of a fused product whose input is scaled: its rows once more, with the input they want.
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

extern "C" void ct_patches(const Piece* pieces, int64_t count, const float* x, int64_t k, float* y, int64_t n, int64_t threads) {
    static thread_local Buffer inner;
    std::vector<Piece> all(pieces, pieces + count);
    int64_t floats = 0, work = 0;
    for (Piece& piece : all) {
        piece.inner = floats, floats += piece.rows * inner_width(*piece.patch);
        work += piece.rows * piece.patch->rank * (k + piece.width);
    }
    const PatchJob job{all, x, k, inner.need<float>(floats), y, n, nullptr};
    auto body = [&](Team& team) { add_patches(team, job); };
    run_team(work < (1 << 18) ? 1 : int(threads), ADD_PHASES, body);
}
