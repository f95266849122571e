// Products with matrices as a device's records have them (kernels/device_record.py): whole rows, fp32,
// bf16, int8, or int4 in groups of 32. Few rows of x: the weights' bytes are the cost. A row of x is
// encoded once, in steps of as many columns as one vector of weights has. An element is summed over
// its steps in their order, whatever else is computed beside it.
#pragma once
#include "simd_rows.h"
#include "types.h"

constexpr int AT_ONCE = 4;  // rows of a matrix, and at most as many of x

// Integers of 15 bits in two planes: value = 128 * high + low.
CT_INLINE void encode_group(const float* x, int8_t* high, int8_t* low, float& scale, float& sum) {
    constexpr float MOST = 127.0f * 128.0f;
    vf most = vset(0.0f);
    for (int i = 0; i < GROUP; i += VL) most = vmax(most, vabs(vload(x + i)));
    const float top = vmaxall(most);
    const float inverse = top > 0.0f ? MOST / top : 0.0f;
    alignas(64) float rounded[GROUP];
    for (int i = 0; i < GROUP; i += VL) vstore(rounded + i, vround(vmul(vload(x + i), vset(inverse))));
    int32_t total = 0;
    for (int i = 0; i < GROUP; ++i) {
        const int32_t value = int32_t(rounded[i]), upper = (value + 64) >> 7;
        high[i] = int8_t(upper), low[i] = int8_t(value - upper * 128);
        total += value;
    }
    scale = top / MOST, sum = scale * float(total);
}

// For each kind: COLUMNS, the bytes of weights, scales and encoded x of a step; `encode` for one group
// of 32 columns of x at column `at`; `Weights`, a step of one row, and its product with x.
template <int KIND> struct Rows;

template <> struct Rows<KIND_F32> {
    static constexpr int COLUMNS = VL, BYTES = VB, SCALES = 0, X_BYTES = VB;
    struct Weights {
        vf value;
        CT_INLINE Weights load(const uint8_t* w, const uint8_t*) { return {vload(reinterpret_cast<const float*>(w))}; }
        CT_INLINE vf times(const Weights& w, vf sum, const uint8_t* x) {
            return vfma(sum, w.value, vload(reinterpret_cast<const float*>(x)));
        }
    };
    static void encode(const float* x, int64_t at, uint8_t* out) { memcpy(out + at * 4, x, GROUP * 4); }
};

template <> struct Rows<KIND_BF16> {  // even columns of x, then odd ones
    static constexpr int COLUMNS = 2 * VL, BYTES = VB, SCALES = 0, X_BYTES = 2 * VB;
    struct Weights {
        vpair pairs;
        CT_INLINE Weights load(const uint8_t* w, const uint8_t*) { return {vload_pair(reinterpret_cast<const uint32_t*>(w))}; }
        CT_INLINE vf times(const Weights& w, vf sum, const uint8_t* x) {
            const float* own = reinterpret_cast<const float*>(x);
            return vfma(vfma(sum, vpair_even(w.pairs), vload(own)), vpair_odd(w.pairs), vload(own + VL));
        }
    };
    static void encode(const float* x, int64_t at, uint8_t* out) {
        float* own = reinterpret_cast<float*>(out) + at;
        for (int i = 0; i < GROUP; ++i) own[i / COLUMNS * COLUMNS + i % 2 * VL + i % COLUMNS / 2] = x[i];
    }
};

template <> struct Rows<KIND_INT8> {  // both planes, and the scale of every lane's group
    static constexpr int COLUMNS = VB, BYTES = VB, SCALES = VL < 8 ? 0 : VL / 8 * 2, X_BYTES = 3 * VB;
    struct Weights {
        vb bytes;
        vf scale;
        CT_INLINE Weights load(const uint8_t* w, const uint8_t* s) {
            return {vbytes(w), vgroup_scales(reinterpret_cast<const uint16_t*>(s))};
        }
        CT_INLINE vf times(const Weights& w, vf sum, const uint8_t* x) {
            const vi high = vdot_signed(vizero(), w.bytes, vbytes(x)), low = vdot_signed(vizero(), w.bytes, vbytes(x + VB));
            const vf total = vint_to_float(vadd_int(vtimes128(high), low), 0);
            return vfma(sum, vmul(total, vload(reinterpret_cast<const float*>(x + 2 * VB))), w.scale);
        }
    };
    static void encode(const float* x, int64_t at, uint8_t* out) {
        int8_t high[GROUP], low[GROUP];
        float scale, sum;
        encode_group(x, high, low, scale, sum);
        for (int i = 0; i < GROUP; ++i) {
            const int64_t column = at + i, lane = column % COLUMNS;
            uint8_t* step = out + column / COLUMNS * X_BYTES;
            step[lane] = uint8_t(high[i]), step[VB + lane] = uint8_t(low[i]);
            memcpy(step + 2 * VB + lane / 4 * 4, &scale, 4);
        }
    }
};

// Bytes 4 * i + m of a group have column 8 * m + i in their low nibbles and 8 * m + 4 + i in the high
// ones. A step is two vectors. x: for each of them and each plane the columns of low and of high
// nibbles; then, as the weights have scale and minimum of their groups in turn, the scale of each group
// of x and zero, and zero and the sum of each.
template <> struct Rows<KIND_INT4> {
    static constexpr int COLUMNS = 4 * VB, BYTES = 2 * VB, SCALES = 2 * VL, X_BYTES = 10 * VB;
    struct Weights {
        vb low[2], high[2];
        vf pairs;
        CT_INLINE Weights load(const uint8_t* w, const uint8_t* s) {
            Weights own;
            own.low[0] = vbload_low(w), own.high[0] = vbload_high(w);
            own.low[1] = vbload_low(w + VB), own.high[1] = vbload_high(w + VB);
            own.pairs = vload_half(reinterpret_cast<const uint16_t*>(s));
            return own;
        }
        template <int HALF> CT_INLINE vf total(const Weights& w, const uint8_t* x) {
            const vb low = w.low[HALF], high = w.high[HALF];
            const vi upper = vdot_nibbles(vdot_nibbles(vizero(), low, vbytes(x)), high, vbytes(x + VB));
            const vi both = vdot_nibbles(vdot_nibbles(vtimes128(upper), low, vbytes(x + 2 * VB)), high, vbytes(x + 3 * VB));
            return vint_to_float(both, 0);
        }
        CT_INLINE vf times(const Weights& w, vf sum, const uint8_t* x) {
            const vf scales = vmul(w.pairs, vload(reinterpret_cast<const float*>(x + 8 * VB)));
            sum = vfma(sum, total<0>(w, x), vspread_pairs<0>(scales));
            sum = vfma(sum, total<1>(w, x + 4 * VB), vspread_pairs<1>(scales));
            return vfma(sum, w.pairs, vload(reinterpret_cast<const float*>(x + 9 * VB)));
        }
    };
    static void encode(const float* x, int64_t at, uint8_t* out) {
        int8_t planes[2][GROUP];
        float scale, sum;
        encode_group(x, planes[0], planes[1], scale, sum);
        uint8_t* step = out + at / COLUMNS * X_BYTES;
        const int64_t group = at % COLUMNS / GROUP, first = group * GROUP / 2;  // of the group's bytes
        for (int plane = 0; plane < 2; ++plane)
            for (int i = 0; i < 4; ++i)
                for (int m = 0; m < 4; ++m) {
                    uint8_t* own = step + first / VB * 4 * VB + 2 * plane * VB + first % VB + 4 * i + m;
                    own[0] = uint8_t(planes[plane][8 * m + i]), own[VB] = uint8_t(planes[plane][8 * m + 4 + i]);
                }
        float* pairs = reinterpret_cast<float*>(step + 8 * VB) + 2 * group;
        pairs[0] = scale, pairs[1] = 0.0f, pairs[VL] = 0.0f, pairs[VL + 1] = sum;
    }
};

// A matrix: its first row, the scales of that row, and the bytes from row to row.
struct RowMatrix {
    const uint8_t *data, *scales;
    int64_t stride, scale_stride;
};

template <int KIND> CT_INLINE int64_t encoded_bytes(int64_t columns) {
    return (columns + Rows<KIND>::COLUMNS - 1) / Rows<KIND>::COLUMNS * Rows<KIND>::X_BYTES;
}

// sums[r * M + m] = row first + r * step of the matrix times row m of x, over `columns` columns. Callers
// go on with row first + 1: each of the rows at once is a sequence of its own through memory, apart from
// the others, which the CPU's prefetchers follow. Neighbours would share a page, where they do not.
template <int KIND, int M>
static void row_products(const RowMatrix& matrix, int64_t first, int64_t step, int64_t columns, const uint8_t* const* x, float* sums) {
    using Own = Rows<KIND>;
    using Weights = typename Own::Weights;
    vf sum[AT_ONCE * M];
    each<AT_ONCE * M>([&](auto i) { sum[i] = vset(0.0f); });
    const uint8_t* data = matrix.data + first * matrix.stride;
    const uint8_t* scales = matrix.scales + first * matrix.scale_stride;
    const int64_t whole = columns / Own::COLUMNS;
    const int64_t stride = step * matrix.stride, scale_stride = step * matrix.scale_stride;
    for (int64_t i = 0; i < whole; ++i) {
        const int64_t scale_at = KIND == KIND_INT8 ? i * Own::COLUMNS / GROUP * 2 : i * Own::SCALES;
        each<AT_ONCE>([&](auto r) {
            const uint8_t* at = data + r * stride + i * Own::BYTES;
            for (int64_t line = 0; line < Own::BYTES; line += 64) prefetch(at + matrix.stride + line);  // the same place of the next row
            const Weights own = Weights::load(at, scales + r * scale_stride + scale_at);
            each<M>([&](auto m) { sum[r * M + m] = Weights::times(own, sum[r * M + m], x[m] + i * Own::X_BYTES); });
        });
    }
    const int64_t left = columns - whole * Own::COLUMNS;
    if (left) {  // some groups of a step: the rest is zero in x
        const int64_t bytes = left * Own::BYTES / Own::COLUMNS, scale_bytes = left * Own::SCALES / Own::COLUMNS;
        each<AT_ONCE>([&](auto r) {
            alignas(64) uint8_t last[Own::BYTES] = {}, last_scales[VB] = {};
            memcpy(last, data + r * stride + whole * Own::BYTES, bytes);
            memcpy(last_scales, scales + r * scale_stride + whole * Own::SCALES, scale_bytes);
            const Weights own = Weights::load(last, last_scales);
            each<M>([&](auto m) { sum[r * M + m] = Weights::times(own, sum[r * M + m], x[m] + whole * Own::X_BYTES); });
        });
    }
    each<M>([&](auto m) {
        float four[4];
        vsum4(four, sum[m], sum[M + m], sum[2 * M + m], sum[3 * M + m]);
        each<AT_ONCE>([&](auto r) { sums[r * M + m] = four[r]; });
    });
}
