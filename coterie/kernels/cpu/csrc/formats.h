// Formats of quantised panels: blocks of SPAN columns x 16 rows, one after another; in a block groups
// of 32 columns in order. weight = scale * q + minimum. A format says where its bytes lie and how they
// become integers and factors; a new one is a struct here, a packer in pack.cpp, and a row of
// weights/kinds.py. A group's integers:
//   nibbles     [4][16][4] bytes: byte j of step i and row r has column 4 i + j low, 16 + 4 i + j high
//   fifth bits  [16][4] bytes: bit i of byte j belongs to column 4 i + j, bit 4 + i to 16 + 4 i + j
//   two bits    [2][16][4] bytes: bits 2 i, 2 i + 1 of byte j in half h belong to column 16 h + 4 i + j
#pragma once
#include "types.h"

constexpr int NIBBLE_BYTES = 256, FIFTH_BYTES = 64, TWO_BITS_BYTES = 128;

template <int STEP> CT_INLINE void nibbles(const uint8_t* q, vb& low, vb& high) {
    low = vbload_low(q + STEP * 64), high = vbload_high(q + STEP * 64);
}
template <int STEP> CT_INLINE void with_fifth(const uint8_t* bits, vb& low, vb& high) {
    const vb all = vbload(bits);
    low = vbmerge<4 - STEP>(low, all, 0x10), high = vbmerge<-STEP>(high, all, 0x10);
}
CT_INLINE vf half_row(const uint8_t* halves, int row) { return vload_half((const uint16_t*)halves + row); }
CT_INLINE vf times(vf x, float factor) { return vmul(x, vset(factor)); }

// Every format:
//   weights<STEP>(block, group, at, low, high): VL rows from byte `at` of a step on, columns
//       4 STEP .. 4 STEP + 3 of the group and those 16 further
//   scale, minimum(block, group, half, row): of VL rows; SCALES is 2 where the halves of a group differ

struct Int8Format {  // [8][16][4] int8 (+ W_OFFSET), scales
    static constexpr int SPAN = 32, BYTES = 544, SCALES = 1;
    static constexpr bool MINIMUM = false;
    template <int STEP> CT_INLINE void weights(const uint8_t* block, int, int at, vb& low, vb& high) {
        low = vbload(block + STEP * 64 + at), high = vbload(block + 256 + STEP * 64 + at);
    }
    CT_INLINE vf scale(const uint8_t* block, int, int, int row) { return half_row(block + 512, row); }
    CT_INLINE vf minimum(const uint8_t*, int, int, int) { return vset(0.0f); }
};

struct Int4Format {  // nibbles, scales, minima
    static constexpr int SPAN = 32, BYTES = 320, SCALES = 1;
    static constexpr bool MINIMUM = true;
    template <int STEP> CT_INLINE void weights(const uint8_t* block, int, int at, vb& low, vb& high) {
        nibbles<STEP>(block + at, low, high);
    }
    CT_INLINE vf scale(const uint8_t* block, int, int, int row) { return half_row(block + 256, row); }
    CT_INLINE vf minimum(const uint8_t* block, int, int, int row) { return half_row(block + 288, row); }
};

template <int MINIMA> struct Q5Format {  // nibbles, fifth bits, scales, and for Q5_1 minima
    static constexpr int SPAN = 32, HEAD = 0, BYTES = 352 + 32 * MINIMA, SCALES = 1;
    static constexpr bool MINIMUM = true;
    template <int STEP> CT_INLINE void weights(const uint8_t* block, int, int at, vb& low, vb& high) {
        nibbles<STEP>(block + at, low, high);
        with_fifth<STEP>(block + NIBBLE_BYTES + at, low, high);
    }
    CT_INLINE vf scale(const uint8_t* block, int, int, int row) { return half_row(block + 320, row); }
    CT_INLINE vf minimum(const uint8_t* block, int group, int half, int row) {
        return MINIMA ? half_row(block + 352, row) : times(scale(block, group, half, row), -16.0f);
    }
};
using Q5_0Format = Q5Format<0>;
using Q5_1Format = Q5Format<1>;

// d, -dmin, [8][16] scales, [8][16] minima (6 bits each); then by group nibbles, and for Q5_K fifth bits
template <int FIFTH> struct KFormat {
    static constexpr int HEAD = 320, GROUP_BYTES = NIBBLE_BYTES + FIFTH * FIFTH_BYTES;
    static constexpr int SPAN = 256, BYTES = HEAD + 8 * GROUP_BYTES, SCALES = 1;
    static constexpr bool MINIMUM = true;
    template <int STEP> CT_INLINE void weights(const uint8_t* block, int group, int at, vb& low, vb& high) {
        const uint8_t* q = block + HEAD + group * GROUP_BYTES + at;
        nibbles<STEP>(q, low, high);
        if (FIFTH) with_fifth<STEP>(q + NIBBLE_BYTES, low, high);
    }
    CT_INLINE vf scale(const uint8_t* block, int group, int, int row) {
        return vmul(half_row(block, row), vload_u8(block + 64 + group * PANEL + row));
    }
    CT_INLINE vf minimum(const uint8_t* block, int group, int, int row) {
        return vmul(half_row(block + 32, row), vload_u8(block + 192 + group * PANEL + row));
    }
};
using Q4KFormat = KFormat<0>;
using Q5KFormat = KFormat<1>;

struct Q6KFormat {  // d, [16][16] int8 scales; then by group nibbles and two bits
    static constexpr int HEAD = 288, GROUP_BYTES = NIBBLE_BYTES + TWO_BITS_BYTES;
    static constexpr int SPAN = 256, BYTES = HEAD + 8 * GROUP_BYTES, SCALES = 2;
    static constexpr bool MINIMUM = true;
    template <int STEP> CT_INLINE void weights(const uint8_t* block, int group, int at, vb& low, vb& high) {
        const uint8_t* q = block + HEAD + group * GROUP_BYTES + at;
        nibbles<STEP>(q, low, high);
        low = vbmerge<4 - 2 * STEP>(low, vbload(q + NIBBLE_BYTES), 0x30);
        high = vbmerge<4 - 2 * STEP>(high, vbload(q + NIBBLE_BYTES + 64), 0x30);
    }
    CT_INLINE vf scale(const uint8_t* block, int group, int half, int row) {
        return vmul(half_row(block, row), vload_s8(block + 32 + (2 * group + half) * PANEL + row));
    }
    CT_INLINE vf minimum(const uint8_t* block, int group, int half, int row) {
        return times(scale(block, group, half, row), -32.0f);
    }
};

// f(Format{}) for a quantised kind.
template <class F> CT_INLINE auto with_format(int32_t kind, F f) {
    switch (kind) {
        case KIND_INT8: return f(Int8Format{});
        case KIND_INT4: return f(Int4Format{});
        case KIND_Q5_0: return f(Q5_0Format{});
        case KIND_Q5_1: return f(Q5_1Format{});
        case KIND_Q4K: return f(Q4KFormat{});
        case KIND_Q5K: return f(Q5KFormat{});
        default: return f(Q6KFormat{});
    }
}

CT_INLINE int64_t panel_bytes(int32_t kind, int64_t k) {
    if (kind == KIND_F32) return round_up(k, 4) * PANEL * 4;
    if (kind == KIND_BF16) return round_up(k, BF16_K) * PANEL * 2;
    return with_format(kind, [&](auto format) { return k / format.SPAN * format.BYTES; });
}
