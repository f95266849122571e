// Packing: stored weights -> panels of 16 output rows, k sequential inside a panel.
//   f32   [k][16]
//   bf16  [k/2][16][2]                       (also the tile layout of AMX)
//   int8  per group of 32 k: [8][16][4] int8 (+W_OFFSET), 16 fp16 scales
//   int4  per group: [4][16][4] bytes (low nibble k, high nibble k + 16), 16 scales, 16 minima
#include "team.h"

// Sixteen rows of one panel; rows past the end are zeros.
struct PanelRows {
    const uint8_t* at[PANEL];
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
    for (int64_t g = 0; g < k / GROUP; ++g, dst += INT8_RECORD) {
        interleave(rows, g * 8, 8, W_OFFSET ? 0x80808080u : 0u, dst);
        gather_halves(scales, g, dst + 512);
    }
}

static void pack_int4(int64_t n, int64_t k, const void* q, const void* scale, const void* minimum, int64_t panel, uint8_t* dst) {
    const PanelRows rows(q, panel, n, k / 2), scales(scale, panel, n, k / GROUP * 2), minima(minimum, panel, n, k / GROUP * 2);
    for (int64_t g = 0; g < k / GROUP; ++g, dst += INT4_RECORD) {
        interleave(rows, g * 4, 4, 0, dst);
        gather_halves(scales, g, dst + 256);
        gather_halves(minima, g, dst + 256 + 2 * PANEL);
    }
}

extern "C" {

int64_t ct_packed_bytes(int32_t kind, int64_t n, int64_t k) {
    return (n + PANEL - 1) / PANEL * panel_bytes(kind, k);
}

// q: fp32, bf16, int8 [n, k] or nibbles [n, k/2]; scale and minimum: fp16 [n, k/32].
void ct_pack(int32_t kind, int64_t n, int64_t k, const void* q, const void* scale,
             const void* minimum, uint8_t* dst, int64_t threads) {
    const int64_t bytes = panel_bytes(kind, k);
    auto body = [&](Team& team) {
        team.share((n + PANEL - 1) / PANEL, 4, [&](int64_t begin, int64_t end) {
            for (int64_t panel = begin; panel < end; ++panel) switch (kind) {
                case KIND_F32: pack_f32(n, k, q, panel, dst + panel * bytes); break;
                case KIND_BF16: pack_bf16(n, k, q, panel, dst + panel * bytes); break;
                case KIND_INT8: pack_int8(n, k, q, scale, panel, dst + panel * bytes); break;
                default: pack_int4(n, k, q, scale, minimum, panel, dst + panel * bytes);
            }
        });
    };
    run_team(int(threads), 1, body);
}

int32_t ct_weight_offset() { return W_OFFSET; }

const char* ct_isa() { return CT_AMX ? (amx_ready() ? "avx512+amx" : ISA_NAME) : ISA_NAME; }

}  // extern "C"
