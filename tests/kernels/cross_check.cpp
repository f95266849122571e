// Products and attention against plain loops, without Python: for instruction sets that only an
// emulator can run here. Exits with 1 and says where when something is off.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "attention.h"
#include "patches.h"

extern "C" {
int64_t ct_packed_bytes(int32_t kind, int64_t n, int64_t k);
int32_t ct_pack(int32_t, int64_t, int64_t, const void*, const void*, const void*, uint8_t*, int64_t);
int32_t ct_rows(const Matrix*, const int64_t*, int64_t, float*, int64_t);
int32_t ct_linear(const Matrix*, const float*, int64_t, float*, int64_t);
int32_t ct_experts(const ExpertCall*);
int32_t ct_patches(const Piece*, int64_t, const float*, int64_t, float*, int64_t, int64_t);
int32_t ct_attention(const Shape*, const Batch*, const Cache*, const float*, float*, int64_t);
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

// Random weights of one kind as stored, and their values.
struct Stored {
    std::vector<float> values;
    std::vector<uint8_t> packed;
};

struct BlockShape {
    int columns, bytes, factors, count;  // where its fp16 factors are, and how many
};
static BlockShape block_of(int32_t kind) {
    switch (kind) {
        case KIND_Q5_0: return {32, 22, 0, 1};
        case KIND_Q5_1: return {32, 24, 0, 2};
        case KIND_Q4K: return {256, 144, 0, 2};
        case KIND_Q5K: return {256, 176, 0, 2};
        default: return {256, 210, 208, 1};
    }
}

static void block_values(int32_t kind, const uint8_t* block, float* out) {  // as ggml writes it
    const auto half = [&](int at) { return half_to_float(uint16_t(block[at] | block[at + 1] << 8)); };
    if (kind == KIND_Q5_0 || kind == KIND_Q5_1) {
        const int head = kind == KIND_Q5_0 ? 2 : 4;
        for (int i = 0; i < 32; ++i) {
            const uint8_t byte = block[head + 4 + i % 16], fifth = block[head + i / 8] >> i % 8 & 1;
            const int q = (i < 16 ? byte & 15 : byte >> 4) | fifth << 4;
            out[i] = kind == KIND_Q5_0 ? half(0) * (q - 16) : half(0) * q + half(2);
        }
        return;
    }
    if (kind == KIND_Q4K || kind == KIND_Q5K) {
        const uint8_t *s = block + 4, *high = block + 16, *low = block + (kind == KIND_Q5K ? 48 : 16);
        for (int j = 0; j < 8; ++j) {
            const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
            const int least = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6 << 4);
            for (int l = 0; l < 32; ++l) {
                const uint8_t byte = low[j / 2 * 32 + l];
                const int fifth = kind == KIND_Q5K ? high[l] >> j & 1 : 0;
                out[j * 32 + l] = half(0) * scale * ((j % 2 ? byte >> 4 : byte & 15) | fifth << 4) - half(2) * least;
            }
        }
        return;
    }
    for (int i = 0; i < 256; ++i) {
        const int h = i / 128, quarter = i % 128 / 32, l = i % 32;
        const uint8_t low = block[h * 64 + quarter % 2 * 32 + l], high = block[128 + h * 32 + l];
        const int q = (quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4;
        out[i] = half(208) * int8_t(block[192 + i / 16]) * (q - 32);
    }
}

static Stored stored(int32_t kind, int n, int k) {
    Stored out;
    out.values.resize(n * k);
    out.packed.resize(ct_packed_bytes(kind, n, k));
    if (kind == KIND_F32) {
        for (auto& v : out.values) v = noise() * 0.2f;
        ct_pack(kind, n, k, out.values.data(), nullptr, nullptr, out.packed.data(), 1);
        return out;
    }
    const BlockShape shape = block_of(kind);
    std::vector<uint8_t> blocks(n * (k / shape.columns) * shape.bytes);
    for (auto& b : blocks) b = uint8_t(int(noise() * 127));
    for (int i = 0; i < n * (k / shape.columns); ++i) {
        uint8_t* block = blocks.data() + i * shape.bytes;
        // 0.004, 0.0005 and 0.00006: the larger, the fewer values they scale
        const uint8_t exponent = shape.columns == 32 ? 0x1c : kind == KIND_Q6K ? 0x04 : 0x10;
        for (int f = 0; f < shape.count; ++f) block[shape.factors + 2 * f] = 0, block[shape.factors + 2 * f + 1] = exponent;
        if (kind == KIND_Q5_1) block[3] |= 0x80;
        block_values(kind, block, out.values.data() + i * shape.columns);
    }
    ct_pack(kind, n, k, blocks.data(), nullptr, nullptr, out.packed.data(), 2);
    return out;
}

static void check_blocks(int32_t kind, int n, int k) {
    const Stored weights = stored(kind, n, k);
    std::vector<float> x(40 * k), y(40 * n), alone(n), rows(3 * k);
    for (auto& v : x) v = noise();
    const Part part{kind, n, weights.packed.data()};
    const Matrix matrix{1, n, k, (n + 15) / 16, &part};
    ct_linear(&matrix, x.data(), 40, y.data(), 2);
    for (int m = 0; m < 40; ++m) {
        ct_linear(&matrix, x.data() + m * k, 1, alone.data(), 1);
        for (int i = 0; i < n; ++i) {
            double want = 0;
            for (int j = 0; j < k; ++j) want += double(x[m * k + j]) * weights.values[i * k + j];
            expect(std::fabs(want - y[m * n + i]) < 2e-3, "blocks", want, y[m * n + i]);
            expect(alone[i] == y[m * n + i], "blocks alone", alone[i], y[m * n + i]);
        }
    }
    const int64_t ids[3] = {n - 1, 0, n / 2};
    ct_rows(&matrix, ids, 3, rows.data(), 2);
    for (int i = 0; i < 3 * k; ++i)
        expect(rows[i] == weights.values[ids[i / k] * k + i % k], "rows", rows[i], weights.values[ids[i / k] * k + i % k]);
}

// Experts with no, one and many rows; the second is not in the table.
static void check_experts(int32_t kind, bool gated) {
    constexpr int hidden = 256, inner = 512, tokens = 23, experts = 4;
    Stored parts[3] = {stored(kind, inner, hidden), stored(kind, inner, hidden), stored(kind, hidden, inner)};
    std::vector<float> bias[2], x(tokens * hidden), out(tokens * hidden, 99.0f), alone(hidden);
    for (auto& v : x) v = noise();
    ExpertShape shape{hidden, inner, gated ? 2 : 1, {}, {}};
    Buffer buffer;
    uint8_t* record = buffer.need<uint8_t>(8 << 20);
    int64_t at = 0;
    const auto put = [&](const void* from, size_t bytes) {
        memcpy(record + at, from, bytes);
        const int64_t here = at;
        at = round_up(at + bytes, 64);
        return here;
    };
    for (int i = 0; i < 3; ++i) {
        if (i == 1 && !gated) continue;
        ExpertPart& part = i == 2 ? shape.outer : shape.inner[i];
        part = {kind, i == 2 ? hidden : inner, put(parts[i].packed.data(), parts[i].packed.size()), -1};
        if (gated) continue;
        bias[i / 2].resize(part.rows);
        for (auto& v : bias[i / 2]) v = noise();
        part.bias = put(bias[i / 2].data(), part.rows * 4);
    }
    int32_t ids[tokens];
    for (int t = 0; t < tokens; ++t) ids[t] = t == 3 ? 0 : t % 5 == 4 ? 1 : 3;
    const uint8_t* records[experts] = {record, nullptr, record, record};
    const ExpertCall call{shape, x.data(), tokens, ids, 1, records, experts, out.data(), 2};
    ct_experts(&call);
    for (int t = 0; t < tokens; ++t) {
        if (ids[t] == 1) {
            expect(out[t * hidden] == 99.0f, "absent expert", out[t * hidden], 99);
            continue;
        }
        const ExpertCall one{shape, x.data() + t * hidden, 1, ids + t, 1, records, experts, alone.data(), 1};
        ct_experts(&one);
        std::vector<double> middle(inner);
        for (int i = 0; i < inner; ++i) {
            double a = gated ? 0 : bias[0][i], b = 0;
            for (int j = 0; j < hidden; ++j) {
                a += double(x[t * hidden + j]) * parts[0].values[i * hidden + j];
                b += double(x[t * hidden + j]) * parts[1].values[i * hidden + j];
            }
            middle[i] = gated ? a / (1 + std::exp(-a)) * b : a * 0.5 * (1 + std::erf(a / std::sqrt(2.0)));
        }
        for (int i = 0; i < hidden; ++i) {
            double want = gated ? 0 : bias[1][i], terms = 0;
            for (int j = 0; j < inner; ++j) {
                const double term = middle[j] * parts[2].values[i * inner + j];
                want += term, terms += std::fabs(term);
            }
            const float got = out[t * hidden + i];
            expect(std::fabs(want - got) < 3e-4 * terms, "experts", want, got);
            expect(alone[i] == got, "company", alone[i], got);
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
        const double limit = CT_AMX && is_bf16 ? 2e-2 : 1e-5;  // tiles round queries and weights to bf16
        for (int d = 0; d < dim; ++d)
            expect(std::fabs(mixed[d] / total - out[h * dim + d]) < limit, "attention", mixed[d] / total, out[h * dim + d]);
    }
}

// Two pieces beside untouched rows and columns; every row alone gives the same bits.
static void check_patches(int k, int rank, bool is_bf16) {
    constexpr int rows = 19, n = 110, widths[2] = {64, 37};
    std::vector<float> x(rows * k), y(rows * n), before, scale(64), shift(64);
    for (auto* values : {&x, &y, &scale, &shift})
        for (auto& v : *values) v = noise();
    before = y;
    std::vector<uint16_t> halves[4];
    std::vector<float> values[4];  // a, b of either piece
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < rank * (i % 2 ? widths[i / 2] : k); ++j) {
            halves[i].push_back(float_to_bf16(noise()));
            values[i].push_back(bf16_value(halves[i][j]));
        }
    const auto at = [&](int i) { return is_bf16 ? (const void*)halves[i].data() : (const void*)values[i].data(); };
    const Patch patches[2] = {{at(0), at(1), nullptr, scale.data(), shift.data(), rank, is_bf16, 1},
                              {at(2), at(3), nullptr, nullptr, nullptr, rank, is_bf16, 1}};
    const Piece pieces[2] = {{patches, 1, 11, 2, widths[0], 0}, {patches + 1, 14, 5, 70, widths[1], 0}};
    ct_patches(pieces, 2, x.data(), k, y.data(), n, 2);
    for (int m = 0; m < rows; ++m)
        for (int c = 0; c < n; ++c) {
            double want = before[m * n + c];
            for (int p = 0; p < 2; ++p) {
                const int64_t column = c - pieces[p].column;
                if (m < pieces[p].first || m >= pieces[p].first + pieces[p].rows || column < 0 || column >= widths[p]) continue;
                if (p == 0) want = want * scale[column] + shift[column];
                for (int r = 0; r < rank; ++r)
                    for (int j = 0; j < k; ++j)
                        want += double(x[m * k + j]) * values[2 * p][r * k + j] * values[2 * p + 1][r * widths[p] + column];
            }
            expect(std::fabs(want - y[m * n + c]) < 1e-4 * (1 + std::fabs(want)), "patches", want, y[m * n + c]);
        }
    for (const Piece& piece : pieces)
        for (int64_t m = piece.first; m < piece.first + piece.rows; ++m) {
            const Piece alone{piece.patch, m, 1, piece.column, piece.width, 0};
            std::vector<float> again = before;
            ct_patches(&alone, 1, x.data(), k, again.data(), n, 1);
            for (int64_t c = m * n; c < (m + 1) * n; ++c) expect(again[c] == y[c], "patches alone", again[c], y[c]);
        }
}

int main() {
    for (bool is_bf16 : {false, true})
        for (int k : {96, 45})
            for (int rank : {1, 3, 4, 13}) check_patches(k, rank, is_bf16);
    for (int32_t kind = KIND_F32; kind <= KIND_INT4; ++kind)
        for (auto shape : {std::pair<int, int>{70, 96}, {16, 32}, {33, 416}}) check_linear(kind, shape.first, shape.second);
    check_linear(KIND_F32, 21, 53), check_linear(KIND_BF16, 21, 53);
    for (bool is_bf16 : {false, true}) {
        check_attention(6, 2, 64, is_bf16), check_attention(4, 4, 80, is_bf16), check_attention(9, 1, 16, is_bf16);
    }
    for (int32_t kind = KIND_Q5_0; kind <= KIND_Q6K; ++kind)
        for (auto shape : {std::pair<int, int>{70, 256}, {16, 512}, {33, 768}}) check_blocks(kind, shape.first, shape.second);
    for (int32_t kind : {KIND_F32, KIND_Q5_1, KIND_Q4K, KIND_Q6K})
        for (bool gated : {true, false}) check_experts(kind, gated);
    printf("%s: %d failures\n", ct_isa(), failures);
    return failures != 0;
}
