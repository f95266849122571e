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

// Tiles 0, 1 and 4 get `top` rows, 2, 3 and 5 `bottom` rows (16 at most): no row is padded.
static void shape_tiles(int top, int bottom, int bytes_of_activations, int rows_of_weights) {
    TileConfig config;
    const auto some = [](int rows) { return uint8_t(rows < 1 ? 1 : rows < 16 ? rows : 16); };
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = i > 5 ? uint8_t(rows_of_weights) : some(i == 2 || i == 3 || i == 5 ? bottom : top);
        config.bytes_per_row[i] = i == 4 || i == 5 ? uint16_t(bytes_of_activations) : 64;
    }
    keep_stores(&config);
    _tile_loadconfig(&config);
}

constexpr int64_t AHEAD = 4096;  // bytes between a tile in use and the one being fetched
#if !defined(CT_FAR_FETCH)
#define CT_FAR_FETCH 1  // 0: leave the panels of the next call to the hardware's prefetcher
#endif

static void fetch_tile(const uint8_t* tile) {
    for (int line = 0; line < 16; ++line) __builtin_prefetch(tile + line * 64, 0, 2);
}

// 32 rows x 2 panels at once: each loaded tile is used twice. `fetch`: how far ahead weights are
// prefetched; 0: not at all.
static void bf16_block(const TileJob& job, int p, int row, int64_t fetch) {
    const bool two_rows = job.rows - row > 16, two_panels = p + 1 < job.panels;
    const uint8_t* w0 = job.panel + p * job.panel_stride;
    const uint8_t* w1 = w0 + job.panel_stride;
    const int64_t stride = job.in->ld_bf16 * 2, steps = round_up(job.k, BF16_K) / BF16_K;
    const uint8_t* top = reinterpret_cast<const uint8_t*>(job.in->bf16) + (job.row + row) * stride;
    const uint8_t* bottom = top + 16 * stride;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s) {
        if (fetch) {
            fetch_tile(w0 + s * 1024 + fetch);
            if (two_panels) fetch_tile(w1 + s * 1024 + fetch);
        }
        _tile_loadd(4, top + s * 64, stride);
        _tile_stream_loadd(6, w0 + s * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_panels) {
            _tile_stream_loadd(7, w1 + s * 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!two_rows) continue;
        _tile_loadd(5, bottom + s * 64, stride);
        _tile_dpbf16ps(2, 5, 6);
        if (two_panels) _tile_dpbf16ps(3, 5, 7);
    }
    float* out = job.tile + (int64_t(p) * job.rows + row) * PANEL;
    float* next = out + int64_t(job.rows) * PANEL;
    _tile_stored(0, out, 64);
    if (two_panels) _tile_stored(1, next, 64);
    if (!two_rows) return;
    _tile_stored(2, out + 16 * PANEL, 64);
    if (two_panels) _tile_stored(3, next + 16 * PANEL, 64);
}

void amx_bf16_tile(const TileJob& job) {
    for (int row = 0; row < job.rows; row += 32) {
        const int rows = job.rows - row;
        if (row == 0 || rows < 32) shape_tiles(rows, rows - 16, 64, 16);
        // few rows: the weights come from memory, faster when prefetched early. Many rows: while the
        // last rows use cached weights, the panels of the next call are prefetched
        const bool far = CT_FAR_FETCH && row > 0 && rows <= 32;
        const int64_t fetch = job.rows <= 32 ? AHEAD : far ? job.panels * job.panel_stride : 0;
        for (int p = 0; p < job.panels; p += 2) bf16_block(job, p, row, fetch);
    }
    _tile_release();
}

// The weights of one part of a group as a tile, a row of which is four columns.
template <class F, int PART> static void load_part(const uint8_t* block, int group, uint8_t* unpacked) {
    if (F::SPAN * PANEL + 2 * PANEL == F::BYTES) {  // int8: bytes that need no unpacking
        _tile_loadd(6, block, 64);
        return;
    }
    each<4>([&](auto step) {
        vb w[2];
        F::template weights<step>(block, group, 0, w[0], w[1]);
        vbstore(unpacked + step * 64, w[F::SCALES == 2 ? PART : 0]);
        if (F::SCALES == 1) vbstore(unpacked + (4 + step) * 64, w[1]);
    });
    keep_stores(unpacked);
    _tile_loadd(6, unpacked, 64);
}

// Up to 16 rows from `row` on of one panel.
template <class F, int ROWS> static void quant_panel(const TileJob& job, int p, int row) {
    constexpr int GROUPS = F::SPAN / GROUP, PART_COLUMNS = GROUP / F::SCALES;
    const Input& in = *job.in;
    const int rows = job.rows - row < 16 ? job.rows - row : 16;
    const int64_t stride = in.groups * 2 * GROUP, first = (job.row + row) * in.groups;
    const int8_t* x = in.planes + first * 2 * GROUP;
    const uint8_t* panel = job.panel + p * job.panel_stride;
    alignas(64) int32_t dots[2][16 * 16];
    alignas(64) uint8_t unpacked[512];
    vf sum[16];
    for (int m = 0; m < 16; ++m) sum[m] = vset(0.0f);
    for (int64_t g = 0; g < in.groups; ++g) {
        const uint8_t* block = panel + g / GROUPS * F::BYTES;
        const int group = int(g % GROUPS);
        each<F::SCALES>([&](auto part) {
            const int8_t* from = x + g * 2 * GROUP + part * PART_COLUMNS;
            load_part<F, part>(block, group, unpacked);
            _tile_zero(0); _tile_zero(2);
            _tile_loadd(4, from, stride);
            _tile_dpbsud(0, 4, 6);
            _tile_stored(0, dots[0], 64);
            if (PLANES == 2) {
                _tile_loadd(5, from + GROUP, stride);
                _tile_dpbsud(2, 5, 6);
                _tile_stored(2, dots[1], 64);
            }
            const vf scale = F::scale(block, group, part, 0), minimum = F::minimum(block, group, part, 0);
            for (int m = 0; m < (ROWS ? ROWS : rows); ++m) {
                vi total = viload(dots[0] + m * 16);
                if (PLANES == 2) total = vadd_int(vtimes128(total), viload(dots[1] + m * 16));
                sum[m] = add_dot<F>(sum[m], total, scale, minimum, in, first + g + m * in.groups, part);
            }
        });
    }
    float* out = job.tile + (int64_t(p) * job.rows + row) * PANEL;
    for (int m = 0; m < rows; ++m) vstore(out + m * PANEL, sum[m]);
}

void amx_quant_tile(int32_t kind, const TileJob& job) {
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        for (int row = 0; row < job.rows; row += 16) {
            const int rows = job.rows - row;
            if (row == 0 || rows < 16) shape_tiles(rows, rows, GROUP / F::SCALES, 8 / F::SCALES);
            for (int p = 0; p < job.panels; ++p)
                if (rows >= 16) quant_panel<F, 16>(job, p, row);
                else quant_panel<F, 0>(job, p, row);
        }
    });
    _tile_release();
}
#endif
