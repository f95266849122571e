// AMX tiles for bf16 panels (every number of rows, so that bits do not depend on it) and for
// quantised panels of many rows (the integers of the AVX-512 path, hence the same bits).
#include "amx.h"
#include "gemm.h"

#if CT_AMX
#if !defined(CT_AMX_EMULATION)
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool amx_ready() {
#if defined(CT_AMX_EMULATION)
    return true;
#else
    static const bool ready = [] {
        constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }();
    return ready;
#endif
}

// Sixteen rows of activations; short blocks are padded with zeros in scratch.
struct Rows {
    const uint8_t* at;
    int64_t stride;  // bytes
};

static Rows sixteen(const void* x, int64_t stride, int row, int rows, int64_t bytes, uint8_t* scratch) {
    const uint8_t* from = static_cast<const uint8_t*>(x) + row * stride;
    if (rows - row >= 16) return {from, stride};
    for (int m = 0; m < 16; ++m)
        if (m < rows - row) memcpy(scratch + m * bytes, from + m * stride, bytes);
        else memset(scratch + m * bytes, 0, bytes);
    keep_stores(scratch);
    return {scratch, bytes};
}

static void copy_tile(const float* from, float* to, int rows) {
    for (int m = 0; m < (rows < 16 ? rows : 16); ++m) vstore(to + m * PANEL, vload(from + m * PANEL));
}

constexpr int64_t AHEAD = 4096;  // bytes between a tile in use and the one being fetched

static void fetch_tile(const uint8_t* tile) {
    for (int line = 0; line < 16; ++line) __builtin_prefetch(tile + line * 64, 0, 2);
}

// 32 rows x 2 panels at once: each loaded tile is used twice.
static void bf16_block(const TileJob& job, int p, int row, Rows top, Rows bottom, bool two_rows, bool two_panels) {
    const uint8_t* w0 = job.panel + p * job.panel_stride;
    const uint8_t* w1 = w0 + job.panel_stride;
    const int64_t steps = round_up(job.k, BF16_K) / BF16_K;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s) {
        if (!two_rows) {  // few rows: the weights come from memory, faster when asked for early
            fetch_tile(w0 + s * 1024 + AHEAD);
            if (two_panels) fetch_tile(w1 + s * 1024 + AHEAD);
        }
        _tile_loadd(4, top.at + s * 64, top.stride);
        _tile_stream_loadd(6, w0 + s * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_panels) {
            _tile_stream_loadd(7, w1 + s * 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!two_rows) continue;
        _tile_loadd(5, bottom.at + s * 64, bottom.stride);
        _tile_dpbf16ps(2, 5, 6);
        if (two_panels) _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float out[4][16 * PANEL];
    _tile_stored(0, out[0], 64); _tile_stored(1, out[1], 64);
    _tile_stored(2, out[2], 64); _tile_stored(3, out[3], 64);
    for (int i = 0; i < 4; ++i) {
        if ((i & 1 && !two_panels) || (i & 2 && !two_rows)) continue;
        const int at = row + (i & 2 ? 16 : 0);
        copy_tile(out[i], job.tile + (int64_t(p + (i & 1)) * job.rows + at) * PANEL, job.rows - at);
    }
}

void amx_bf16_tile(const TileJob& job) {
    static thread_local Buffer scratch;
    const Input& in = *job.in;
    const int64_t bytes = in.ld_bf16 * 2;
    uint8_t* pad = scratch.need<uint8_t>(2 * 16 * bytes);
    const uint16_t* x = in.bf16 + job.row * in.ld_bf16;
    load_config(64, 16);
    for (int row = 0; row < job.rows; row += 32) {
        const bool two_rows = job.rows - row > 16;
        const Rows top = sixteen(x, bytes, row, job.rows, bytes, pad);
        const Rows bottom = two_rows ? sixteen(x, bytes, row + 16, job.rows, bytes, pad + 16 * bytes) : top;
        for (int p = 0; p < job.panels; p += 2) bf16_block(job, p, row, top, bottom, two_rows, p + 1 < job.panels);
    }
    _tile_release();
}

// One group's weights as a tile of 8 x 64 bytes; int4 is unpacked on the way.
template <bool INT4> static void load_group(const uint8_t* record, uint8_t* unpacked) {
    if (!INT4) {
        _tile_loadd(6, record, 64);
        return;
    }
    for (int step = 0; step < 4; ++step) {
        vbstore(unpacked + step * 64, vbload_low(record + step * 64));
        vbstore(unpacked + (4 + step) * 64, vbload_high(record + step * 64));
    }
    keep_stores(unpacked);
    _tile_loadd(6, unpacked, 64);
}

// sum += one group of 16 rows, exactly as the vector path adds it.
template <bool INT4>
static void add_group(const TileJob& job, const uint8_t* record, int64_t g, int row, const int32_t (*dots)[16 * 16], vf* sum) {
    const Input& in = *job.in;
    const uint16_t* tail = (const uint16_t*)(record + (INT4 ? 256 : 512));
    const vf scale = vload_half(tail), minimum = INT4 ? vload_half(tail + PANEL) : vset(0.0f);
    for (int m = 0; m < 16; ++m) {
        const int64_t at = (job.row + (row + m < job.rows ? row + m : row)) * in.groups + g;
        vi total = viload(dots[0] + m * 16);
        if (PLANES == 2) total = vadd_int(vtimes128(total), viload(dots[1] + m * 16));
        const vf dot = vint_to_float(total, INT4 ? 0 : in.isum[at]);
        sum[m] = vfma(sum[m], dot, vmul(scale, vset(in.scale[at])));
        if (INT4) sum[m] = vfma(sum[m], minimum, vset(in.sum[at]));
    }
}

template <bool INT4> void amx_quant_tile(const TileJob& job) {
    constexpr int BYTES = INT4 ? INT4_RECORD : INT8_RECORD;
    static thread_local Buffer scratch;
    const Input& in = *job.in;
    const int64_t bytes = in.groups * 2 * GROUP;
    uint8_t* pad = scratch.need<uint8_t>(16 * bytes);
    alignas(64) int32_t dots[2][16 * 16];
    alignas(64) uint8_t unpacked[512];
    load_config(GROUP, 8);
    for (int row = 0; row < job.rows; row += 16) {
        const Rows x = sixteen(in.planes + job.row * bytes, bytes, row, job.rows, bytes, pad);
        for (int p = 0; p < job.panels; ++p) {
            const uint8_t* record = job.panel + p * job.panel_stride;
            vf sum[16];
            for (int m = 0; m < 16; ++m) sum[m] = vset(0.0f);
            for (int64_t g = 0; g < in.groups; ++g, record += BYTES) {
                load_group<INT4>(record, unpacked);
                _tile_zero(0); _tile_zero(1);
                _tile_loadd(4, x.at + g * 2 * GROUP, x.stride);
                _tile_dpbsud(0, 4, 6);
                _tile_stored(0, dots[0], 64);
                if (PLANES == 2) {
                    _tile_loadd(5, x.at + g * 2 * GROUP + GROUP, x.stride);
                    _tile_dpbsud(1, 5, 6);
                    _tile_stored(1, dots[1], 64);
                }
                add_group<INT4>(job, record, g, row, dots, sum);
            }
            float* out = job.tile + (int64_t(p) * job.rows + row) * PANEL;
            for (int m = 0; m < 16 && row + m < job.rows; ++m) vstore(out + m * PANEL, sum[m]);
        }
    }
    _tile_release();
}

template void amx_quant_tile<false>(const TileJob& job);
template void amx_quant_tile<true>(const TileJob& job);
#endif
