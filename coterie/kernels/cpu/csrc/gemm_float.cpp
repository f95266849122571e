// fp32 and bf16 panels. bf16 is widened to fp32 on the way into the registers, or once per block
// of rows into scratch when many rows share the panel: the same numbers in the same order.
#include "gemm.h"

// Rows and panels of one kernel call: as many accumulators as the registers hold.
constexpr int TILE_ROWS = VL == 4 ? 4 : VL == 8 ? 6 : 12, TILE_PANELS = VL == 16 ? 2 : 1;
#if !defined(CT_GEMV_PANELS)
#define CT_GEMV_PANELS (VL == 4 ? 1 : 2)  // of a single row: the hardware prefetches one stream best
#endif
constexpr int GEMV_PANELS = CT_GEMV_PANELS;
constexpr int K_BLOCK = VL == 4 ? 640 : VL == 8 ? 384 : 192;  // a block of the panel stays in the L1 cache
constexpr int WIDEN_ROWS = 2 * TILE_ROWS;  // from here on, widening a panel into scratch pays

struct F32Weights {
    const float* at;
    int64_t stride;
    F32Weights(const uint8_t* p, int64_t s) : at((const float*)p), stride(s / 4) {}
    struct Two {  // vectors at k + 2 * pair and at the k after it
        vf first, second;
    };
    CT_INLINE Two load(const F32Weights& w, int p, int vec, int64_t k, int pair) {
        const float* from = w.at + p * w.stride + (k + 2 * pair) * PANEL + vec * VL;
        return {vload(from), vload(from + PANEL)};
    }
    CT_INLINE vf even(const Two& two) { return two.first; }
    CT_INLINE vf odd(const Two& two) { return two.second; }
};

struct Bf16Weights {
    const uint32_t* at;
    int64_t stride;
    Bf16Weights(const uint8_t* p, int64_t s) : at((const uint32_t*)p), stride(s / 4) {}
    using Two = vpair;
    CT_INLINE Two load(const Bf16Weights& w, int p, int vec, int64_t k, int pair) {
        return vload_pair(w.at + p * w.stride + (k / 2 + pair) * PANEL + vec * VL);
    }
    CT_INLINE vf even(const Two& two) { return vpair_even(two); }
    CT_INLINE vf odd(const Two& two) { return vpair_odd(two); }
};

struct Span {  // one block of rows and k
    const float* x;
    int64_t ldx, k;
    float* tile;
    int64_t tile_stride;  // from one panel's tile to the next
    bool first;           // k starts here: accumulate from zero
};

template <class W, int MR, int NP> CT_FLAT static void kernel(const W w, const Span& s, int row) {
    constexpr int NV = NP * PV;
    vf acc[MR][NV];
    const int64_t ldx = s.ldx, steps = s.k;
    float* const tile = s.tile + row * PANEL;
    const float* const x = s.x + row * ldx;
    const auto spot = [&](int m, int v) { return tile + v / PV * s.tile_stride + m * PANEL + v % PV * VL; };
    each<MR>([&](auto m) {
        each<NV>([&](auto v) { acc[m][v] = s.first ? vset(0.0f) : vload(spot(m, v)); });
    });
    for (int64_t k = 0; k < steps; k += 4) {
        xq xs[MR];
        each<MR>([&](auto m) { xs[m] = xload(x + m * ldx + k); });
        each<2>([&](auto pair) {
            typename W::Two two[NV];
            vf weight[NV];
            // row by row: an activation is read once for all panels, or else loads would be the limit
            const auto add = [&](auto at) {
                each<MR>([&](auto m) {
                    each<NV>([&](auto v) { acc[m][v] = vfma_at<at>(acc[m][v], weight[v], xs[m]); });
                });
            };
            each<NV>([&](auto v) { weight[v] = W::even(two[v] = W::load(w, v / PV, v % PV, k, pair)); });
            add(std::integral_constant<int, 2 * pair>{});
            each<NV>([&](auto v) { weight[v] = W::odd(two[v]); });
            add(std::integral_constant<int, 2 * pair + 1>{});
        });
    }
    each<MR>([&](auto m) { each<NV>([&](auto v) { vstore(spot(m, v), acc[m][v]); }); });
}

template <class W, int NP> static void all_rows(const W& w, const Span& s, int rows) {
    int row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) kernel<W, TILE_ROWS, NP>(w, s, row);
    if (TILE_ROWS > 8 && row + 8 <= rows) kernel<W, 8, NP>(w, s, row), row += 8;
    if (TILE_ROWS > 4)
        for (; row + 4 <= rows; row += 4) kernel<W, 4, NP>(w, s, row);
    switch (rows - row) {
        case 3: return kernel<W, 3, NP>(w, s, row);
        case 2: return kernel<W, 2, NP>(w, s, row);
        case 1: return kernel<W, 1, NP>(w, s, row);
    }
}

template <class W> static void all_panels(const TileJob& job, const uint8_t* panel, int64_t stride, Span s) {
    int p = 0;
    float* const tile = s.tile;
    const int step = job.rows == 1 ? GEMV_PANELS : TILE_PANELS;
    for (; p + step <= job.panels; p += step) {
        s.tile = tile + p * s.tile_stride;
        const W w(panel + p * stride, stride);
        if (job.rows == 1) kernel<W, 1, GEMV_PANELS>(w, s, 0);
        else all_rows<W, TILE_PANELS>(w, s, job.rows);
    }
    for (; p < job.panels; ++p) {
        s.tile = tile + p * s.tile_stride;
        all_rows<W, 1>(W(panel + p * stride, stride), s, job.rows);
    }
}

static Span span_of(const TileJob& job, int64_t from, int64_t to) {
    return {job.in->x + job.row * job.in->ldx + from, job.in->ldx, to - from,
            job.tile, int64_t(job.rows) * PANEL, from == 0};
}

void f32_tile(const TileJob& job) {
    const int64_t k = round_up(job.k, 4);
    const int64_t block = job.rows == 1 ? k : K_BLOCK;
    for (int64_t from = 0; from < k; from += block) {
        const int64_t to = from + block < k ? from + block : k;
        all_panels<F32Weights>(job, job.panel + from * PANEL * 4, job.panel_stride, span_of(job, from, to));
    }
}

void bf16_tile(const TileJob& job) {
    const int64_t k = round_up(job.k, 4);
    if (job.rows < WIDEN_ROWS) return all_panels<Bf16Weights>(job, job.panel, job.panel_stride, span_of(job, 0, k));
    alignas(64) float wide[TILE_PANELS][K_BLOCK * PANEL];
    TileJob part = job;
    for (int p = 0; p < job.panels; p += TILE_PANELS) {
        part.panels = p + TILE_PANELS <= job.panels ? TILE_PANELS : job.panels - p;
        for (int64_t from = 0; from < k; from += K_BLOCK) {
            const int64_t to = from + K_BLOCK < k ? from + K_BLOCK : k;
            for (int i = 0; i < part.panels; ++i) {
                const uint32_t* src = (const uint32_t*)(job.panel + (p + i) * job.panel_stride) + from / 2 * PANEL;
                for (int64_t j = 0; j < (to - from) / 2; ++j)
                    for (int v = 0; v < PV; ++v) {
                        const vpair w = vload_pair(src + j * PANEL + v * VL);
                        vstore(&wide[i][2 * j * PANEL + v * VL], vpair_even(w));
                        vstore(&wide[i][(2 * j + 1) * PANEL + v * VL], vpair_odd(w));
                    }
            }
            Span s = span_of(job, from, to);
            s.tile += p * s.tile_stride;
            all_panels<F32Weights>(part, (const uint8_t*)wide, sizeof(wide[0]), s);
        }
    }
}
