#include <initializer_list>

#include "activations.h"

static unsigned forms_of(const Matrix& matrix) {
    unsigned forms = 0;
    for (int i = 0; i < matrix.num_parts; ++i) {
        const int32_t kind = matrix.parts[i].kind;
        if (kind == KIND_F32 || (kind == KIND_BF16 && !amx_ready())) forms |= FORM_F32;
        else if (kind == KIND_BF16) forms |= FORM_BF16;
        else forms |= FORM_PLANES | (kind == KIND_Q6K ? FORM_HALVES : 0);
    }
    return forms;
}

// Rows are an odd number of cache lines apart: at a power of two all would share a few places of the L1
// cache.
template <class T> static int64_t distance(int64_t columns) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return round_up(columns, LINE) | LINE;
}
static int64_t groups_apart(int64_t columns) { return distance<int8_t>(columns * 2) / (2 * GROUP); }

void InputBuffers::reserve(const Matrix& matrix, int64_t rows) {
    const unsigned forms = forms_of(matrix);
    const int64_t groups = rows * groups_apart(matrix.k);
    if (forms & FORM_F32) x.need<float>(rows * distance<float>(matrix.k));
    if (forms & FORM_BF16) bf16.need<uint16_t>(rows * distance<uint16_t>(matrix.k));
    if (!(forms & FORM_PLANES)) return;
    planes.need<int8_t>(groups * 2 * GROUP);
    scale.need<float>(groups), sum.need<float>(groups), isum.need<int32_t>(groups);
    if (forms & FORM_HALVES) half_sum.need<float>(2 * groups);
}

Encoder::Encoder(InputBuffers& buffers, const Matrix& matrix)
    : forms_(forms_of(matrix)), k_(matrix.k), x_(buffers.x.at<float>()), scale_(buffers.scale.at<float>()),
      sum_(buffers.sum.at<float>()), half_sum_(buffers.half_sum.at<float>()), bf16_(buffers.bf16.at<uint16_t>()), planes_(buffers.planes.at<int8_t>()),
      isum_(buffers.isum.at<int32_t>()) {
    in_ = {x_, distance<float>(k_), bf16_, distance<uint16_t>(k_), planes_, scale_, sum_, isum_, half_sum_, groups_apart(k_)};
}

// One span per row when there are rows for everyone, else rows are cut.
int64_t Encoder::spans_of(const Team& team, int64_t rows) const {
    if (rows >= team.size() * 2) return 1;
    const int64_t groups = round_up(k_, GROUP) / GROUP;
    const int64_t wanted = (team.size() + rows - 1) / rows;
    const int64_t most = (groups + 7) / 8;  // at least 8 groups each
    return wanted < most ? wanted : most;
}

float* Encoder::row_scratch(int64_t width) {
    static thread_local Buffer mine;
    return mine.need<float>(width);
}

struct GroupSums {
    float scale;
    int32_t half[2];  // of the integers
};

static GroupSums quantize(const float* x, int8_t* planes) {
    vf most = vset(0.0f);
    for (int i = 0; i < GROUP; i += VL) most = vmax(most, vabs(vload(x + i)));
    const float top = vmaxall(most);
    const float inverse = top > 0.0f ? TOP / top : 0.0f;
    alignas(64) float rounded[GROUP];
    for (int i = 0; i < GROUP; i += VL) vstore(rounded + i, vround(vmul(vload(x + i), vset(inverse))));
    GroupSums sums{top / TOP, {0, 0}};
    for (int half = 0; half < 2; ++half)
        for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; ++i) {
            const int32_t value = static_cast<int32_t>(rounded[i]);
            sums.half[half] += value;
#if CT_WORDS
            const int16_t word = static_cast<int16_t>(value);
            memcpy(planes + 2 * (i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4)), &word, 2);
#else
            const int32_t high = PLANES == 2 ? (value + 64) >> 7 : value;
            planes[i] = static_cast<int8_t>(high);
            planes[GROUP + i] = static_cast<int8_t>(value - high * 128);
#endif
        }
    return sums;
}

void Encoder::encode(int64_t row, int64_t from, int64_t to, const float* x) {
    if (forms_ & FORM_BF16) {
        uint16_t* out = bf16_ + row * in_.ld_bf16 + from;
        for (int64_t i = 0; i < to - from; ++i) out[i] = float_to_bf16(x[i]);
    }
    if (forms_ & FORM_PLANES) {
        const int64_t at = row * in_.ld_groups + from / GROUP;
        const GroupSums sums = quantize(x, planes_ + at * 2 * GROUP);
        const int32_t total = sums.half[0] + sums.half[1];
        scale_[at] = sums.scale, sum_[at] = sums.scale * float(total), isum_[at] = total * W_OFFSET;
        if (forms_ & FORM_HALVES)
            for (int half = 0; half < 2; ++half) half_sum_[2 * at + half] = sums.scale * float(sums.half[half]);
    }
}

void Encoder::pad(int64_t row) {
    if (forms_ & FORM_F32)
        for (int64_t i = k_; i < round_up(k_, 4); ++i) x_[row * in_.ldx + i] = 0.0f;
    if (forms_ & FORM_BF16)
        for (int64_t i = k_; i < round_up(k_, BF16_K); ++i) bf16_[row * in_.ld_bf16 + i] = 0;
}

float rms_factor(const float* x, int64_t n, float eps) {
    vf lanes = vset(0.0f);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf v = vload(x + i);
        lanes = vfma(lanes, v, v);
    }
    float sum = vsum(lanes);
    for (; i < n; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

void scaled_product(const float* x, const float* weight, float factor, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// erf to about one unit in the last place; both branches are computed, then chosen by lane.
static vf verf(vf a) {
    const vf x = vmax(vmin(a, vset(4.0f)), vset(-4.0f));  // erf(4) rounds to 1
    const vf t = vabs(x), s = vmul(x, x), edge = vset(0.927734375f);
    vf far = vfma(vset(3.83197126e-4f), vset(-1.72853470e-5f), t);
    far = vfma(vfma(vset(2.42546219e-2f), vset(-3.88396438e-3f), t), far, s);
    for (float c : {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f}) far = vfma(vset(c), far, t);
    far = vfma(vsub(vset(0.0f), t), far, t);
    far = vsub(vset(1.0f), vexp(far));
    far = vmul(far, vsub(vkeep(vset(2.0f), x, vset(0.0f)), vset(1.0f)));
    vf near = vset(-5.96761703e-4f);
    for (float c : {4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f})
        near = vfma(vset(c), near, s);
    near = vfma(x, near, x);
    return vadd(vkeep(far, t, edge), vsub(near, vkeep(near, t, edge)));
}

void gelu(const float* x, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf v = vload(x + i);
        vstore(out + i, vmul(vmul(v, vset(0.5f)), vadd(vset(1.0f), verf(vmul(v, vset(0.70710678118654752f))))));
    }
    if (i == n) return;
    alignas(64) float last[VL] = {}, tail[VL];
    memcpy(last, x + i, (n - i) * sizeof(float));
    gelu(last, VL, tail);
    memcpy(out + i, tail, (n - i) * sizeof(float));
}

void silu_product(const float* gate, const float* up, int64_t n, float* out) {
    const vf one = vset(1.0f);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf g = vload(gate + i);
        const vf sigmoid = vdiv(one, vadd(one, vexp(vmin(vsub(vset(0.0f), g), vset(88.0f)))));
        vstore(out + i, vmul(vmul(g, sigmoid), vload(up + i)));
    }
    if (i == n) return;
    alignas(64) float g[VL] = {}, u[VL] = {}, tail[VL];
    memcpy(g, gate + i, (n - i) * sizeof(float));
    memcpy(u, up + i, (n - i) * sizeof(float));
    silu_product(g, u, VL, tail);
    memcpy(out + i, tail, (n - i) * sizeof(float));
}
