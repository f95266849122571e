// Packing: stored weights -> panels of 16 output rows, k sequential inside a panel.
//   f32   [k][16]
//   bf16  [k/2][16][2]                       (also the tile layout of AMX)
//   int8  per group of 32 k: [8][16][4] int8 (+W_OFFSET), 16 fp16 scales
//   int4  per group: [4][16][4] bytes (low nibble k, high nibble k + 16), 16 scales, 16 minima
#include "team.h"

template <class T> static const T* row_at(const void* base, int64_t row, int64_t n, int64_t width) {
    return row < n ? static_cast<const T*>(base) + row * width : nullptr;
}

static void pack_f32(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    float* out = reinterpret_cast<float*>(dst);
    for (int r = 0; r < PANEL; ++r) {
        const float* row = row_at<float>(src, panel * PANEL + r, n, k);
        for (int64_t i = 0; i < round_up(k, 4); ++i) out[i * PANEL + r] = row && i < k ? row[i] : 0.0f;
    }
}

static void pack_bf16(int64_t n, int64_t k, const void* src, int64_t panel, uint8_t* dst) {
    uint16_t* out = reinterpret_cast<uint16_t*>(dst);
    for (int r = 0; r < PANEL; ++r) {
        const uint16_t* row = row_at<uint16_t>(src, panel * PANEL + r, n, k);
        for (int64_t i = 0; i < round_up(k, BF16_K); ++i)
            out[(i / 2 * PANEL + r) * 2 + i % 2] = row && i < k ? row[i] : uint16_t(0);
    }
}

static void pack_int8(int64_t n, int64_t k, const void* q, const void* scale, int64_t panel,
                      uint8_t* dst) {
    const int64_t groups = k / GROUP;
    for (int r = 0; r < PANEL; ++r) {
        const int8_t* row = row_at<int8_t>(q, panel * PANEL + r, n, k);
        const uint16_t* scales = row_at<uint16_t>(scale, panel * PANEL + r, n, groups);
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t* out = dst + g * INT8_RECORD;
            for (int j = 0; j < GROUP; ++j)
                out[j / 4 * 64 + r * 4 + j % 4] = uint8_t((row ? row[g * GROUP + j] : 0) + W_OFFSET);
            reinterpret_cast<uint16_t*>(out + 512)[r] = scales ? scales[g] : uint16_t(0);
        }
    }
}

static void pack_int4(int64_t n, int64_t k, const void* q, const void* scale, const void* minimum,
                      int64_t panel, uint8_t* dst) {
    const int64_t groups = k / GROUP;
    for (int r = 0; r < PANEL; ++r) {
        const int64_t at = panel * PANEL + r;
        const uint8_t* row = row_at<uint8_t>(q, at, n, k / 2);
        const uint16_t* scales = row_at<uint16_t>(scale, at, n, groups);
        const uint16_t* minima = row_at<uint16_t>(minimum, at, n, groups);
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t* out = dst + g * INT4_RECORD;
            for (int j = 0; j < GROUP / 2; ++j)
                out[j / 4 * 64 + r * 4 + j % 4] = row ? row[g * GROUP / 2 + j] : uint8_t(0);
            uint16_t* tail = reinterpret_cast<uint16_t*>(out + 256);
            tail[r] = scales ? scales[g] : uint16_t(0);
            tail[PANEL + r] = minima ? minima[g] : uint16_t(0);
        }
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
