// Dense weights to int8 and int4 groups of 32: the arithmetic of weights/quantize.py, so that an
// expert can be rounded while it is read. Sums have another order than in torch: near ties may round
// differently.
#include "team.h"

constexpr int N = GROUP / VL;  // vectors of one group

static uint16_t float_to_half(float f) {  // to nearest even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return uint16_t(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude < 0x38800000) {  // subnormal: add half of 2^-14, whose last place is 2^-24
        float value;
        memcpy(&value, &magnitude, 4);
        value += 0.5f;
        uint32_t moved;
        memcpy(&moved, &value, 4);
        return uint16_t(sign | (moved - 0x3f000000));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

static float as_half(float f, uint16_t& stored) {
    stored = float_to_half(f);
    return half_to_float(stored);
}

static float total(const vf (&v)[N]) {
    vf sum = v[0];
    for (int i = 1; i < N; ++i) sum = vadd(sum, v[i]);
    return vsum(sum);
}

struct Fit {  // w = q * scale + minimum
    float scale, minimum, error;
    uint16_t stored_scale, stored_minimum;
    vf q[N];

    void take(float new_scale, float new_minimum, const vf (&v)[N]) {
        scale = as_half(new_scale, stored_scale), minimum = as_half(new_minimum, stored_minimum);
        const vf inverse = vset(scale != 0.0f ? 1.0f / scale : 0.0f), low = vset(minimum), zero = vset(0.0f), top = vset(15.0f);
        vf off[N];
        for (int i = 0; i < N; ++i) {
            q[i] = vmin(vmax(vround(vmul(vsub(v[i], low), inverse)), zero), top);
            const vf gap = vsub(vadd(vmul(q[i], vset(scale)), low), v[i]);
            off[i] = vmul(gap, gap);
        }
        error = total(off);
    }
};

static Fit fit_int4(const vf (&v)[N]) {
    vf least = v[0], most = v[0];
    for (int i = 1; i < N; ++i) least = vmin(least, v[i]), most = vmax(most, v[i]);
    const float high = vmaxall(most), low = -vmaxall(vsub(vset(0.0f), least));
    Fit best;
    best.take((high - low) / 15, low, v);
    for (int round = 0; round < 4; ++round) {
        const float mean_q = total(best.q) / GROUP, mean_v = total(v) / GROUP;
        vf squares[N], products[N];
        for (int i = 0; i < N; ++i) {
            const vf centred = vsub(best.q[i], vset(mean_q));
            squares[i] = vmul(centred, centred), products[i] = vmul(centred, v[i]);
        }
        const float variance = total(squares);
        uint16_t unused;
        const float scale = as_half(total(products) / (variance > 1e-12f ? variance : 1e-12f), unused);
        Fit next;
        next.take(scale, mean_v - scale * mean_q, v);
        if (!(next.error < best.error)) break;  // the next round would find the same
        best = next;
    }
    return best;
}

static void load_group(const void* src, bool is_bf16, int64_t at, vf (&v)[N]) {
    alignas(64) float wide[GROUP];
    const float* from = static_cast<const float*>(src) + at;
    if (is_bf16) {
        const uint16_t* halves = static_cast<const uint16_t*>(src) + at;
        for (int i = 0; i < GROUP; ++i) {
            const uint32_t bits = uint32_t(halves[i]) << 16;
            memcpy(wide + i, &bits, 4);
        }
        from = wide;
    }
    for (int i = 0; i < N; ++i) v[i] = vload(from + i * VL);
}

static void group_int4(const vf (&v)[N], uint8_t* q, uint16_t* scale, uint16_t* minimum) {
    const Fit fit = fit_int4(v);
    alignas(64) float values[GROUP];
    for (int i = 0; i < N; ++i) vstore(values + i * VL, fit.q[i]);
    for (int i = 0; i < GROUP / 2; ++i) q[i] = uint8_t(int(values[i]) | int(values[i + GROUP / 2]) << 4);
    *scale = fit.stored_scale, *minimum = fit.stored_minimum;
}

static void group_int8(const vf (&v)[N], uint8_t* q, uint16_t* scale) {
    vf most = vabs(v[0]);
    for (int i = 1; i < N; ++i) most = vmax(most, vabs(v[i]));
    const float step = as_half(vmaxall(most) / 127, *scale);
    const vf inverse = vset(step != 0.0f ? 1.0f / step : 0.0f);
    alignas(64) float values[GROUP];
    for (int i = 0; i < N; ++i)
        vstore(values + i * VL, vmin(vmax(vround(vmul(v[i], inverse)), vset(-127.0f)), vset(127.0f)));
    for (int i = 0; i < GROUP; ++i) q[i] = uint8_t(int8_t(values[i]));
}

// src: fp32 or bf16 [groups * 32]; q: int8 [groups * 32] or nibbles [groups * 16].
extern "C" int32_t ct_quantise(int32_t kind, int64_t groups, const void* src, int32_t is_bf16, uint8_t* q, uint16_t* scale, uint16_t* minimum, int64_t threads) {
    return status_of([&] {
        auto body = [&](Team& team) {
            team.share(groups, 256, [&](int64_t begin, int64_t end) {
                for (int64_t g = begin; g < end; ++g) {
                    vf v[N];
                    load_group(src, is_bf16, g * GROUP, v);
                    if (kind == KIND_INT4) group_int4(v, q + g * GROUP / 2, scale + g, minimum + g);
                    else group_int8(v, q + g * GROUP, scale + g);
                }
            });
        };
        run_team(int(threads), 1, body);
    });
}
