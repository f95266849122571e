// AMX tiles for bf16 panels (every number of rows, so that bits do not depend on it) and for
// quantised panels (runs of 16 rows: the integers of the AVX-512 path, hence the same bits).
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

constexpr int CHUNK = 8;  // groups that are unpacked at once

// Weights of some groups of one panel as tiles, a row of which is four columns: unpacked long before
// tiles read them, because what was just written reaches a tile late.
struct TileWeights {
    alignas(64) uint8_t bytes[CHUNK][512];
    vf scale[CHUNK], minimum[CHUNK];

    template <class F> CT_INLINE void load(TileWeights& to, const uint8_t* panel, int64_t first, int count) {
        constexpr int GROUPS = F::SPAN / GROUP;
        for (int i = 0; i < count; ++i) {
            const uint8_t* block = panel + (first + i) / GROUPS * F::BYTES;
            const int group = int((first + i) % GROUPS);
            each<4>([&](auto step) {
                vb low, high;
                F::template weights<step>(block, group, 0, low, high);
                vbstore(to.bytes[i] + step * 64, low);
                vbstore(to.bytes[i] + 256 + step * 64, high);
            });
            to.scale[i] = F::scale(block, group, 0, 0), to.minimum[i] = F::minimum(block, group, 0, 0);
        }
        keep_stores(to.bytes);
    }
};

// The integers of 16 rows and one group: both planes of activations times weights. Two groups may be
// under way, each in tiles of its own.
template <int TURN> CT_INLINE void multiply_group(const uint8_t* weights, const int8_t* x, int64_t stride, int32_t (&dots)[2][256]) {
    _tile_loadd(4, x, stride);
    if (PLANES == 2) _tile_loadd(5, x + GROUP, stride);
    if constexpr (TURN == 0) {
        _tile_loadd(6, weights, 64);
        _tile_zero(0);
        _tile_dpbsud(0, 4, 6);
        _tile_stored(0, dots[0], 64);
        if (PLANES == 1) return;
        _tile_zero(1);
        _tile_dpbsud(1, 5, 6);
        _tile_stored(1, dots[1], 64);
    } else {
        _tile_loadd(7, weights, 64);
        _tile_zero(2);
        _tile_dpbsud(2, 4, 7);
        _tile_stored(2, dots[0], 64);
        if (PLANES == 1) return;
        _tile_zero(3);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(3, dots[1], 64);
    }
}

// 16 rows of one panel += their products with `count` groups from place `at` of the first row on. Tiles
// multiply a group while the integers of the one before it become floats.
template <class F> CT_FLAT static void add_groups(const TileWeights& weights, const Input& in, int64_t at, int count, float* out) {
    alignas(64) int32_t dots[2][2][256];
    vf sum[16];
    each<16>(CT_EACH(m) { sum[m] = vload(out + m * PANEL); });
    const auto multiply = [&](auto turn, int group) __attribute__((always_inline)) {
        multiply_group<turn>(weights.bytes[group], in.planes + (at + group) * 2 * GROUP, in.ld_groups * 2 * GROUP, dots[turn]);
    };
    multiply(std::integral_constant<int, 0>{}, 0);
    for (int pair = 0; pair < count; pair += 2)
        each<2>(CT_EACH(turn) {
            const int group = pair + turn;
            if (group + 1 < count) multiply(std::integral_constant<int, 1 - turn>{}, group + 1);
            if (group >= count) return;
            each<16>(CT_EACH(m) {
                vi total = viload(dots[turn][0] + m * 16);
                if (PLANES == 2) total = vadd_int(vtimes128(total), viload(dots[turn][1] + m * 16));
                sum[m] = add_dot<F>(sum[m], total, weights.scale[group], weights.minimum[group], in, at + group + m * in.ld_groups, 0);
            });
        });
    each<16>(CT_EACH(m) { vstore(out + m * PANEL, sum[m]); });
}

template <class F> static int quant_rows(const TileJob& job) {
    if (F::SCALES == 2) return 0;  // twice the floats: vectors are faster
    const int rows = job.rows / 16 * 16;
    const int64_t groups = job.k / GROUP;
    TileWeights weights;
    shape_tiles(16, 16, GROUP, GROUP / 4);
    for (int64_t first = 0; first < groups; first += CHUNK) {
        const int count = int(groups - first < CHUNK ? groups - first : CHUNK);
        for (int p = 0; p < job.panels; ++p) {
            float* out = job.tile + int64_t(p) * job.rows * PANEL;
            if (first == 0) memset(out, 0, size_t(rows) * PANEL * sizeof(float));
            TileWeights::load<F>(weights, job.panel + p * job.panel_stride, first, count);
            for (int row = 0; row < rows; row += 16)
                add_groups<F>(weights, *job.in, (job.row + row) * job.in->ld_groups + first, count, out + row * PANEL);
        }
    }
    _tile_release();
    return rows;
}

int amx_quant_tile(int32_t kind, const TileJob& job) {
    return with_format(kind, [&](auto format) { return quant_rows<decltype(format)>(job); });
}
#endif
