// The AMX tile instructions in plain C++, so that csrc/amx.cpp can be followed on any CPU.
#pragma once
// One set of tiles per thread, whichever file uses them.
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>  // has the real ones: the names below go before them
#endif
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stream_loadd emulated_stream_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbsud emulated_dpbsud

inline thread_local uint8_t tile_bytes[8][1024];
inline thread_local uint8_t tile_setup[64];

static inline int tile_rows(int t) { return tile_setup[48 + t]; }
static inline int tile_width(int t) { return tile_setup[16 + 2 * t] | tile_setup[17 + 2 * t] << 8; }
static inline void _tile_loadconfig(const void* config) {
    memcpy(tile_setup, config, 64);
    memset(tile_bytes, 0xAA, sizeof(tile_bytes));
}
static inline void _tile_release() { memset(tile_setup, 0, 64); }
static inline void _tile_zero(int t) { memset(tile_bytes[t], 0, 1024); }
static inline void _tile_loadd(int t, const void* from, int64_t stride) {
    memset(tile_bytes[t], 0, 1024);
    for (int r = 0; r < tile_rows(t); ++r)
        memcpy(tile_bytes[t] + r * 64, static_cast<const uint8_t*>(from) + r * stride, tile_width(t));
}
static inline void _tile_stream_loadd(int t, const void* from, int64_t stride) { _tile_loadd(t, from, stride); }
static inline void _tile_stored(int t, void* to, int64_t stride) {
    for (int r = 0; r < tile_rows(t); ++r)
        memcpy(static_cast<uint8_t*>(to) + r * stride, tile_bytes[t] + r * 64, tile_width(t));
}
static inline float tile_bf16(const uint8_t* p) {
    const uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline void _tile_dpbf16ps(int c, int a, int b) {
    for (int m = 0; m < tile_rows(c); ++m)
        for (int k = 0; k < tile_width(a) / 4; ++k)
            for (int n = 0; n < tile_width(c) / 4; ++n)
                for (int j = 0; j < 2; ++j) {
                    float sum;
                    memcpy(&sum, tile_bytes[c] + m * 64 + n * 4, 4);
                    sum += tile_bf16(tile_bytes[a] + m * 64 + k * 4 + j * 2) *
                           tile_bf16(tile_bytes[b] + k * 64 + n * 4 + j * 2);
                    memcpy(tile_bytes[c] + m * 64 + n * 4, &sum, 4);
                }
}
static inline void _tile_dpbsud(int c, int a, int b) {  // signed a, unsigned b
    for (int m = 0; m < tile_rows(c); ++m)
        for (int k = 0; k < tile_width(a) / 4; ++k)
            for (int n = 0; n < tile_width(c) / 4; ++n)
                for (int j = 0; j < 4; ++j) {
                    int32_t sum;
                    memcpy(&sum, tile_bytes[c] + m * 64 + n * 4, 4);
                    sum += int32_t(int8_t(tile_bytes[a][m * 64 + k * 4 + j])) * tile_bytes[b][k * 64 + n * 4 + j];
                    memcpy(tile_bytes[c] + m * 64 + n * 4, &sum, 4);
                }
}
