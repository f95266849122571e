// The inner part of attention: scores, softmax and mixing for one tile of at most 64 positions.
#pragma once
#include "attention.h"

constexpr int MAX_ROW_HEADS = 512;  // most (row, head) pairs of a task
#if defined(__aarch64__) || defined(__AVX512F__)
constexpr int QK_ROWS = 4;
#else
constexpr int QK_ROWS = 2;
#endif

struct TileWork {
    int combos, dim;       // (row, head) pairs, ordered by row; padded head_dim
    int64_t width;         // floats of one state
    float* state;          // [combos][width]: values, max, sum
    float* scores;         // [combos][TILE]
    const float* const* q; // [combos]
    const int* limit;      // [combos]: positions that pair may see, ascending
    int start, count;      // first position, positions in this tile
};

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
    int64_t offset(int position) const {
        return table[position / block_size] * block_stride + position % block_size * dim;
    }
    // Row pointers; the last is repeated so that four at a time can always be read.
    void point(const TileWork& w, const T** k, const T** v) const {
        const int end = int(round_up(w.count, 4));
        for (int i = 0; i < end; ++i) {
            const int64_t at = offset(w.start + (i < w.count ? i : w.count - 1));
            k[i] = keys + at, v[i] = values + at;
        }
    }
    // The same, widened to fp32 and zero-padded to w.dim.
    void stage(const TileWork& w, float* out, const float** k, const float** v) const {
        const T *from_k[TILE], *from_v[TILE];
        point(w, from_k, from_v);
        for (int i = 0; i < int(round_up(w.count, 4)); ++i) {
            k[i] = copy(from_k[i], out + 2 * i * w.dim, w.dim);
            v[i] = copy(from_v[i], out + (2 * i + 1) * w.dim, w.dim);
        }
    }
    const float* copy(const T* from, float* to, int padded) const {
        int d = 0;
        for (; d + 2 * VL <= dim; d += 2 * VL) {
            vf a, b;
            vload2(from + d, a, b);
            vstore(to + d, a), vstore(to + d + VL, b);
        }
        for (; d < padded; ++d) to[d] = d < dim ? one(from[d]) : 0.0f;
        return to;
    }
    static float one(float x) { return x; }
    static float one(uint16_t x) {
        const uint32_t bits = uint32_t(x) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
};

template <class T, int MR> static void score(const TileWork& w, int c, const T* const* keys) {
    for (int t = 0; t < w.count; t += 4) {
        vf acc[MR][4];
        for (int m = 0; m < MR; ++m)
            for (int j = 0; j < 4; ++j) acc[m][j] = vset(0.0f);
        for (int d = 0; d < w.dim; d += 2 * VL) {
            vf qa[MR], qb[MR];
            for (int m = 0; m < MR; ++m) vload2(w.q[c + m] + d, qa[m], qb[m]);
            for (int j = 0; j < 4; ++j) {
                vf a, b;
                vload2(keys[t + j] + d, a, b);
                for (int m = 0; m < MR; ++m) acc[m][j] = vfma(acc[m][j], a, qa[m]);
                for (int m = 0; m < MR; ++m) acc[m][j] = vfma(acc[m][j], b, qb[m]);
            }
        }
        for (int m = 0; m < MR; ++m)
            vsum4(w.scores + (c + m) * TILE + t, acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
    }
}

// Turns scores into weights, updates max and sum, rescales what was mixed so far.
static inline void soften(const TileWork& w, int c) {
    float* s = w.scores + c * TILE;
    float* state = w.state + c * w.width;
    const int seen = w.limit[c] - w.start < w.count ? w.limit[c] - w.start : w.count;
    const int end = int(round_up(w.count, 16));
    for (int t = seen; t < end; ++t) s[t] = -INFINITY;
    vf most = vset(state[w.dim]);
    for (int t = 0; t < end; t += VL) most = vmax(most, vload(s + t));
    const float top = vmaxall(most);
    vf sum = vset(0.0f);
    for (int t = 0; t < end; t += VL) {
        const vf p = vexp(vsub(vload(s + t), vset(top)));
        vstore(s + t, p);
        sum = vadd(sum, p);
    }
    float factor = 0.0f;
    if (state[w.dim] == top) factor = 1.0f;
    else if (state[w.dim] != -INFINITY) {
        alignas(64) float lanes[VL];
        vstore(lanes, vexp(vset(state[w.dim] - top)));
        factor = lanes[0];
    }
    state[w.dim] = top;
    state[w.dim + 1] = state[w.dim + 1] * factor + vsum(sum);
    if (factor != 1.0f)
        for (int d = 0; d < w.dim; d += VL) vstore(state + d, vmul(vload(state + d), vset(factor)));
}

template <int L, class T, int MR, int DV>
CT_INLINE void mix_one(const T* value, const xq* p, vf (*acc)[DV]) {
    for (int v = 0; v < DV; v += 2) {
        vf a, b;
        vload2(value + v * VL, a, b);
        for (int m = 0; m < MR; ++m) acc[m][v] = vfma_at<L>(acc[m][v], a, p[m]);
        for (int m = 0; m < MR; ++m) acc[m][v + 1] = vfma_at<L>(acc[m][v + 1], b, p[m]);
    }
}

template <class T, int MR, int DV> static void mix(const TileWork& w, int c, int d, const T* const* values) {
    vf acc[MR][DV];
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < DV; ++v) acc[m][v] = vload(w.state + (c + m) * w.width + d + v * VL);
    for (int t = 0; t < w.count; t += 4) {
        xq p[MR];
        for (int m = 0; m < MR; ++m) p[m] = xload(w.scores + (c + m) * TILE + t);
        mix_one<0, T, MR, DV>(values[t] + d, p, acc);
        mix_one<1, T, MR, DV>(values[t + 1] + d, p, acc);
        mix_one<2, T, MR, DV>(values[t + 2] + d, p, acc);
        mix_one<3, T, MR, DV>(values[t + 3] + d, p, acc);
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < DV; ++v) vstore(w.state + (c + m) * w.width + d + v * VL, acc[m][v]);
}

template <class T, int MR> static void score_and_mix(const TileWork& w, int c, const T* const* keys, const T* const* values) {
    score<T, MR>(w, c, keys);
    for (int m = 0; m < MR; ++m) soften(w, c + m);
    int d = 0;
    for (; d + 4 * VL <= w.dim; d += 4 * VL) mix<T, MR, 4>(w, c, d, values);
    for (; d < w.dim; d += 2 * VL) mix<T, MR, 2>(w, c, d, values);
}

template <class T> static void attend_tile(const TileWork& w, const T* const* keys, const T* const* values) {
    int c = 0;
    while (c < w.combos && w.limit[c] <= w.start) ++c;  // rows that see nothing here
    for (; c + QK_ROWS <= w.combos; c += QK_ROWS) score_and_mix<T, QK_ROWS>(w, c, keys, values);
    switch (w.combos - c) {
        case 3: return score_and_mix<T, QK_ROWS == 4 ? 3 : 1>(w, c, keys, values);
        case 2: return score_and_mix<T, QK_ROWS == 4 ? 2 : 1>(w, c, keys, values);
        case 1: return score_and_mix<T, 1>(w, c, keys, values);
    }
}
