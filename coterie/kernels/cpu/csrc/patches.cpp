// Low-rank terms over segments of rows: dots along the input, then sums along the output. Every
// element is accumulated in one order, whatever else is computed in the call.
#include "patches.h"

// Rows of one kernel call with four ranks: as many as fit the registers.
constexpr int SHRINK_ROWS = VL == 8 ? 2 : 4, EXPAND_ROWS = 4;
constexpr int64_t RANKS_AT_ONCE = 8;     // of one task
constexpr int64_t ROWS_AT_ONCE = 64;     // likewise
constexpr int64_t WIDEN_ROWS = 8;        // from here on, widening bf16 once for all rows pays

static float widened(float a) { return a; }
static float widened(uint16_t a) {
    const uint32_t bits = uint32_t(a) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// Tiles are short, and the hardware cannot predict where the next one begins: it is prefetched in step
// with the current one. `done` bytes of the current one were read before, `bytes` are read now.
CT_INLINE void fetch(const void* next, int64_t done, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(next) + done + line);
}

// ------------------------------------------------------------------------------ x a^T
template <class T> struct Shrink {
    const T* a;  // [ranks][k]
    int64_t ranks, k;
    const float* x;  // [rows][k]
    float* out;  // [rows][ldo]
    int64_t ldo;
    const void* next;  // read by this thread when these ranks are done
};

// MR rows x NR ranks, each in one vector of sums.
template <class T, int MR, int NR> CT_FLAT static void dots(const Shrink<T>& s, int64_t row, int64_t rank) {
    const int64_t k = s.k;
    const T* const a = s.a + rank * k;
    const float* const x = s.x + row * k;
    const void* const next = rank + NR < s.ranks ? static_cast<const void*>(a + NR * k) : s.next;
    vf sum[MR][NR];
    each<MR>([&](auto m) { each<NR>([&](auto r) { sum[m][r] = vset(0.0f); }); });
    int64_t i = 0;
    for (; i + 2 * VL <= k; i += 2 * VL) {
        fetch(next, NR * i * sizeof(T), NR * 2 * VL * sizeof(T));
        vf x0[MR], x1[MR], a0[NR], a1[NR];
        each<MR>([&](auto m) { vload2(x + m * k + i, x0[m], x1[m]); });
        each<NR>([&](auto r) {
            vload2(a + r * k + i, a0[r], a1[r]);
            each<MR>([&](auto m) { sum[m][r] = vfma_acc(sum[m][r], a0[r], x0[m]); });
        });
        each<NR>([&](auto r) { each<MR>([&](auto m) { sum[m][r] = vfma_acc(sum[m][r], a1[r], x1[m]); }); });
    }
    each<MR>([&](auto m) {
        vf four[4];
        each<4>([&](auto r) { four[r] = r < NR ? sum[m][r % NR] : vset(0.0f); });
        float total[4];
        vsum4(total, four[0], four[1], four[2], four[3]);
        for (int r = 0; r < NR; ++r) {
            for (int64_t j = i; j < k; ++j) total[r] = __builtin_fmaf(x[m * k + j], widened(a[r * k + j]), total[r]);
            s.out[(row + m) * s.ldo + rank + r] = total[r];
        }
    });
}

template <class T, int NR> static void dots_of_rows(const Shrink<T>& s, int64_t rows, int64_t rank) {
    int64_t row = 0;
    for (; row + SHRINK_ROWS <= rows; row += SHRINK_ROWS) dots<T, SHRINK_ROWS, NR>(s, row, rank);
    if (SHRINK_ROWS > 2)
        for (; row + 2 <= rows; row += 2) dots<T, 2, NR>(s, row, rank);
    if (row < rows) dots<T, 1, NR>(s, row, rank);
}

template <class T> static void shrink(const Shrink<T>& s, int64_t rows) {
    int64_t rank = 0;
    for (; rank + 4 <= s.ranks; rank += 4) dots_of_rows<T, 4>(s, rows, rank);
    for (; rank < s.ranks; ++rank) dots_of_rows<T, 1>(s, rows, rank);
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

static void shrink_task(const PatchJob& job, const Piece& piece, int64_t task, const Piece& after) {
    const Patch& patch = *piece.patch;
    const int64_t row_blocks = blocks(piece.rows, ROWS_AT_ONCE);
    const int64_t row = task % row_blocks * ROWS_AT_ONCE, rank = task / row_blocks * RANKS_AT_ONCE;
    const int64_t rows = piece.rows - row < ROWS_AT_ONCE ? piece.rows - row : ROWS_AT_ONCE;
    const int64_t ranks = patch.rank - rank < RANKS_AT_ONCE ? patch.rank - rank : RANKS_AT_ONCE;
    const int64_t ldo = inner_width(patch), from = rank * job.k, to = from + ranks * job.k;
    const bool last = rank + ranks == patch.rank;
    const float* x = job.x + (piece.first + row) * job.k;
    float* out = job.inner + piece.inner + row * ldo + rank;
    if (!patch.is_bf16) {
        const float* a = static_cast<const float*>(patch.a);
        return shrink<float>({a + from, ranks, job.k, x, out, ldo, last ? after.patch->a : a + to}, rows);
    }
    const uint16_t* a = static_cast<const uint16_t*>(patch.a);
    const void* next = last ? after.patch->a : a + to;
    if (rows < WIDEN_ROWS) return shrink<uint16_t>({a + from, ranks, job.k, x, out, ldo, next}, rows);
    static thread_local Buffer wide;
    widen(a + from, ranks * job.k, wide.need<float>(ranks * job.k));
    shrink<float>({wide.at<float>(), ranks, job.k, x, out, ldo, next}, rows);
}

// ------------------------------------------------------------------------------ (x a^T) b
template <class T> struct Expand {
    const T* b;  // [ranks][ldb]
    int64_t ranks, ldb;
    const float* inner;  // [rows][ldi]
    int64_t ldi;
    float* y;  // [rows][ldy], `width` columns
    int64_t ldy, width;
    const void* next;  // read by this thread when these ranks are done
};

// MR rows of y += NR ranks, in ascending order.
template <class T, int MR, int NR> CT_FLAT static void sums(const Expand<T>& s, int64_t row, int64_t rank) {
    constexpr int NV = VL == 4 ? 4 : 2, STEP = NV * VL;  // independent sums: rows x NV
    constexpr int PAIR = MR > 1 ? 2 : 1;
    const int64_t ldb = s.ldb, ldi = s.ldi, ldy = s.ldy, width = s.width;  // stores to y could change s
    const T* const b = s.b + rank * ldb;
    const float* const inner = s.inner + row * ldi + rank;
    float* const y = s.y + row * ldy;
    const void* const next = rank + NR < s.ranks ? static_cast<const void*>(b + NR * ldb) : s.next;
    xq t[MR];
    each<MR>([&](auto m) { t[m] = xload(inner + m * ldi); });
    int64_t i = 0;
    for (; i + STEP <= width; i += STEP) {
        fetch(next, NR * i * sizeof(T), NR * STEP * sizeof(T));
        vf w[NR][NV];
        each<NR>([&](auto r) {
            each<NV / 2>([&](auto v) { vload2(b + r * ldb + i + 2 * v * VL, w[r][2 * v], w[r][2 * v + 1]); });
        });
        each<MR / PAIR>([&](auto pair) {
            float* const at = y + pair * PAIR * ldy + i;
            vf sum[PAIR][NV];
            each<PAIR>([&](auto m) { each<NV>([&](auto v) { sum[m][v] = vload(at + m * ldy + v * VL); }); });
            each<NR>([&](auto r) {
                each<PAIR>([&](auto m) {
                    each<NV>([&](auto v) { sum[m][v] = vfma_at<r>(sum[m][v], w[r][v], t[pair * PAIR + m]); });
                });
            });
            each<PAIR>([&](auto m) { each<NV>([&](auto v) { vstore(at + m * ldy + v * VL, sum[m][v]); }); });
        });
    }
    for (; i < width; ++i)
        for (int m = 0; m < MR; ++m)
            for (int r = 0; r < NR; ++r)
                y[m * ldy + i] = __builtin_fmaf(inner[m * ldi + r], widened(b[r * ldb + i]), y[m * ldy + i]);
}

template <class T, int MR> static void sums_of_ranks(const Expand<T>& s, int64_t row) {
    int64_t rank = 0;
    for (; rank + 4 <= s.ranks; rank += 4) sums<T, MR, 4>(s, row, rank);
    switch (s.ranks - rank) {
        case 3: return sums<T, MR, 3>(s, row, rank);
        case 2: return sums<T, MR, 2>(s, row, rank);
        case 1: return sums<T, MR, 1>(s, row, rank);
    }
}

template <class T> static void expand(const Expand<T>& s, int64_t rows) {
    int64_t row = 0;
    for (; row + EXPAND_ROWS <= rows; row += EXPAND_ROWS) sums_of_ranks<T, EXPAND_ROWS>(s, row);
    for (; row + 2 <= rows; row += 2) sums_of_ranks<T, 2>(s, row);
    if (row < rows) sums_of_ranks<T, 1>(s, row);
}

static void rescale(const Patch& patch, int64_t from, int64_t width, float* y) {
    if (patch.out_scale)
        for (int64_t i = 0; i < width; ++i) y[i] *= patch.out_scale[from + i];
    if (patch.shift)
        for (int64_t i = 0; i < width; ++i) y[i] += patch.shift[from + i];
}

static void expand_task(const PatchJob& job, const Piece& piece, int64_t task, const Piece& after, int64_t cuts) {
    const Patch& patch = *piece.patch;
    const int64_t row_blocks = blocks(piece.rows, ROWS_AT_ONCE), step = round_up(blocks(piece.width, cuts), 2 * VL);
    const int64_t row = task % row_blocks * ROWS_AT_ONCE, from = task / row_blocks * step;
    if (from >= piece.width) return;
    const int64_t rows = piece.rows - row < ROWS_AT_ONCE ? piece.rows - row : ROWS_AT_ONCE;
    const int64_t width = piece.width - from < step ? piece.width - from : step;
    const int64_t at = (piece.first + row) * job.n + piece.column + from, ldi = inner_width(patch);
    const float* inner = job.inner + piece.inner + row * ldi;
    const void* next = after.patch->b;
    float* const y = job.y + at;
    for (int64_t m = 0; m < rows; ++m) rescale(patch, from, width, y + m * job.n);
    if (patch.is_bf16)
        expand<uint16_t>({static_cast<const uint16_t*>(patch.b) + from, patch.rank, piece.width, inner, ldi, y, job.n, width, next}, rows);
    else
        expand<float>({static_cast<const float*>(patch.b) + from, patch.rank, piece.width, inner, ldi, y, job.n, width, next}, rows);
    if (!job.aside || !patch.out_scale) return;
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t i = 0; i < width; ++i) y[m * job.n + i] += job.aside[at + m * job.n + i];
}

// Runs tasks 0 .. count(piece) of every piece, several at a time; run also gets the next piece.
template <class Count, class Run> static void spread(Team& team, const std::vector<Piece>& pieces, Count count, Run run) {
    int64_t total = 0;
    for (const Piece& piece : pieces) total += count(piece);
    if (!total) return;
    const int64_t grain = total / (team.size() * 8);
    const Piece* const last = &pieces.back();
    team.share(total, grain < 1 ? 1 : grain, [&](int64_t begin, int64_t end) {
        const Piece* piece = pieces.data();
        for (int64_t task = begin, before = 0; task < end; ++task) {
            while (task - before >= count(*piece)) before += count(*piece++);
            run(*piece, task - before, piece == last ? *piece : piece[1]);
        }
    });
}

static int64_t row_blocks(const Piece& piece) { return blocks(piece.rows, ROWS_AT_ONCE); }

void add_patches(Team& team, const PatchJob& job) {
    spread(team, job.pieces, [&](const Piece& p) { return blocks(p.patch->rank, RANKS_AT_ONCE) * row_blocks(p); },
           [&](const Piece& p, int64_t task, const Piece& after) { shrink_task(job, p, task, after); });
    int64_t whole = 0;
    for (const Piece& piece : job.pieces) whole += row_blocks(piece);
    const int64_t cuts = whole >= team.size() * 4 ? 1 : team.size() * 2;  // of columns: work for everyone
    spread(team, job.pieces, [&](const Piece& p) { return cuts * row_blocks(p); },
           [&](const Piece& p, int64_t task, const Piece& after) { expand_task(job, p, task, after, cuts); });
}

extern "C" int32_t ct_patches(const Piece* pieces, int64_t count, const float* x, int64_t k, float* y, int64_t n, int64_t threads) {
    return status_of([&] {
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
    });
}
