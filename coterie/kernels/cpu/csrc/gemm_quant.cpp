// Int8 and int4 panels against activations of 15 bits in two int8 planes (x = 128 * high + low).
// A group's dot product is an exact integer; groups are added in ascending order in fp32.
#include "gemm.h"

constexpr int VECS = VL == 4 ? 2 : 1;  // output vectors whose weights of one group fill the registers
constexpr int AT_ONCE = 4;      // rows whose sums run side by side
constexpr int QUANT_ROWS = 16;  // rows that share one unpacking: their planes stay in the L1 cache

template <bool INT4> struct GroupWeights {
    vb w[8][VECS];  // four k each
    vf scale[VECS], minimum[VECS];

    CT_INLINE void load(GroupWeights& g, const uint8_t* record, int vec) {
        const uint8_t* at = record + vec * VL * 4;
        each<4>([&](auto step) {
            each<VECS>([&](auto v) {
                const uint8_t* from = at + step * 64 + v * VL * 4;
                g.w[step][v] = INT4 ? vbload_low(from) : vbload(from);
                g.w[4 + step][v] = INT4 ? vbload_high(from) : vbload(from + 256);
            });
        });
        const uint16_t* tail = (const uint16_t*)(record + (INT4 ? 256 : 512)) + vec * VL;
        each<VECS>([&](auto v) {
            g.scale[v] = vload_half(tail + v * VL);
            if (INT4) g.minimum[v] = vload_half(tail + PANEL + v * VL);
        });
    }
    // One plane of MR rows, whose groups lie `stride` apart.
    template <int MR>
    CT_INLINE void dot(const GroupWeights& g, const int8_t* plane, int64_t stride, vi (&acc)[MR][VECS]) {
        each<2>([&](auto half) {
            xb x[MR];
            each<MR>([&](auto m) { x[m] = xbload(plane + m * stride + half * 16); });
            each<4>([&](auto step) {
                each<MR>([&](auto m) {
                    each<VECS>([&](auto v) { acc[m][v] = vdot<step>(acc[m][v], g.w[half * 4 + step][v], x[m]); });
                });
            });
        });
    }
};

// tile += one group of MR rows; `at` indexes the first row's group in scale, sum and isum.
template <bool INT4, int MR>
CT_INLINE void add_group(const GroupWeights<INT4>& g, const Input& in, int64_t at, vf (&sum)[MR][VECS]) {
    const int8_t* x = in.planes + at * 2 * GROUP;
    const int64_t stride = in.groups * 2 * GROUP;
    vi acc[MR][VECS];
    each<MR>([&](auto m) { each<VECS>([&](auto v) { acc[m][v] = vizero(); }); });
    g.template dot<MR>(g, x, stride, acc);
    if (PLANES == 2) {
        each<MR>([&](auto m) { each<VECS>([&](auto v) { acc[m][v] = vtimes128(acc[m][v]); }); });
        g.template dot<MR>(g, x + GROUP, stride, acc);
    }
    each<MR>([&](auto m) {
        const int64_t here = at + m * in.groups;
        const vf scale = vset(in.scale[here]);
        each<VECS>([&](auto v) {
            const vf dot = vint_to_float(acc[m][v], INT4 ? 0 : in.isum[here]);
            sum[m][v] = vfma(sum[m][v], dot, vmul(g.scale[v], scale));
            if (INT4) sum[m][v] = vfma(sum[m][v], g.minimum[v], vset(in.sum[here]));
        });
    });
}

template <bool INT4, int MR>
CT_INLINE void add_rows(const GroupWeights<INT4>& g, const Input& in, int64_t at, float* out) {
    vf sum[MR][VECS];
    each<MR>([&](auto m) { each<VECS>([&](auto v) { sum[m][v] = vload(out + m * PANEL + v * VL); }); });
    add_group<INT4, MR>(g, in, at, sum);
    each<MR>([&](auto m) { each<VECS>([&](auto v) { vstore(out + m * PANEL + v * VL, sum[m][v]); }); });
}

// A single row is bound by latency: both planes are summed side by side (the same integers).
template <bool INT4>
CT_FLAT static void one_row(const uint8_t* record, const Input& in, int64_t row, float* tile) {
    constexpr int BYTES = INT4 ? INT4_RECORD : INT8_RECORD;
    vf sum[PV];
    each<PV>([&](auto v) { sum[v] = vset(0.0f); });
    const int64_t first = row * in.groups;
    for (int64_t g = 0; g < in.groups; ++g, record += BYTES) {
        const int8_t* x = in.planes + (first + g) * 2 * GROUP;
        const xb high[2] = {xbload(x), xbload(x + 16)}, low[2] = {xbload(x + 32), xbload(x + 48)};
        vi acc[2][PV];
        each<PV>([&](auto v) { acc[0][v] = acc[1][v] = vizero(); });
        each<4>([&](auto step) {
            each<PV>([&](auto v) {
                const uint8_t* from = record + step * 64 + v * VL * 4;
                const vb a = INT4 ? vbload_low(from) : vbload(from), b = INT4 ? vbload_high(from) : vbload(from + 256);
                acc[0][v] = vdot<step>(acc[0][v], a, high[0]);
                if (PLANES == 2) acc[1][v] = vdot<step>(acc[1][v], a, low[0]);
                acc[0][v] = vdot<step>(acc[0][v], b, high[1]);
                if (PLANES == 2) acc[1][v] = vdot<step>(acc[1][v], b, low[1]);
            });
        });
        const uint16_t* tail = (const uint16_t*)(record + (INT4 ? 256 : 512));
        const vf scale = vset(in.scale[first + g]);
        each<PV>([&](auto v) {
            const vi total = PLANES == 2 ? vadd_int(vtimes128(acc[0][v]), acc[1][v]) : acc[0][v];
            const vf dot = vint_to_float(total, INT4 ? 0 : in.isum[first + g]);
            sum[v] = vfma(sum[v], dot, vmul(vload_half(tail + v * VL), scale));
            if (INT4) sum[v] = vfma(sum[v], vload_half(tail + PANEL + v * VL), vset(in.sum[first + g]));
        });
    }
    each<PV>([&](auto v) { vstore(tile + v * VL, sum[v]); });
}

template <bool INT4>
CT_FLAT static void many_rows(const uint8_t* record, const Input& in, int64_t row, int rows, int vec, float* tile) {
    constexpr int BYTES = INT4 ? INT4_RECORD : INT8_RECORD;
    const vf zero = vset(0.0f);
    for (int m = 0; m < rows; ++m) each<VECS>([&](auto v) { vstore(tile + m * PANEL + (vec + v) * VL, zero); });
    for (int64_t g = 0; g < in.groups; ++g, record += BYTES) {
        GroupWeights<INT4> weights;
        GroupWeights<INT4>::load(weights, record, vec);
        float* out = tile + vec * VL;
        int m = 0;
        for (; m + AT_ONCE <= rows; m += AT_ONCE)
            add_rows<INT4, AT_ONCE>(weights, in, (row + m) * in.groups + g, out + m * PANEL);
        const int64_t at = (row + m) * in.groups + g;
        switch (rows - m) {  // side by side too: a single sum waits for itself
            case 3: add_rows<INT4, 3>(weights, in, at, out + m * PANEL); break;
            case 2: add_rows<INT4, 2>(weights, in, at, out + m * PANEL); break;
            case 1: add_rows<INT4, 1>(weights, in, at, out + m * PANEL);
        }
    }
}

template <bool INT4> void quant_tile(const TileJob& job) {
    for (int p = 0; p < job.panels; ++p) {
        const uint8_t* panel = job.panel + p * job.panel_stride;
        float* tile = job.tile + int64_t(p) * job.rows * PANEL;
        for (int row = 0; row < job.rows; row += QUANT_ROWS) {
            const int rows = job.rows - row < QUANT_ROWS ? job.rows - row : QUANT_ROWS;
            if (rows == 1) {
                one_row<INT4>(panel, *job.in, job.row + row, tile + row * PANEL);
                continue;
            }
            for (int vec = 0; vec < PV; vec += VECS)
                many_rows<INT4>(panel, *job.in, job.row + row, rows, vec, tile + row * PANEL);
        }
    }
}

template void quant_tile<false>(const TileJob& job);
template void quant_tile<true>(const TileJob& job);
