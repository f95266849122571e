// GGUF's Q4_K and Q6_K rows as stored: a block of 256 columns of 16 rows is expanded to an fp32
// panel in scratch (ggml's own values: weights/gguf_blocks.py is the twin) and multiplied as one.
#include "gemm.h"

constexpr int BLOCK = 256;

CT_INLINE bytes16 load16(const uint8_t* p) {
    bytes16 v;
    memcpy(&v, p, 16);
    return v;
}
#define CT_ZIP(a, b, first)                                                                     \
    CT_SHUFFLE(bytes16, a, b, first, first + 16, first + 1, first + 17, first + 2, first + 18, \
               first + 3, first + 19, first + 4, first + 20, first + 5, first + 21, first + 6, \
               first + 22, first + 7, first + 23)

// Sixteen bytes of each of 16 rows -> 16 columns of 16 bytes.
CT_INLINE void transpose(bytes16 (&a)[16]) {
    each<4>([&](auto) {
        bytes16 b[16];
        each<8>([&](auto i) {
            b[2 * i] = CT_ZIP(a[i], a[i + 8], 0);
            b[2 * i + 1] = CT_ZIP(a[i], a[i + 8], 8);
        });
        each<16>([&](auto i) { a[i] = b[i]; });
    });
}

struct RowSet {  // one block of up to 16 rows; rows that are not there repeat the last
    const uint8_t* at[PANEL];
    CT_INLINE void columns(const RowSet& rows, int offset, bytes16 (&out)[16]) {
        each<16>([&](auto r) { out[r] = load16(rows.at[r] + offset); });
        transpose(out);
    }
};

CT_INLINE float half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

// Factors of 16 rows for one group of columns: value = scale * (q - CENTRE) - minimum.
template <int CENTRE> struct Factors {
    vf scale[PV], minimum[PV];
    CT_INLINE void load(Factors& f, const float* scale, const float* minimum) {
        each<PV>([&](auto v) {
            f.scale[v] = vload(scale + v * VL);
            if (!CENTRE) f.minimum[v] = vload(minimum + v * VL);
        });
    }
    // One column of 16 rows.
    CT_INLINE void put(const Factors& f, bytes16 q, float* out) {
        vf wide[PV];
        vfrom_bytes(q, wide);
        each<PV>([&](auto v) {
            const vf value = CENTRE ? vmul(f.scale[v], vsub(wide[v], vset(CENTRE)))
                                    : vsub(vmul(f.scale[v], wide[v]), f.minimum[v]);
            vstore(out + v * VL, value);
        });
    }
};

// d, dmin: fp16; eight 6-bit scales and minima in 12 bytes; 128 bytes of nibbles.
struct Q4K {
    static constexpr int BYTES = 144;
    CT_FLAT static void expand(const RowSet& rows, float* out) {
        alignas(64) float scale[8][PANEL], minimum[8][PANEL];
        for (int r = 0; r < PANEL; ++r) {
            const uint8_t* at = rows.at[r];
            const float d = half_at(at), least = half_at(at + 2);
            const uint8_t* s = at + 4;
            for (int j = 0; j < 4; ++j) {
                scale[j][r] = d * float(s[j] & 63);
                minimum[j][r] = least * float(s[j + 4] & 63);
                scale[j + 4][r] = d * float((s[j + 8] & 15) | ((s[j] >> 2) & 48));
                minimum[j + 4][r] = least * float((s[j + 8] >> 4) | ((s[j + 4] >> 2) & 48));
            }
        }
        for (int part = 0; part < 8; ++part) {  // 16 bytes: columns of two groups
            bytes16 q[16];
            RowSet::columns(rows, 16 + part * 16, q);
            const int group = part / 2 * 2, column = group * 32 + part % 2 * 16;
            Factors<0> low, high;
            Factors<0>::load(low, scale[group], minimum[group]);
            Factors<0>::load(high, scale[group + 1], minimum[group + 1]);
            each<16>([&](auto i) { Factors<0>::put(low, q[i] & 15, out + (column + i) * PANEL); });
            each<16>([&](auto i) { Factors<0>::put(high, q[i] >> 4, out + (column + 32 + i) * PANEL); });
        }
    }
};

// 128 bytes of low nibbles, 64 of high bits, sixteen int8 scales, d: fp16.
struct Q6K {
    static constexpr int BYTES = 210;
    CT_FLAT static void expand(const RowSet& rows, float* out) {
        alignas(64) float scale[16][PANEL];
        for (int r = 0; r < PANEL; ++r) {
            const float d = half_at(rows.at[r] + 208);
            for (int j = 0; j < 16; ++j) scale[j][r] = d * float(int8_t(rows.at[r][192 + j]));
        }
        for (int part = 0; part < 4; ++part) {  // half of the block, 16 of its 32 columns
            const int half = part / 2, at = part % 2 * 16;
            bytes16 low[16], next[16], high[16];
            RowSet::columns(rows, half * 64 + at, low);
            RowSet::columns(rows, half * 64 + 32 + at, next);
            RowSet::columns(rows, 128 + half * 32 + at, high);
            const auto emit = [&](int quarter, auto q) {
                const int column = half * 128 + quarter * 32 + at;
                Factors<32> factors;
                Factors<32>::load(factors, scale[column / 16], nullptr);
                each<16>([&](auto i) { Factors<32>::put(factors, q(i), out + (column + i) * PANEL); });
            };
            emit(0, [&](auto i) { return (low[i] & 15) | ((high[i] & 3) << 4); });
            emit(1, [&](auto i) { return (next[i] & 15) | (((high[i] >> 2) & 3) << 4); });
            emit(2, [&](auto i) { return (low[i] >> 4) | (((high[i] >> 4) & 3) << 4); });
            emit(3, [&](auto i) { return (next[i] >> 4) | ((high[i] >> 6) << 4); });
        }
    }
};

template <class Type> static void expanded_tile(const TileJob& job) {
    alignas(64) float wide[BLOCK * PANEL];
    const int64_t row_bytes = job.panel_stride / PANEL;
    for (int p = 0; p < job.panels; ++p) {
        TileJob part = job;
        part.panel = reinterpret_cast<const uint8_t*>(wide);
        part.panels = 1;
        part.tile = job.tile + int64_t(p) * job.rows * PANEL;
        for (int64_t from = 0; from < job.k; from += BLOCK) {
            RowSet rows;
            for (int64_t r = 0; r < PANEL; ++r) {
                const int64_t row = p * PANEL + r < job.height ? p * PANEL + r : job.height - 1;
                rows.at[r] = job.panel + row * row_bytes + from / BLOCK * Type::BYTES;
            }
            Type::expand(rows, wide);
            f32_span(part, from, from + BLOCK);
        }
    }
}

void q4k_tile(const TileJob& job) { expanded_tile<Q4K>(job); }
void q6k_tile(const TileJob& job) { expanded_tile<Q6K>(job); }

void widen_block(int32_t kind, const uint8_t* const* at, float* out) {
    RowSet rows;
    memcpy(rows.at, at, sizeof rows.at);
    kind == KIND_Q4K ? Q4K::expand(rows, out) : Q6K::expand(rows, out);
}
