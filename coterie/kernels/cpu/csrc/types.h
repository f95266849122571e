// The plain C structures shared with kernels/cpu/abi.py (ctypes), and the internal view of one product.
#pragma once
#include "simd.h"

// in the order of weights/kinds.py
enum Kind : int32_t { KIND_F32, KIND_BF16, KIND_INT8, KIND_INT4, KIND_Q5_0, KIND_Q5_1, KIND_Q4K, KIND_Q5K, KIND_Q6K };

// a file's blocks that become panels of int8 and int4
enum Source : int32_t { SOURCE_Q8_0 = 64, SOURCE_Q4_0, SOURCE_Q4_1 };

// The rows of one stored weight, packed into ceil(rows / 16) panels.
struct Part {
    int32_t kind;
    int32_t rows;
    const uint8_t* data;
};

// y = x W^T, where W is the concatenated rows of the parts.
struct Matrix {
    int32_t num_parts;
    int32_t n;
    int32_t k;
    int32_t panels;
    const Part* parts;
};

struct Shape {
    int32_t heads, kv_heads, head_dim, hidden, intermediate;
    float eps, scale;
};

struct Layer {
    const float* input_norm;
    const Matrix* qkv;
    const float* q_norm;    // null unless the model norms its query heads
    const float* k_norm;    // null likewise
    const float* qkv_bias;  // null likewise
    const Matrix* o;
    const float* post_norm;  // null: the layer ends after attention, and has no gate_up and down
    const Matrix* gate_up;
    const Matrix* down;
    int32_t whole_norm;  // q_norm and k_norm go over all heads at once
    const struct MoePart* moe;  // null: no experts, or the caller runs them
};

struct Batch {
    int64_t rows, sequences;
    const int64_t* positions;
    const int64_t* slots;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t max_blocks, block_size;
};

struct Cache {  // one layer: [2, num_blocks, kv_heads, block_size, head_dim]
    void* data;
    int64_t num_blocks;
    int32_t is_bf16;
};

// What a stack of adapters changes in one matrix: y = out_scale * (W (in_scale * x)) + shift + (x a^T) b
// in fp32; parts that are null are left out.
struct Patch {
    const void* a;  // [rank][in], fp32 or bf16
    const void* b;  // [rank][out], of the same type
    const float* in_scale;
    const float* out_scale;
    const float* shift;
    int32_t rank, is_bf16;
    int32_t present;  // 0: the matrix has no patch
};

// Rows first .. last (exclusive) of a step, and the patches of their stack.
struct Segment {
    int64_t first, last;
    const Patch* patches;  // [layers of the model][q, k, v, o, gate, up, down]
    int64_t most_ranks;    // of any of them
};

struct ExpertPart {
    int32_t kind, rows;
    int64_t offset;  // of its panels in a record
    int64_t bias;    // offset of its fp32 bias; -1: none
};

// One expert in a record (kernels/expert_layout.py).
struct ExpertShape {
    int32_t hidden, intermediate;
    int32_t num_inner;    // 2: silu(gate) * up; 1: gelu(fc1)
    ExpertPart inner[2];  // [intermediate, hidden]
    ExpertPart outer;     // [hidden, intermediate]
};

// How a gate chooses: softmax over all experts, then the top_k best.
struct Route {
    const Matrix* product;  // [num_experts, hidden]
    const float* bias;      // null: none
    const float* penalty;   // added to the probabilities; null: every expert may be picked
    int32_t top_k;
    int32_t normalise;      // the chosen probabilities are divided by their sum
    int32_t equal;          // every chosen expert counts 1
    float scale;
};

// The second half of a layer whose experts are all in memory.
struct MoePart {
    const float* norm;
    Route route;
    ExpertShape shape;
    const uint8_t* const* records;  // [num_experts]
};

// A MoE layer over rows that have chosen their experts.
struct ExpertCall {
    ExpertShape shape;
    const float* x;  // [tokens][hidden]
    int64_t tokens;
    const int32_t* ids;  // [tokens][top_k]
    int64_t top_k;
    const uint8_t* const* records;  // [num_experts]; null: not in this call
    int64_t num_experts;
    float* out;  // [tokens * top_k][hidden]
    int64_t threads;
};

// Activations in every form that some part of the matrix reads (the others are null).
struct Input {
    const float* x;        // [rows][ldx], zero-padded to a multiple of 4 columns
    int64_t ldx;
    const uint16_t* bf16;  // [rows][ld_bf16], zero-padded to a multiple of 32 (AMX only)
    int64_t ld_bf16;
    // [rows][ld_groups][64]: a high and a low plane of 32 bytes, x = 128 * high + low; with CT_WORDS 32
    // integers of 16 bits, of every four columns the order 0, 2, 1, 3
    const int8_t* planes;
    const float* scale;    // [rows][ld_groups]
    const float* sum;      // [rows][ld_groups]: scale * sum of the group's integers
    const int32_t* isum;   // [rows][ld_groups]: W_OFFSET * sum of the group's integers
    const float* half_sum;  // [rows][ld_groups][2]: scale * sum of the integers of each half
    int64_t ld_groups;
};

#if !defined(CT_PLANES)
#define CT_PLANES 2
#endif
constexpr int PLANES = CT_PLANES;                     // 1: activations of 8 bits, for comparison
constexpr float TOP = PLANES == 2 ? 16256.0f : 127.0f;  // the largest activation integer

constexpr int BF16_K = 32;  // k is padded to whole AMX tiles on every machine: packed bytes travel

CT_INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

#if defined(CT_AMX_EMULATION) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__))
#define CT_AMX 1
bool amx_ready();  // asks the kernel for tile state once
#else
#define CT_AMX 0
CT_INLINE bool amx_ready() { return false; }
#endif
