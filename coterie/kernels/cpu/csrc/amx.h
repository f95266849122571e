// What every user of AMX tiles shares: the tile configuration and its guards.
#pragma once
#include "types.h"

#if CT_AMX
#if defined(CT_AMX_EMULATION)
#include CT_AMX_EMULATION
#endif

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// GCC 12 assumes that loadconfig reads 8 bytes and that tile loads read none: it would remove stores
// before them.
CT_INLINE void keep_stores(const void* written) { asm volatile("" : : "r"(written) : "memory"); }

// Tiles 0-3 accumulate, 4-5 hold activations, 6-7 weights.
static inline void load_config(int bytes_of_activations, int rows_of_weights) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = i < 6 ? 16 : uint8_t(rows_of_weights);
        config.bytes_per_row[i] = i == 4 || i == 5 ? uint16_t(bytes_of_activations) : 64;
    }
    keep_stores(&config);
    _tile_loadconfig(&config);
}

struct TileScope {  // releases the tiles at the end of a scope that loaded a configuration
    bool used;
    ~TileScope() {
        if (used) _tile_release();
    }
};
#endif
