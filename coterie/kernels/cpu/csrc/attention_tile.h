// The inner part of attention: scores, softmax and mixing for one tile of at most 64 positions.
#pragma once
#include "attention.h"

constexpr int MAX_ROW_HEADS = 512;  // most (row, head) pairs of a task
constexpr int MAX_TILE_DIM = 256;   // widest head on AMX tiles
constexpr int QK_ROWS = VL == 8 ? 2 : 4;  // (row, head) pairs scored together; AVX2 has 16 registers

struct TileWork {
    int combos, dim;       // (row, head) pairs, ordered by row; padded head_dim
    int64_t width;         // floats of one state
    float* state;          // [combos][width]: values, max, sum
    float* scores;         // [combos][TILE]
    const float* const* q; // [combos]
    const int* limit;      // [combos]: positions that pair may see, ascending
    int start, count;      // first position, positions in this tile
};

constexpr int QUADS = TILE / 4;

// One tile's rows, four by four: a pointer to the first of each four, and the step between rows.
template <class T> struct TileRows {
    const T *keys[QUADS], *values[QUADS], *next_keys[QUADS];  // next: needed after this tile
    int step = 0;
    bool fetch = false;  // not in the cache yet: values are fetched while keys are scored
    int next = 0;        // how many of next_keys are set
};

template <class T> CT_INLINE void fetch_quad(const T* rows, int dim) {
    for (int at = 0; at < 4 * dim; at += 64 / int(sizeof(T))) __builtin_prefetch(rows + at, 0, 2);
}

// Where one sequence's keys and values of one KV head lie.
template <class T> struct KvView {
    const T *keys, *values;
    const int32_t* table;
    int64_t block_size, dim, block_stride;

    KvView(const Cache& cache, const Shape& shape, const Batch& batch, int sequence, int head) {
        block_size = batch.block_size, dim = shape.head_dim;
        block_stride = shape.kv_heads * block_size * dim;
        keys = static_cast<const T*>(cache.data) + head * block_size * dim;
        values = keys + cache.num_blocks * block_stride;
        table = batch.block_tables + sequence * batch.max_blocks;
    }
    // Every fourth row from `start`; block_size is a multiple of 4, and so is `start`. Rows past `count` exist, but mean nothing.
    void point(int start, int count, const T** k, const T** v) const {
        const int32_t* block = table + start / block_size;
        int64_t inside = start % block_size;
        for (int i = 0; i * 4 < count; ++i, inside += 4) {
            if (inside >= block_size) ++block, inside = 0;
            const int64_t at = *block * block_stride + inside * dim;
            k[i] = keys + at;
            if (v) v[i] = values + at;
        }
    }
    int64_t at(int position) const { return table[position / block_size] * block_stride + position % block_size * dim; }
    // All rows widened to fp32, zero-padded to w.dim and, past the end, to four rows.
    void stage(const TileWork& w, float* out, TileRows<float>& rows) const {
        float* const to[2] = {out, out + TILE * w.dim};
        for (int i = 0; i < int(round_up(w.count, 4)); ++i) {
            const int position = w.start + i;
            const bool real = i < w.count;
            const int64_t at = real ? this->at(position) : 0;
            copy(real ? keys + at : nullptr, to[0] + i * w.dim, w.dim);
            copy(real ? values + at : nullptr, to[1] + i * w.dim, w.dim);
            if (i % 4 == 0) rows.keys[i / 4] = to[0] + i * w.dim, rows.values[i / 4] = to[1] + i * w.dim;
        }
        rows.step = w.dim;
    }
    void copy(const T* from, float* to, int padded) const {
        if (!from) {
            memset(to, 0, padded * sizeof(float));
            return;
        }
        int d = 0;
        for (; d + 2 * VL <= dim; d += 2 * VL) {
            vf a, b;
            vload2(from + d, a, b);
            vstore(to + d, a), vstore(to + d + VL, b);
        }
        for (; d < padded; ++d) to[d] = d < dim ? one(from[d]) : 0.0f;
    }
    static float one(float x) { return x; }
    static float one(uint16_t x) {
        const uint32_t bits = uint32_t(x) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
};

// `ahead`: rows to fetch meanwhile, four for every four scored, or null.
template <class T, int MR>
CT_FLAT static void score(const TileWork& w, int c, const T* const* keys, int step, const T* const* ahead) {
    const float* q[MR];
    each<MR>([&](auto m) { q[m] = w.q[c + m]; });
    float* out = w.scores + c * TILE;
    for (int quad = 0; quad * 4 < w.count; ++quad) {
        if (ahead) fetch_quad(ahead[quad], w.dim);
        const T* const k = keys[quad];
        vf acc[MR][4];
        each<MR>([&](auto m) { each<4>([&](auto j) { acc[m][j] = vset(0.0f); }); });
        for (int d = 0; d < w.dim; d += 2 * VL) {
            vf qa[MR], qb[MR], a[4], b[4];
            each<MR>([&](auto m) { vload2(q[m] + d, qa[m], qb[m]); });
            each<4>([&](auto j) { vload2(k + j * step + d, a[j], b[j]); });
            each<4>([&](auto j) { each<MR>([&](auto m) { acc[m][j] = vfma_acc(acc[m][j], a[j], qa[m]); }); });
            each<4>([&](auto j) { each<MR>([&](auto m) { acc[m][j] = vfma_acc(acc[m][j], b[j], qb[m]); }); });
        }
        each<MR>([&](auto m) {
            vsum4(out + m * TILE + quad * 4, acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
        });
    }
}

// Makes weights of scores, updates max and sum, and rescales the values mixed so far.
CT_FLAT static inline void soften(const TileWork& w, int c) {
    float* s = w.scores + c * TILE;
    float* state = w.state + c * w.width;
    const int seen = w.limit[c] - w.start < w.count ? w.limit[c] - w.start : w.count;
    const int end = int(round_up(w.count, 16));
    for (int t = seen; t < end; ++t) s[t] = -INFINITY;
    constexpr int N = 16 / VL;  // vectors of 16 positions
    vf most[N], sum[N];
    each<N>([&](auto i) { most[i] = vset(state[w.dim]), sum[i] = vset(0.0f); });
    for (int t = 0; t < end; t += 16) each<N>([&](auto i) { most[i] = vmax(most[i], vload(s + t + i * VL)); });
    for (int i = 1; i < N; ++i) most[0] = vmax(most[0], most[i]);
    const float top = vmaxall(most[0]);
    for (int t = 0; t < end; t += 16) {
        vf p[N];
        each<N>([&](auto i) { p[i] = vsub(vload(s + t + i * VL), vset(top)); });
        vexp<N>(p);
        each<N>([&](auto i) { vstore(s + t + i * VL, p[i]), sum[i] = vadd(sum[i], p[i]); });
    }
    for (int i = 1; i < N; ++i) sum[0] = vadd(sum[0], sum[i]);
    float factor = 0.0f;
    if (state[w.dim] == top) factor = 1.0f;
    else if (state[w.dim] != -INFINITY) {
        alignas(64) float lanes[VL];
        vstore(lanes, vexp(vset(state[w.dim] - top)));
        factor = lanes[0];
    }
    state[w.dim] = top;
    state[w.dim + 1] = state[w.dim + 1] * factor + vsum(sum[0]);
    if (factor != 1.0f)
        for (int d = 0; d < w.dim; d += VL) vstore(state + d, vmul(vload(state + d), vset(factor)));
}

// Positions past the last one have weight 0, but their memory may hold anything: the last four rows of
// a cache that is read in place end at `w.count`.
template <class T, int MR, int DV>
CT_FLAT static void mix(const TileWork& w, int c, int d, const TileRows<T>& rows, int fetches) {
    vf acc[MR][DV];
    float* const state = w.state + c * w.width + d;
    const float* const weights = w.scores + c * TILE;
    each<MR>([&](auto m) { each<DV>([&](auto v) { acc[m][v] = vload(state + m * w.width + v * VL); }); });
    const auto add = [&](auto lane, const T* value, const xq* p) {
        each<DV / 2>([&](auto pair) {
            vf a, b;
            vload2(value + 2 * pair * VL, a, b);
            each<MR>([&](auto m) { acc[m][2 * pair] = vfma_at<lane>(acc[m][2 * pair], a, p[m]); });
            each<MR>([&](auto m) { acc[m][2 * pair + 1] = vfma_at<lane>(acc[m][2 * pair + 1], b, p[m]); });
        });
    };
    int quad = 0;
    for (; (quad + 1) * 4 <= w.count; ++quad) {
        if (quad < fetches) fetch_quad(rows.next_keys[quad], w.dim);
        xq p[MR];
        each<MR>([&](auto m) { p[m] = xload(weights + m * TILE + quad * 4); });
        const T* const value = rows.values[quad] + d;
        vf a[DV / 2][2], b[DV / 2][2];
        each<2>([&](auto half) {
            each<2>([&](auto j) {
                each<DV / 2>([&](auto pair) {
                    vload2(value + (2 * half + j) * rows.step + 2 * pair * VL, a[pair][j], b[pair][j]);
                });
            });
            each<2>([&](auto j) {
                each<DV / 2>([&](auto pair) {
                    each<MR>([&](auto m) { acc[m][2 * pair] = vfma_at<2 * half + j>(acc[m][2 * pair], a[pair][j], p[m]); });
                    each<MR>([&](auto m) { acc[m][2 * pair + 1] = vfma_at<2 * half + j>(acc[m][2 * pair + 1], b[pair][j], p[m]); });
                });
            });
        });
    }
    if (quad * 4 < w.count) {
        xq p[MR];
        each<MR>([&](auto m) { p[m] = xload(weights + m * TILE + quad * 4); });
        const T* const value = rows.values[quad] + d;
        each<3>([&](auto lane) {
            if (quad * 4 + lane < w.count) add(lane, value + lane * rows.step, p);
        });
    }
    each<MR>([&](auto m) { each<DV>([&](auto v) { vstore(state + m * w.width + v * VL, acc[m][v]); }); });
}

template <class T, int MR> static void score_and_mix(const TileWork& w, int c, const TileRows<T>& rows, bool fetch) {
    score<T, MR>(w, c, rows.keys, rows.step, fetch && rows.fetch ? rows.values : nullptr);
    for (int m = 0; m < MR; ++m) soften(w, c + m);
    const auto fetches = [&](int d) { return fetch && d == 0 ? rows.next : 0; };
    int d = 0;
    for (; d + 4 * VL <= w.dim; d += 4 * VL) mix<T, MR, 4>(w, c, d, rows, fetches(d));
    for (; d < w.dim; d += 2 * VL) mix<T, MR, 2>(w, c, d, rows, fetches(d));
}

template <class T> static void attend_tile(const TileWork& w, const TileRows<T>& rows) {
    int c = 0;
    while (c < w.combos && w.limit[c] <= w.start) ++c;  // rows that see nothing here
    bool fetch = true;  // the first pass brings the data in
    for (; c + QK_ROWS <= w.combos; c += QK_ROWS, fetch = false) score_and_mix<T, QK_ROWS>(w, c, rows, fetch);
    switch (w.combos - c) {
        case 3: return score_and_mix<T, QK_ROWS == 4 ? 3 : 1>(w, c, rows, fetch);
        case 2: return score_and_mix<T, QK_ROWS == 4 ? 2 : 1>(w, c, rows, fetch);
        case 1: return score_and_mix<T, 1>(w, c, rows, fetch);
    }
}
