// The C entry points that run whole stacks: one call, one team, every layer.
#include <algorithm>
#include <initializer_list>

#include "attention.h"
#include "moe.h"
#include "patched.h"

constexpr int LAYER_PHASES = 7 + MOE_PHASES;  // two products with their inputs, norm, placing heads, attention

struct Workspace {
    InputBuffers input;
    Attention attention;
    MoeSpace moe;
    PatchSpace patches;
    Buffer qkv, q, out, gate_up;
};

static Workspace& workspace() {
    static thread_local Workspace mine;
    return mine;
}

struct DecoderCall {
    Shape shape;
    const Layer* layers;
    const Cache* caches;
    int64_t num_layers;
    const float* cos;  // [positions][head_dim / 2]
    const float* sin;
    Batch batch;
    float* hidden;  // [rows][hidden], updated in place
    int64_t threads;
    int32_t* routed;  // [num_layers][rows][top_k]: what gates chose; null when no layer has one here
    const Segment* segments;
    int64_t num_segments;
    int64_t first_layer;  // the number of layers[0] in the model, by which patches are found
};

struct Product {
    const Matrix& matrix;
    Site site;
};

// y = norm(x) W^T
static void norm_gemm(Team& team, Workspace& ws, const Product& product, const float* x, const float* weight, float eps, int64_t rows, float* y) {
    const Matrix& matrix = product.matrix;
    Encoder encoder(ws.input, matrix);
    Patched patched(ws.patches, matrix, product.site);
    const int64_t k = matrix.k;
    gemm(team, matrix, encoder.fill(team, rows, [&](int64_t row, int64_t from, int64_t end, float* out) {
        const float* at = x + row * k;
        scaled_product(at + from, weight + from, rms_factor(at, k, eps), end - from, out);
        patched.pass(row, from, end, out, y);
    }), rows, y, STORE);
    patched.finish(team, ws.input, y);
}

// y += x W^T
static void add_gemm(Team& team, Workspace& ws, const Product& product, const float* x, int64_t rows, float* y) {
    const Matrix& matrix = product.matrix;
    Encoder encoder(ws.input, matrix);
    Patched patched(ws.patches, matrix, product.site);
    gemm(team, matrix, encoder.fill(team, rows, [&](int64_t row, int64_t from, int64_t end, float* out) {
        memcpy(out, x + row * matrix.k + from, (end - from) * sizeof(float));
        patched.pass(row, from, end, out, y);
    }), rows, y, ADD);
    patched.finish(team, ws.input, y);
}

// y += (silu(gate) * up) W^T
static void silu_gemm(Team& team, Workspace& ws, const Product& product, const float* gate_up, int64_t rows, float* y) {
    const Matrix& matrix = product.matrix;
    Encoder encoder(ws.input, matrix);
    Patched patched(ws.patches, matrix, product.site);
    gemm(team, matrix, encoder.fill(team, rows, [&](int64_t row, int64_t from, int64_t end, float* out) {
        const float* gate = gate_up + row * 2 * matrix.k + from;
        silu_product(gate, gate + matrix.k, end - from, out);
        patched.pass(row, from, end, out, y);
    }), rows, y, ADD);
    patched.finish(team, ws.input, y);
}

static void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

static void store_kv(const Cache& cache, int64_t at, const float* x, int dim) {
    if (!cache.is_bf16) {
        memcpy(static_cast<float*>(cache.data) + at, x, dim * sizeof(float));
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(cache.data) + at;
    for (int d = 0; d < dim; ++d) out[d] = float_to_bf16(x[d]);
}

// Bias, norm and rotation of one head of one row; queries go to q, keys and values to the cache.
static void place_head(const DecoderCall& call, const Layer& layer, const Cache& cache, int64_t row, int head, float* x, float* q, int padded) {
    const Shape& s = call.shape;
    const int dim = s.head_dim, half = dim / 2;
    if (layer.qkv_bias && !layer.whole_norm)
        for (int d = 0; d < dim; ++d) x[d] += layer.qkv_bias[head * dim + d];
    const bool is_query = head < s.heads, is_key = !is_query && head < s.heads + s.kv_heads;
    const float* norm = is_query ? layer.q_norm : is_key ? layer.k_norm : nullptr;
    if (norm && !layer.whole_norm) scaled_product(x, norm, rms_factor(x, dim, s.eps), dim, x);
    const int64_t position = call.batch.positions[row];
    if (is_query || is_key) rotate(x, call.cos + position * half, call.sin + position * half, half);
    if (is_query) {
        float* to = q + (row * s.heads + head) * padded;
        for (int d = 0; d < padded; ++d) to[d] = d < dim ? x[d] * s.scale : 0.0f;
        return;
    }
    const int64_t slot = call.batch.slots[row], size = call.batch.block_size;
    const int kv_head = is_key ? head - s.heads : head - s.heads - s.kv_heads;
    const int64_t block = (is_key ? 0 : cache.num_blocks) + slot / size;
    store_kv(cache, ((block * s.kv_heads + kv_head) * size + slot % size) * dim, x, dim);
}

// Bias and norm of one row's queries and keys, each over all its heads.
static void norm_whole(const DecoderCall& call, const Layer& layer, float* x) {
    const Shape& s = call.shape;
    const int64_t q = int64_t(s.heads) * s.head_dim, kv = int64_t(s.kv_heads) * s.head_dim;
    if (layer.qkv_bias)
        for (int64_t i = 0; i < q + 2 * kv; ++i) x[i] += layer.qkv_bias[i];
    scaled_product(x, layer.q_norm, rms_factor(x, q, s.eps), q, x);
    scaled_product(x + q, layer.k_norm, rms_factor(x + q, kv, s.eps), kv, x + q);
}

static void attend(Team& team, Workspace& ws, const DecoderCall& call, const Layer& layer, const Cache& cache) {
    const Shape& s = call.shape;
    const int64_t rows = call.batch.rows, heads = s.heads + 2 * s.kv_heads;
    float* qkv = ws.qkv.at<float>();
    float* q = ws.q.at<float>();
    const int64_t tasks = rows * heads, grain = tasks / (team.size() * 4);
    if (layer.whole_norm)
        team.share(rows, 1, [&](int64_t row, int64_t) { norm_whole(call, layer, qkv + row * heads * s.head_dim); });
    team.share(tasks, grain < 1 ? 1 : grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            place_head(call, layer, cache, i / heads, int(i % heads), qkv + i * s.head_dim, q, ws.attention.padded_dim());
    });
    ws.attention.run(team, {q, ws.out.at<float>(), &cache});
}

static void run_layer(Team& team, Workspace& ws, const DecoderCall& call, int64_t index) {
    const Layer& layer = call.layers[index];
    const Cache& cache = call.caches[index];
    const int64_t rows = call.batch.rows;
    const Shape& s = call.shape;
    const float eps = s.eps;
    const int64_t number = call.first_layer + index, kv = int64_t(s.kv_heads) * s.head_dim;
    float* gate_up = ws.gate_up.at<float>();
    const Product qkv{*layer.qkv, {number, 0, 3, {int64_t(s.heads) * s.head_dim, kv, kv}, false}};
    norm_gemm(team, ws, qkv, call.hidden, layer.input_norm, eps, rows, ws.qkv.at<float>());
    attend(team, ws, call, layer, cache);
    add_gemm(team, ws, {*layer.o, {number, 3, 1, {s.hidden}, true}}, ws.out.at<float>(), rows, call.hidden);
    if (layer.moe) {
        int32_t* ids = call.routed + index * rows * layer.moe->route.top_k;
        run_moe(team, ws.moe, *layer.moe, eps, rows, call.hidden, ids);
    }
    if (!layer.post_norm) return;
    const Product inner{*layer.gate_up, {number, 4, 2, {s.intermediate, s.intermediate}, false}};
    norm_gemm(team, ws, inner, call.hidden, layer.post_norm, eps, rows, gate_up);
    silu_gemm(team, ws, {*layer.down, {number, 6, 1, {s.hidden}, true}}, gate_up, rows, call.hidden);
}

// Of all inputs and outputs of the layers' products.
static int64_t widest(const DecoderCall& call) {
    int64_t most = 0;
    for (int64_t i = 0; i < call.num_layers; ++i)
        for (const Matrix* matrix : {call.layers[i].qkv, call.layers[i].o, call.layers[i].gate_up, call.layers[i].down})
            if (matrix) most = std::max<int64_t>(most, std::max(matrix->k, matrix->n));
    return most;
}

extern "C" {

int32_t ct_decoder(const DecoderCall* call) {
    return status_of([&] {
        Workspace& ws = workspace();
        const Shape& s = call->shape;
        const int64_t rows = call->batch.rows;
        ws.attention.plan(s, call->batch, int(call->threads));
        ws.qkv.need<float>(rows * (s.heads + 2 * s.kv_heads) * s.head_dim);
        ws.q.need<float>(rows * s.heads * ws.attention.padded_dim());
        ws.out.need<float>(rows * s.heads * s.head_dim);
        ws.gate_up.need<float>(rows * 2 * s.intermediate);
        for (int64_t i = 0; i < call->num_layers; ++i)
            for (const Matrix* matrix : {call->layers[i].qkv, call->layers[i].o, call->layers[i].gate_up, call->layers[i].down})
                if (matrix) ws.input.reserve(*matrix, rows);
        for (int64_t i = 0; i < call->num_layers; ++i)
            if (call->layers[i].moe) reserve_moe(ws.moe, *call->layers[i].moe, rows);
        ws.patches.prepare(call->segments, call->num_segments, rows, widest(*call));
        auto body = [&](Team& team) {
            for (int64_t i = 0; i < call->num_layers; ++i) run_layer(team, ws, *call, i);
        };
        const int64_t phases = LAYER_PHASES + (call->num_segments ? PATCH_PHASES : 0);
        run_team(int(call->threads), call->num_layers * phases, body);
    });
}

int32_t ct_linear(const Matrix* matrix, const float* x, int64_t rows, float* y, int64_t threads) {
    return status_of([&] {
        Workspace& ws = workspace();
        ws.input.reserve(*matrix, rows);
        auto body = [&](Team& team) { plain_gemm(team, ws.input, *matrix, x, rows, y, STORE); };
        run_team(int(threads), 2, body);
    });
}

// q and out: [rows, heads, head_dim].
int32_t ct_attention(const Shape* shape, const Batch* batch, const Cache* cache, const float* q, float* out, int64_t threads) {
    return status_of([&] {
        Workspace& ws = workspace();
        ws.attention.plan(*shape, *batch, int(threads));
        const int64_t dim = shape->head_dim, padded = ws.attention.padded_dim();
        float* scaled = ws.q.need<float>(batch->rows * shape->heads * padded);
        auto body = [&](Team& team) {
            team.share(batch->rows, 1, [&](int64_t row, int64_t) {
                for (int64_t h = row * shape->heads; h < (row + 1) * shape->heads; ++h)
                    for (int64_t d = 0; d < padded; ++d)
                        scaled[h * padded + d] = d < dim ? q[h * dim + d] * shape->scale : 0.0f;
            });
            ws.attention.run(team, {scaled, out, cache});
        };
        run_team(int(threads), 2, body);
    });
}

void ct_rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t k, float* out) {
    for (int64_t row = 0; row < rows; ++row)
        scaled_product(x + row * k, weight, rms_factor(x + row * k, k, eps), k, out + row * k);
}

}  // extern "C"
