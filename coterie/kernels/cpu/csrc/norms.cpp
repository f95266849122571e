// |W_i|^2 of packed rows, added up panel by panel: what adapters that rescale rows must know.
#include "gemm.h"

constexpr int COLUMNS = 64;  // summed in fp32 before they are added in fp64

static float half_of(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

// wide: [columns][16]
static void add_wide(const float* wide, int64_t columns, double* sums) {
    for (int64_t from = 0; from < columns; from += COLUMNS) {
        const int64_t to = from + COLUMNS < columns ? from + COLUMNS : columns;
        float acc[PANEL] = {};
        for (int64_t k = from; k < to; ++k)
            for (int r = 0; r < PANEL; ++r) acc[r] += wide[k * PANEL + r] * wide[k * PANEL + r];
        for (int r = 0; r < PANEL; ++r) sums[r] += acc[r];
    }
}

static void add_bf16(const uint8_t* panel, int64_t k, double* sums) {
    alignas(64) float wide[COLUMNS * PANEL];
    const int64_t pairs = (k + 1) / 2;  // an odd k ends in a zero
    for (int64_t from = 0; from < pairs; from += COLUMNS / 2) {
        const int64_t count = pairs - from < COLUMNS / 2 ? pairs - from : COLUMNS / 2;
        for (int64_t j = 0; j < count; ++j)
            for (int r = 0; r < PANEL; ++r) {
                uint32_t two;
                memcpy(&two, panel + ((from + j) * PANEL + r) * 4, 4);
                const uint32_t even = two << 16, odd = two & 0xffff0000u;
                memcpy(&wide[2 * j * PANEL + r], &even, 4);
                memcpy(&wide[(2 * j + 1) * PANEL + r], &odd, 4);
            }
        add_wide(wide, 2 * count, sums);
    }
}

// Bytes that share a place modulo 64 belong to one row, four places to a row.
template <class T> static double row_of(const T (&places)[4 * PANEL], int r) {
    return double(places[4 * r]) + double(places[4 * r + 1]) + double(places[4 * r + 2]) + double(places[4 * r + 3]);
}

static void add_int8(const uint8_t* record, int64_t groups, double* sums) {
    for (int64_t g = 0; g < groups; ++g, record += INT8_RECORD) {
        int32_t squares[4 * PANEL] = {};
        for (int step = 0; step < 8; ++step)
            for (int i = 0; i < 4 * PANEL; ++i) {
                // an offset of 128 inverts the highest bit
                const int32_t q = int8_t(record[step * 64 + i] ^ W_OFFSET);
                squares[i] += q * q;
            }
        for (int r = 0; r < PANEL; ++r) {
            const double scale = half_of(record + 512 + 2 * r);
            sums[r] += scale * scale * row_of(squares, r);
        }
    }
}

static void add_int4(const uint8_t* record, int64_t groups, double* sums) {
    for (int64_t g = 0; g < groups; ++g, record += INT4_RECORD) {
        uint16_t squares[4 * PANEL] = {}, plain[4 * PANEL] = {};
        for (int step = 0; step < 4; ++step)
            for (int i = 0; i < 4 * PANEL; ++i) {
                const uint16_t low = record[step * 64 + i] & 15, high = record[step * 64 + i] >> 4;
                squares[i] = uint16_t(squares[i] + low * low + high * high);
                plain[i] = uint16_t(plain[i] + low + high);
            }
        for (int r = 0; r < PANEL; ++r) {
            const double scale = half_of(record + 256 + 2 * r), least = half_of(record + 256 + 2 * (PANEL + r));
            sums[r] += scale * scale * row_of(squares, r) + 2 * scale * least * row_of(plain, r) + GROUP * least * least;
        }
    }
}

static void add_blocks(const Part& part, int64_t k, int64_t first, double* sums) {
    alignas(64) float wide[256 * PANEL];
    const int64_t row_bytes = panel_bytes(part.kind, k) / PANEL, blocks = k / 256;
    for (int64_t block = 0; block < blocks; ++block) {
        const uint8_t* at[PANEL];  // rows that are not there repeat the last
        for (int64_t r = 0; r < PANEL; ++r) {
            const int64_t row = first + r < part.rows ? first + r : part.rows - 1;
            at[r] = part.data + row * row_bytes + block * (row_bytes / blocks);
        }
        widen_block(part.kind, at, wide);
        add_wide(wide, 256, sums);
    }
}

static void add_panel(const Part& part, int64_t k, int64_t panel, double* sums) {
    const uint8_t* at = part.data + panel * panel_bytes(part.kind, k);
    switch (part.kind) {
        case KIND_F32: return add_wide(reinterpret_cast<const float*>(at), k, sums);
        case KIND_BF16: return add_bf16(at, k, sums);
        case KIND_INT8: return add_int8(at, k / GROUP, sums);
        case KIND_INT4: return add_int4(at, k / GROUP, sums);
        default: return add_blocks(part, k, panel * PANEL, sums);
    }
}

extern "C" {

// out: [n]
void ct_row_norms(const Matrix* matrix, double* out, int64_t threads) {
    auto body = [&](Team& team) {
        double* to = out;
        for (const Part* part = matrix->parts; part != matrix->parts + matrix->num_parts; to += part++->rows)
            team.share((part->rows + PANEL - 1) / PANEL, 4, [&](int64_t begin, int64_t end) {
                for (int64_t panel = begin; panel < end; ++panel) {
                    double sums[PANEL] = {};
                    add_panel(*part, matrix->k, panel, sums);
                    const int64_t left = part->rows - panel * PANEL;
                    memcpy(to + panel * PANEL, sums, sizeof(double) * (left < PANEL ? left : PANEL));
                }
            });
    };
    run_team(int(threads), matrix->num_parts, body);
}

}  // extern "C"
