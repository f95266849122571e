// Packing: stored weights -> panels of 16 output rows, k sequential inside a panel.
//   f32   [k][16]
//   bf16  [k/2][16][2]                       (also the tile layout of AMX)
// The quantised ones: formats.h. int8 and int4 come as their parts or as GGUF's blocks, its other types
// as blocks.
#include <atomic>

#include "formats.h"
#include "team.h"

// Sixteen rows of one panel; rows past the end are zeros.
struct PanelRows {
    const uint8_t* at[PANEL];
    PanelRows(const PanelRows& rows, int64_t offset) {
        for (int r = 0; r < PANEL; ++r) at[r] = rows.at[r] + offset;
    }
    PanelRows(const void* base, int64_t panel, int64_t n, int64_t row_bytes) {
        static thread_local Buffer zeros;  // the widest of a call's sources comes first
        for (int64_t r = 0; r < PANEL; ++r) {
            const int64_t row = panel * PANEL + r;
            if (row < n) at[r] = static_cast<const uint8_t*>(base) + row * row_bytes;
            else at[r] = static_cast<const uint8_t*>(memset(zeros.need<uint8_t>(row_bytes), 0, row_bytes));
        }
    }
};

// Words `first` .. first + count of 16 rows -> out[count][16], each word xor `flip`.
static void interleave(const PanelRows& rows, int64_t first, int64_t count, uint32_t flip, uint8_t* out) {
    const auto store = [&](int64_t word, int r, words4 v) { memcpy(out + (word * PANEL + r) * 4, &v, 16); };
    const int64_t whole = count / 4 * 4;
    for (int64_t i = 0; i < whole; i += 4)
        for (int r = 0; r < PANEL; r += 4) {
            words4 v[4];
            for (int m = 0; m < 4; ++m) {
                memcpy(&v[m], rows.at[r + m] + (first + i) * 4, 16);
                v[m] ^= flip;
            }
            const words4 a = CT_SHUFFLE(words4, v[0], v[1], 0, 4, 1, 5), b = CT_SHUFFLE(words4, v[2], v[3], 0, 4, 1, 5);
            const words4 c = CT_SHUFFLE(words4, v[0], v[1], 2, 6, 3, 7), d = CT_SHUFFLE(words4, v[2], v[3], 2, 6, 3, 7);
            store(i, r, CT_SHUFFLE(words4, a, b, 0, 1, 4, 5));
            store(i + 1, r, CT_SHUFFLE(words4, a, b, 2, 3, 6, 7));
            store(i + 2, r, CT_SHUFFLE(words4, c, d, 0, 1, 4, 5));
            store(i + 3, r, CT_SHUFFLE(words4, c, d, 2, 3, 6, 7));
        }
    for (int64_t i = whole; i < count; ++i)
        for (int r = 0; r < PANEL; ++r) {
            uint32_t word;
            memcpy(&word, rows.at[r] + (first + i) * 4, 4);
            word ^= flip;
            memcpy(out + (i * PANEL + r) * 4, &word, 4);
        }
}

// fp16 values of one group, one per row, to `out`.
static void gather_halves(const PanelRows& rows, int64_t group, uint8_t* out) {
    for (int r = 0; r < PANEL; ++r) memcpy(out + 2 * r, rows.at[r] + 2 * group, 2);
}

static void pack_f32(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    interleave(PanelRows(src, panel, n, k * 4), 0, k, 0, dst);
    memset(dst + k * PANEL * 4, 0, (round_up(k, 4) - k) * PANEL * 4);
}

static void pack_bf16(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    const PanelRows rows(src, panel, n, k * 2);
    interleave(rows, 0, k / 2, 0, dst);
    memset(dst + k / 2 * PANEL * 4, 0, (round_up(k, BF16_K) / 2 - k / 2) * PANEL * 4);
    if (k % 2)
        for (int r = 0; r < PANEL; ++r) memcpy(dst + (k / 2 * PANEL + r) * 4, rows.at[r] + (k - 1) * 2, 2);
}

static void pack_int8(int64_t n, int64_t k, const void* q, const void* scale, int64_t panel, uint8_t* dst) {
    static_assert(W_OFFSET == 0 || W_OFFSET == 128, "an offset of 128 turns the highest bit");
    const PanelRows rows(q, panel, n, k), scales(scale, panel, n, k / GROUP * 2);
    for (int64_t g = 0; g < k / GROUP; ++g, dst += Int8Format::BYTES) {
        interleave(rows, g * 8, 8, W_OFFSET ? 0x80808080u : 0u, dst);
        gather_halves(scales, g, dst + 512);
    }
}

static void pack_int4(int64_t n, int64_t k, const void* q, const void* scale, const void* minimum, int64_t panel, uint8_t* dst) {
    const PanelRows rows(q, panel, n, k / 2), scales(scale, panel, n, k / GROUP * 2), minima(minimum, panel, n, k / GROUP * 2);
    for (int64_t g = 0; g < k / GROUP; ++g, dst += Int4Format::BYTES) {
        interleave(rows, g * 4, 4, 0, dst);
        gather_halves(scales, g, dst + 256);
        gather_halves(minima, g, dst + 256 + 2 * PANEL);
    }
}

static bool all_finite(const uint8_t* halves, int count) {
    bool finite = true;
    for (int i = 0; i < count; ++i) finite &= (halves[2 * i + 1] & 0x7c) != 0x7c;
    return finite;
}

// Sixteen fp16 values times -8, which is exact; those too large become infinite.
static void times_minus_8(const uint8_t* halves, uint8_t* out) {
    for (int r = 0; r < PANEL; ++r) {
        uint16_t h;
        memcpy(&h, halves + 2 * r, 2);
        const uint32_t sign = ~h & 0x8000u, magnitude = h & 0x7fffu;
        uint32_t value = magnitude + (3 << 10);
        if (value >= 0x7c00) value = 0x7c00;
        if (magnitude < 0x400) {  // subnormal: a multiple of 2^-24
            const uint32_t units = magnitude << 3;
            int exponent = 0;
            while (units >> exponent >= 0x800) ++exponent;
            value = units < 0x400 ? units : (uint32_t(exponent) << 10) + (units >> exponent);
        }
        h = uint16_t(sign | value);
        memcpy(out + 2 * r, &h, 2);
    }
}

// Blocks of Q8_0: fp16 scale, 32 bytes of q.
static Status pack_q8_0(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    const PanelRows rows(src, panel, n, k / GROUP * 34);
    bool finite = true;
    for (int64_t at = 0; at < k / GROUP * 34; at += 34, dst += Int8Format::BYTES) {
        interleave(PanelRows(rows, at + 2), 0, 8, W_OFFSET ? 0x80808080u : 0u, dst);
        gather_halves(PanelRows(rows, at), 0, dst + 512);
        finite &= all_finite(dst + 512, PANEL);
    }
    return finite ? DONE : NOT_FINITE;
}

// Blocks of Q4_0 and Q4_1: fp16 scale, of Q4_1 minimum, 16 bytes of nibbles. Q4_0's minimum is -8 scales.
template <int MINIMA> static Status pack_q4(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    constexpr int BYTES = 18 + 2 * MINIMA;
    const PanelRows rows(src, panel, n, k / GROUP * BYTES);
    bool finite = true, held = true;
    for (int64_t at = 0; at < k / GROUP * BYTES; at += BYTES, dst += Int4Format::BYTES) {
        uint8_t *const scales = dst + 256, *const minima = scales + 2 * PANEL;
        interleave(PanelRows(rows, at + 2 + 2 * MINIMA), 0, 4, 0, dst);
        gather_halves(PanelRows(rows, at), 0, scales);
        if (MINIMA) gather_halves(PanelRows(rows, at + 2), 0, minima);
        else times_minus_8(scales, minima);
        finite &= all_finite(scales, PANEL * (1 + MINIMA));
        held &= all_finite(minima, PANEL);
    }
    return !finite ? NOT_FINITE : held ? DONE : NOT_HELD;
}

// What one row of a group becomes: its nibbles in the order of a panel, and its higher bits.
struct GroupBits {
    bytes16 nibbles;
    uint32_t high[2];  // of the halves; fifth bits use the first alone
};

CT_INLINE bytes16 load16(const uint8_t* p) {
    bytes16 v;
    memcpy(&v, p, 16);
    return v;
}
CT_INLINE uint32_t word_at(const uint8_t* p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}
// 32 bytes of which a group has the low or the high nibbles.
CT_INLINE bytes16 nibbles_of(const uint8_t* p, bool upper) {
    const bytes16 a = load16(p), b = load16(p + 16);
    return upper ? (a >> 4) | (b & 0xf0) : (a & 15) | (b << 4);
}
// Bits i, i + 4, i + 8 ... of a word as one byte.
CT_INLINE uint32_t every_fourth(uint32_t word, int i) {
    word = word >> i & 0x11111111u;
    word = (word | word >> 3) & 0x03030303u;
    word = (word | word >> 6) & 0x000f000fu;
    return (word | word >> 12) & 0xffu;
}
// The six-bit scales and minima of a K block: 12 bytes -> 8 and 8.
CT_INLINE void k_scales(const uint8_t* s, uint8_t (&scale)[8], uint8_t (&minimum)[8]) {
    for (int j = 0; j < 4; ++j) {
        scale[j] = s[j] & 63, minimum[j] = s[j + 4] & 63;
        scale[j + 4] = uint8_t((s[j + 8] & 15) | (s[j] >> 2 & 48));
        minimum[j + 4] = uint8_t(s[j + 8] >> 4 | (s[j + 4] >> 2 & 48));
    }
}
CT_INLINE void put_half(const uint8_t* half, int row, uint8_t* out, uint8_t flip = 0) {
    out[2 * row] = half[0], out[2 * row + 1] = half[1] ^ flip;
}

// Files' blocks: `head` writes what a block of one row says of scales, `bits` reads a group; in a panel
// the 16 rows' fp16 factors are FACTORS runs from FACTORS_AT on.
template <int MINIMA> struct Q5Blocks {  // d, for Q5_1 minimum, 32 high bits, 16 bytes of nibbles
    static constexpr int BYTES = 22 + 2 * MINIMA, HIGH_BYTES = FIFTH_BYTES;
    static constexpr int FACTORS_AT = 320, FACTORS = 1 + MINIMA;
    using Panel = Q5Format<MINIMA>;
    static void head(const uint8_t* block, int row, uint8_t* out) {
        put_half(block, row, out + 320);
        if (MINIMA) put_half(block + 2, row, out + 352);
    }
    static GroupBits bits(const uint8_t* block, int) {
        const uint32_t word = word_at(block + 2 + 2 * MINIMA);
        uint32_t high = 0;
        for (int i = 0; i < 4; ++i) high |= every_fourth(word, i) << 8 * i;
        return {load16(block + 6 + 2 * MINIMA), {high, 0}};
    }
};

template <int FIFTH> struct KBlocks {  // d, dmin, 12 bytes of scales, for Q5_K 32 of high bits, 128 of nibbles
    static constexpr int BYTES = 144 + 32 * FIFTH, HIGH_BYTES = FIFTH * FIFTH_BYTES;
    static constexpr int FACTORS_AT = 0, FACTORS = 2;
    using Panel = KFormat<FIFTH>;
    static void head(const uint8_t* block, int row, uint8_t* out) {
        put_half(block, row, out);
        put_half(block + 2, row, out + 32, 0x80);
        uint8_t scale[8], minimum[8];
        k_scales(block + 4, scale, minimum);
        for (int j = 0; j < 8; ++j) out[64 + j * PANEL + row] = scale[j], out[192 + j * PANEL + row] = minimum[j];
    }
    static GroupBits bits(const uint8_t* block, int group) {
        uint32_t high = 0;
        if (FIFTH)
            for (int i = 0; i < 8; ++i) high |= (word_at(block + 16 + 4 * i) >> group & 0x01010101u) << i;
        return {nibbles_of(block + 16 + 32 * FIFTH + group / 2 * 32, group % 2 != 0), {high, 0}};
    }
};

struct Q6KBlocks {  // 128 bytes of nibbles, 64 of two bits, 16 int8 scales, d
    static constexpr int BYTES = 210, HIGH_BYTES = TWO_BITS_BYTES;
    static constexpr int FACTORS_AT = 0, FACTORS = 1;
    using Panel = Q6KFormat;
    static void head(const uint8_t* block, int row, uint8_t* out) {
        put_half(block + 208, row, out);
        for (int j = 0; j < 16; ++j) out[32 + j * PANEL + row] = block[192 + j];
    }
    static GroupBits bits(const uint8_t* block, int group) {
        const uint8_t* high = block + 128 + group / 4 * 32;
        GroupBits out{nibbles_of(block + group / 4 * 64 + group % 2 * 32, group % 4 > 1), {0, 0}};
        for (int i = 0; i < 8; ++i) out.high[i / 4] |= (word_at(high + 4 * i) >> group % 4 * 2 & 0x03030303u) << i % 4 * 2;
        return out;
    }
};

template <class B> static Status pack_blocks(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    using F = typename B::Panel;
    constexpr int GROUPS = F::SPAN / GROUP;
    constexpr int GROUP_BYTES = NIBBLE_BYTES + B::HIGH_BYTES;
    const PanelRows rows(src, panel, n, k / F::SPAN * B::BYTES);
    alignas(16) uint8_t nibbles[PANEL][16];
    bool finite = true;
    for (int64_t at = 0; at < k / F::SPAN * B::BYTES; at += B::BYTES, dst += F::BYTES) {
        for (int r = 0; r < PANEL; ++r) B::head(rows.at[r] + at, r, dst);
        finite &= all_finite(dst + B::FACTORS_AT, PANEL * B::FACTORS);
        for (int group = 0; group < GROUPS; ++group) {
            uint8_t* out = dst + F::HEAD + group * GROUP_BYTES;
            for (int r = 0; r < PANEL; ++r) {
                const GroupBits bits = B::bits(rows.at[r] + at, group);
                memcpy(nibbles[r], &bits.nibbles, 16);
                for (int half = 0; half < B::HIGH_BYTES / FIFTH_BYTES; ++half)
                    memcpy(out + NIBBLE_BYTES + half * FIFTH_BYTES + 4 * r, &bits.high[half], 4);
            }
            interleave(PanelRows(nibbles, 0, PANEL, 16), 0, 4, 0, out);
        }
    }
    return finite ? DONE : NOT_FINITE;
}

extern "C" {

int64_t ct_packed_bytes(int32_t kind, int64_t n, int64_t k) {
    return (n + PANEL - 1) / PANEL * panel_bytes(kind, k);
}

// source: a Kind or Source; q: fp32, bf16, int8 [n, k], nibbles [n, k/2] or the blocks of n rows; scale and
// minimum: fp16 [n, k/32], of the kinds int8 and int4 alone. NOT_FINITE: a factor of a block is no finite
// number. NOT_HELD: a minimum of Q4_0 is beyond fp16.
int32_t ct_pack(int32_t source, int64_t n, int64_t k, const void* q, const void* scale,
             const void* minimum, uint8_t* dst, int64_t threads) {
    const int64_t bytes = panel_bytes(source == SOURCE_Q8_0 ? KIND_INT8 : source > SOURCE_Q8_0 ? KIND_INT4 : source, k);
    std::atomic<Status> worst{DONE};
    auto body = [&](Team& team) {
        team.share((n + PANEL - 1) / PANEL, 4, [&](int64_t begin, int64_t end) {
            for (int64_t panel = begin; panel < end; ++panel) {
                uint8_t* const to = dst + panel * bytes;
                Status status = DONE;
                switch (source) {
                    case KIND_F32: pack_f32(n, k, q, panel, to); break;
                    case KIND_BF16: pack_bf16(n, k, q, panel, to); break;
                    case KIND_INT8: pack_int8(n, k, q, scale, panel, to); break;
                    case KIND_INT4: pack_int4(n, k, q, scale, minimum, panel, to); break;
                    case SOURCE_Q8_0: status = pack_q8_0(n, k, q, panel, to); break;
                    case SOURCE_Q4_0: status = pack_q4<0>(n, k, q, panel, to); break;
                    case SOURCE_Q4_1: status = pack_q4<1>(n, k, q, panel, to); break;
                    case KIND_Q5_0: status = pack_blocks<Q5Blocks<0>>(n, k, q, panel, to); break;
                    case KIND_Q5_1: status = pack_blocks<Q5Blocks<1>>(n, k, q, panel, to); break;
                    case KIND_Q4K: status = pack_blocks<KBlocks<0>>(n, k, q, panel, to); break;
                    case KIND_Q5K: status = pack_blocks<KBlocks<1>>(n, k, q, panel, to); break;
                    default: status = pack_blocks<Q6KBlocks>(n, k, q, panel, to);
                }
                // NOT_FINITE is the graver one, whichever thread finds it first
                Status none = DONE;
                if (status == NOT_FINITE) worst = status;
                else if (status == NOT_HELD) worst.compare_exchange_strong(none, status);
            }
        });
    };
    const int32_t status = status_of([&] { run_team(int(threads), 1, body); });
    return status == DONE ? worst.load() : status;
}

int32_t ct_weight_offset() { return W_OFFSET; }

const char* ct_isa() { return CT_AMX ? (amx_ready() ? "avx512+amx" : ISA_NAME) : ISA_NAME; }

}  // extern "C"
