// The second half of a layer with experts, inside a team: norm, gate, experts, residual. And the gate
// alone. All experts must be in memory.
#pragma once
#include "experts.h"

// y (=, +=) x W^T
static inline void plain_gemm(Team& team, InputBuffers& buffers, const Matrix& matrix, const float* x, int64_t rows, float* y, Epilogue epilogue) {
    Encoder encoder(buffers, matrix);
    gemm(team, matrix, encoder.fill(team, rows, [&](int64_t row, int64_t from, int64_t end, float* out) {
        memcpy(out, x + row * matrix.k + from, (end - from) * sizeof(float));
    }), rows, y, epilogue);
}

struct MoeSpace {
    InputBuffers input;
    ExpertSpace experts;
    Buffer normed, logits, weights, out;
};

constexpr int ROUTE_PHASES = 3;             // the product with its input, the choice
constexpr int MOE_PHASES = ROUTE_PHASES + 6;  // norm, grouping, three of the experts, residual

// ids and weights: [rows][top_k].
void route_rows(Team& team, MoeSpace& space, const Route& route, const float* x, int64_t rows, int32_t* ids, float* weights);
// Before the team starts.
void reserve_route(MoeSpace& space, const Route& route, int64_t rows);
void reserve_moe(MoeSpace& space, const MoePart& part, int64_t rows);
// hidden += the experts of norm(hidden); ids [rows][top_k] are written.
void run_moe(Team& team, MoeSpace& space, const MoePart& part, float eps, int64_t rows, float* hidden, int32_t* ids);
