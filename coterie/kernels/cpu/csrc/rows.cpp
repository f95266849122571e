// Rows of packed weights as fp32: for an embedding that is also the head, and |W_i|^2 for adapters
// that rescale rows.
#include "gemm.h"

constexpr int COLUMNS = 64;  // widened at once, and summed in fp32

// Columns from .. to of a panel -> out[column][16]; they begin and end with a group, or the row's end.
static void widen_f32(const uint8_t* panel, int64_t from, int64_t to, float* out) {
    memcpy(out, panel + from * PANEL * 4, (to - from) * PANEL * 4);
}

static void widen_bf16(const uint8_t* panel, int64_t from, int64_t to, float* out) {
    for (int64_t k = from; k < to; ++k)
        for (int r = 0; r < PANEL; ++r) {
            uint16_t half;
            memcpy(&half, panel + ((k / 2 * PANEL + r) * 2 + k % 2) * 2, 2);
            const uint32_t bits = uint32_t(half) << 16;
            memcpy(out + (k - from) * PANEL + r, &bits, 4);
        }
}

template <class F> static void widen_group(const uint8_t* block, int group, float* out) {
    alignas(64) uint8_t q[2][4][64];
    alignas(64) float scale[2][PANEL], minimum[2][PANEL];
    each<4>([&](auto step) {
        each<PV>([&](auto v) {
            vb w[2];
            F::template weights<step>(block, group, v * VL * 4, w[0], w[1]);
            each<2>([&](auto half) { vbstore(q[half][step] + v * VL * 4, w[half]); });
        });
    });
    each<2>([&](auto half) {
        each<PV>([&](auto v) {
            constexpr int part = F::SCALES == 2 ? int(half) : 0;
            vstore(scale[half] + v * VL, F::scale(block, group, part, v * VL));
            vstore(minimum[half] + v * VL, F::minimum(block, group, part, v * VL));
        });
    });
    for (int k = 0; k < GROUP; ++k) {
        const int half = k / 16;
        const uint8_t* bytes = q[half][k % 16 / 4] + k % 4;
        for (int r = 0; r < PANEL; ++r) {
            // an offset of 128 inverts the highest bit
            const float value = F::MINIMUM ? float(bytes[4 * r]) : float(int8_t(bytes[4 * r] ^ W_OFFSET));
            out[k * PANEL + r] = scale[half][r] * value + (F::MINIMUM ? minimum[half][r] : 0.0f);
        }
    }
}

static void widen(int32_t kind, const uint8_t* panel, int64_t from, int64_t to, float* out) {
    if (kind == KIND_F32) return widen_f32(panel, from, to, out);
    if (kind == KIND_BF16) return widen_bf16(panel, from, to, out);
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        for (int64_t k = from; k < to; k += GROUP, out += GROUP * PANEL)
            widen_group<F>(panel + k / F::SPAN * F::BYTES, int(k % F::SPAN / GROUP), out);
    });
}

// f(from, to, [to - from][16]) for a panel, a span of columns after the other.
template <class Use> static void each_span(int32_t kind, const uint8_t* panel, int64_t k, Use use) {
    alignas(64) float wide[COLUMNS * PANEL];
    for (int64_t from = 0; from < k; from += COLUMNS) {
        const int64_t to = from + COLUMNS < k ? from + COLUMNS : k;
        widen(kind, panel, from, to, wide);
        use(from, to, wide);
    }
}

extern "C" {

// out: [n], summed in fp32 over a span and in fp64 over spans
int32_t ct_row_norms(const Matrix* matrix, double* out, int64_t threads) {
    return status_of([&] {
        auto body = [&](Team& team) {
            double* to = out;
            for (const Part* part = matrix->parts; part != matrix->parts + matrix->num_parts; to += part++->rows)
                team.share((part->rows + PANEL - 1) / PANEL, 4, [&](int64_t begin, int64_t end) {
                    for (int64_t panel = begin; panel < end; ++panel) {
                        double sums[PANEL] = {};
                        const uint8_t* data = part->data + panel * panel_bytes(part->kind, matrix->k);
                        each_span(part->kind, data, matrix->k, [&](int64_t from, int64_t last, const float* wide) {
                            float acc[PANEL] = {};
                            for (int64_t i = 0; i < last - from; ++i)
                                for (int r = 0; r < PANEL; ++r) acc[r] += wide[i * PANEL + r] * wide[i * PANEL + r];
                            for (int r = 0; r < PANEL; ++r) sums[r] += acc[r];
                        });
                        const int64_t left = part->rows - panel * PANEL;
                        memcpy(to + panel * PANEL, sums, sizeof(double) * (left < PANEL ? left : PANEL));
                    }
                });
        };
        run_team(int(threads), matrix->num_parts, body);
    });
}

// out: [count][k], the rows `ids` of a matrix of one part; ids are in range.
int32_t ct_rows(const Matrix* matrix, const int64_t* ids, int64_t count, float* out, int64_t threads) {
    return status_of([&] {
        const Part& part = matrix->parts[0];
        const int64_t k = matrix->k, bytes = panel_bytes(part.kind, k);
        auto body = [&](Team& team) {
            team.share(count, 1, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i)
                    each_span(part.kind, part.data + ids[i] / PANEL * bytes, k, [&](int64_t from, int64_t to, const float* wide) {
                        for (int64_t j = from; j < to; ++j) out[i * k + j] = wide[(j - from) * PANEL + ids[i] % PANEL];
                    });
            });
        };
        run_team(count * k < 65536 ? 1 : int(threads), 1, body);
    });
}

}  // extern "C"
