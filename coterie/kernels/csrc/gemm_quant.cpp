// Int8 and int4 panels against activations of 15 bits in two int8 planes (x = 128 * high + low).
// A group's dot product is an exact integer; groups are added in ascending order in fp32.
#include "gemm.h"

#if defined(__aarch64__)
constexpr int QUANT_ROWS = 4, QUANT_VECS = 2;
#elif defined(__AVX512F__)
constexpr int QUANT_ROWS = 8, QUANT_VECS = 1;
#else
constexpr int QUANT_ROWS = 3, QUANT_VECS = 2;
#endif

template <bool INT4, int HALF> CT_INLINE vb weights(const uint8_t* record, int step, int vec) {
    const uint8_t* at = record + vec * VL * 4;
    if (!INT4) return vbload(at + (HALF * 4 + step) * 64);
    return HALF ? vbload_high(at + step * 64) : vbload_low(at + step * 64);
}

template <bool INT4, int HALF, int L, int MR, int NV>
CT_INLINE void dot_step(const uint8_t* record, int v0, const xb* hi, const xb* lo, vi (*acc)[NV][2]) {
    for (int v = 0; v < NV; ++v) {
        const vb w = weights<INT4, HALF>(record, L, v0 + v);
        for (int m = 0; m < MR; ++m) {
            acc[m][v][0] = vdot<L>(acc[m][v][0], w, hi[m]);
            acc[m][v][1] = vdot<L>(acc[m][v][1], w, lo[m]);
        }
    }
}

template <bool INT4, int HALF, int MR, int NV>
CT_INLINE void dot_half(const uint8_t* record, int v0, const int8_t* x, int64_t ldx, vi (*acc)[NV][2]) {
    xb hi[MR], lo[MR];
    for (int m = 0; m < MR; ++m) {
        hi[m] = xbload(x + m * ldx + HALF * 16);
        lo[m] = xbload(x + m * ldx + GROUP + HALF * 16);
    }
    dot_step<INT4, HALF, 0, MR, NV>(record, v0, hi, lo, acc);
    dot_step<INT4, HALF, 1, MR, NV>(record, v0, hi, lo, acc);
    dot_step<INT4, HALF, 2, MR, NV>(record, v0, hi, lo, acc);
    dot_step<INT4, HALF, 3, MR, NV>(record, v0, hi, lo, acc);
}

template <bool INT4, int MR, int NV>
static void kernel(const uint8_t* record, const Input& in, int64_t row, int v0, float* tile) {
    constexpr int BYTES = INT4 ? INT4_RECORD : INT8_RECORD;
    vf sum[MR][NV];
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) sum[m][v] = vset(0.0f);
    const int64_t ldx = in.groups * 2 * GROUP, base = row * in.groups;
    const int8_t* x = in.planes + row * ldx;
    for (int64_t g = 0; g < in.groups; ++g, record += BYTES, x += 2 * GROUP) {
        vi acc[MR][NV][2];
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < NV; ++v) acc[m][v][0] = acc[m][v][1] = vizero();
        dot_half<INT4, 0, MR, NV>(record, v0, x, ldx, acc);
        dot_half<INT4, 1, MR, NV>(record, v0, x, ldx, acc);
        const uint16_t* scales = (const uint16_t*)(record + (INT4 ? 256 : 512)) + v0 * VL;
        for (int v = 0; v < NV; ++v) {
            const vf scale = vload_half(scales + v * VL);
            for (int m = 0; m < MR; ++m) {
                const int64_t at = base + m * in.groups + g;
                const vf dot = vplanes(acc[m][v][0], acc[m][v][1], INT4 ? 0 : in.isum[at]);
                sum[m][v] = vfma(sum[m][v], dot, vmul(scale, vset(in.scale[at])));
            }
            if (!INT4) continue;
            const vf minimum = vload_half(scales + PANEL + v * VL);
            for (int m = 0; m < MR; ++m)
                sum[m][v] = vfma(sum[m][v], minimum, vset(in.sum[base + m * in.groups + g]));
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) vstore(tile + m * PANEL + (v0 + v) * VL, sum[m][v]);
}

template <bool INT4, int MR, int NV>
static void across(const uint8_t* panel, const TileJob& job, int row, float* tile) {
    for (int v = 0; v < PV; v += NV) kernel<INT4, MR, NV>(panel, *job.in, job.row + row, v, tile + row * PANEL);
}

template <bool INT4> void quant_tile(const TileJob& job) {
    for (int p = 0; p < job.panels; ++p) {
        const uint8_t* panel = job.panel + p * job.panel_stride;
        float* tile = job.tile + int64_t(p) * job.rows * PANEL;
        int row = 0;
        for (; row + QUANT_ROWS <= job.rows; row += QUANT_ROWS)
            across<INT4, QUANT_ROWS, QUANT_VECS>(panel, job, row, tile);
        for (; row + 2 <= job.rows; row += 2) across<INT4, 2, PV>(panel, job, row, tile);
        if (row < job.rows) across<INT4, 1, PV>(panel, job, row, tile);
    }
}

template void quant_tile<false>(const TileJob& job);
template void quant_tile<true>(const TileJob& job);
