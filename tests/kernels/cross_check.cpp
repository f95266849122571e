// Products and attention against plain loops, without Python: for instruction sets that only an
// emulator can run here. Exits with 1 and says where when something is off.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "attention.h"

extern "C" {
int64_t ct_packed_bytes(int32_t kind, int64_t n, int64_t k);
void ct_pack(int32_t, int64_t, int64_t, const void*, const void*, const void*, uint8_t*, int64_t);
void ct_linear(const Matrix*, const float*, int64_t, float*, int64_t);
void ct_attention(const Shape*, const Batch*, const Cache*, const float*, float*, int64_t);
const char* ct_isa();
}

static uint32_t seed = 1;
static float noise() {  // about -1 .. 1
    seed = seed * 1664525u + 1013904223u;
    return float(int32_t(seed)) / 2147483648.0f;
}
static int failures = 0;
static void expect(bool ok, const char* what, double a, double b) {
    if (ok) return;
    ++failures;
    printf("FAILED %s: %g %g\n", what, a, b);
}
static float bf16_value(uint16_t h) {
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static void check_linear(int32_t kind, int n, int k) {
    const uint16_t half_scale = 0x2000, half_minimum = 0xa800;  // 0.0078125, -0.03125
    std::vector<float> dense(n * k), x(40 * k), y(40 * n), alone(n);
    std::vector<uint16_t> bf16(n * k), scale(n * k / 32 + 1, half_scale), minimum(n * k / 32 + 1, half_minimum);
    std::vector<uint8_t> bytes(n * k);
    for (auto& v : x) v = noise();
    for (int i = 0; i < n * k; ++i) {
        dense[i] = noise();
        bf16[i] = float_to_bf16(dense[i]);
        bytes[i] = uint8_t(int(noise() * 127));
        if (kind == KIND_BF16) dense[i] = bf16_value(bf16[i]);
        if (kind == KIND_INT8) dense[i] = float(int8_t(bytes[i])) * 0.0078125f;
    }
    if (kind == KIND_INT4)
        for (int i = 0; i < n * k; ++i) {
            const int row = i / k, g = i % k / 32, j = i % 32;
            const uint8_t b = bytes[row * (k / 2) + g * 16 + j % 16];
            dense[i] = float(j < 16 ? b & 15 : b >> 4) * 0.0078125f - 0.03125f;
        }
    const void* q = kind == KIND_F32 ? (const void*)dense.data() : kind == KIND_BF16 ? (const void*)bf16.data() : bytes.data();
    Buffer packed;
    ct_pack(kind, n, k, q, scale.data(), minimum.data(), packed.need<uint8_t>(ct_packed_bytes(kind, n, k)), 2);
    const Part part{kind, n, packed.at<uint8_t>()};
    const Matrix matrix{1, n, k, (n + 15) / 16, &part};
    ct_linear(&matrix, x.data(), 40, y.data(), 2);
    for (int m = 0; m < 40; ++m) {
        ct_linear(&matrix, x.data() + m * k, 1, alone.data(), 1);
        for (int i = 0; i < n; ++i) {
            double want = 0;
            for (int j = 0; j < k; ++j) want += double(x[m * k + j]) * dense[i * k + j];
            expect(std::fabs(want - y[m * n + i]) < (kind == KIND_BF16 ? 3e-2 : 2e-3), "linear", want, y[m * n + i]);
            expect(alone[i] == y[m * n + i], "batch invariance", alone[i], y[m * n + i]);
        }
    }
}

static void check_attention(int heads, int kv_heads, int dim, bool is_bf16) {
    const int context = 700, size = 16, blocks = 44;
    std::vector<uint16_t> halves(2 * blocks * kv_heads * size * dim);
    std::vector<float> kv(halves.size()), q(heads * dim), out(heads * dim);
    for (size_t i = 0; i < kv.size(); ++i) {
        halves[i] = float_to_bf16(noise());
        kv[i] = bf16_value(halves[i]);
    }
    for (auto& v : q) v = noise() * 3;
    std::vector<int32_t> table(blocks);
    for (int i = 0; i < blocks; ++i) table[i] = (i * 7) % blocks;
    const int32_t starts[2] = {0, 1}, contexts[1] = {context};
    const Shape shape{heads, kv_heads, dim, 0, 0, 0.0f, 0.3f};
    const Batch batch{1, 1, nullptr, nullptr, starts, contexts, table.data(), blocks, size};
    const Cache cache{is_bf16 ? (void*)halves.data() : (void*)kv.data(), blocks, is_bf16};
    ct_attention(&shape, &batch, &cache, q.data(), out.data(), 2);
    for (int h = 0; h < heads; ++h) {
        std::vector<double> mixed(dim, 0.0);
        double total = 0;
        for (int t = 0; t < context; ++t) {
            const int64_t at = ((int64_t(table[t / size]) * kv_heads + h / (heads / kv_heads)) * size + t % size) * dim;
            double score = 0;
            for (int d = 0; d < dim; ++d) score += double(q[h * dim + d]) * kv[at + d];
            const double weight = std::exp(score * 0.3);
            total += weight;
            for (int d = 0; d < dim; ++d) mixed[d] += weight * kv[at + int64_t(blocks) * kv_heads * size * dim + d];
        }
        for (int d = 0; d < dim; ++d)
            expect(std::fabs(mixed[d] / total - out[h * dim + d]) < 1e-5, "attention", mixed[d] / total, out[h * dim + d]);
    }
}

int main() {
    for (int32_t kind = KIND_F32; kind <= KIND_INT4; ++kind)
        for (auto shape : {std::pair<int, int>{70, 96}, {16, 32}, {33, 416}}) check_linear(kind, shape.first, shape.second);
    check_linear(KIND_F32, 21, 53), check_linear(KIND_BF16, 21, 53);
    for (bool is_bf16 : {false, true}) {
        check_attention(6, 2, 64, is_bf16), check_attention(4, 4, 80, is_bf16), check_attention(9, 1, 16, is_bf16);
    }
    printf("%s: %d failures\n", ct_isa(), failures);
    return failures != 0;
}
